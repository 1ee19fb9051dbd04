//! Where a request goes: from its path, its host and its model to an upstream. Pure.
//!
//! Of all routes that fit, the one that says most wins: the longest prefix first, then a host before none, then a model
//! before none; between two hosts or models, whole words before wildcards and long ones before short ones.

use std::{borrow::Cow, cmp::Reverse, sync::Arc};

use hyper::Uri;

use crate::{
    media::{Media, SizeBounds},
    path,
    pattern::Pattern,
    upstream::Upstream,
};

/// Why a request has no route.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoute {
    /// No upstream serves its path, at its host.
    #[error("no upstream serves this path")]
    Path,
    /// None serves this model there.
    #[error("no upstream serves the model `{0}`")]
    Model(String),
    /// Only its model can tell where it goes, and none was found.
    #[error("no model was found, and the route depends on it")]
    Unnamed,
}

/// One way to one upstream.
#[derive(Clone, Debug)]
pub struct Rule {
    /// What a path begins with: `/`, or without a slash at its end.
    pub prefix: String,
    /// What is taken off the path before the upstream gets it: empty, or a prefix of `prefix`.
    pub strip: Arc<str>,
    /// Which host, in lower case; nothing: any.
    pub host: Option<Pattern>,
    /// Which model; nothing: any, or none.
    pub model: Option<Pattern>,
    /// The upstream.
    pub upstream: Arc<Upstream>,
    /// How large bodies may be that go there.
    pub sizes: SizeBounds,
}

/// All rules, the one that says most first.
#[derive(Clone, Debug)]
pub struct RouteTable {
    rules: Vec<Rule>,
    asks_for_host: bool,
}

/// Where one request goes.
#[derive(Clone, Debug)]
pub struct Route {
    /// The upstream.
    pub upstream: Arc<Upstream>,
    /// The path to ask it for, before its base path is put in front.
    pub path: String,
    /// What was taken off the client's path, if that is anything.
    stripped: Option<Arc<str>>,
    sizes: SizeBounds,
}

impl Route {
    /// How many bytes of this kind it takes.
    pub fn most_bytes(&self, media: Media<'_>) -> u64 {
        self.sizes.of(media)
    }

    /// The path and query by which clients ask for a URL of this upstream's; nothing for a URL of another origin.
    pub fn own(&self, url: &Uri) -> Option<String> {
        let target = self.upstream.own(url)?;
        Some(match &self.stripped {
            Some(prefix) => format!("{prefix}{target}"),
            None => target,
        })
    }

    /// A route that takes bodies of any size.
    #[cfg(test)]
    pub(crate) fn for_test(upstream: Upstream, path: &str) -> Self {
        let sizes = SizeBounds { text: crate::media::UNBOUNDED, file: crate::media::UNBOUNDED };
        Self { upstream: Arc::new(upstream), path: path.to_owned(), stripped: None, sizes }
    }
}

/// What path and host say of where a request goes.
#[derive(Clone, Debug)]
pub enum Destination {
    /// All that there is to say.
    Settled(Route),
    /// The model decides.
    ByModel(Choice),
}

impl Destination {
    /// Every route that it may come to; at least one.
    pub fn routes(&self) -> impl Iterator<Item = &Route> {
        let (by_model, otherwise) = match self {
            Self::Settled(route) => (&[][..], Some(route)),
            Self::ByModel(choice) => (&*choice.by_model, choice.otherwise.as_ref()),
        };
        by_model.iter().map(|(_, route)| route).chain(otherwise)
    }

    /// How many bytes of this kind at least one of its routes takes.
    pub fn most_bytes(&self, media: Media<'_>) -> u64 {
        self.routes().map(|route| route.most_bytes(media)).max().unwrap_or_default()
    }
}

/// The routes of a request whose model decides.
#[derive(Clone, Debug)]
pub struct Choice {
    by_model: Vec<(Pattern, Route)>,
    otherwise: Option<Route>,
}

impl Choice {
    /// The route for this model, or for a request that names none.
    pub fn choose(self, model: Option<&str>) -> Result<Route, NoRoute> {
        let fits = |(pattern, _): &(Pattern, Route)| model.is_some_and(|model| pattern.matches(model));
        let chosen = self.by_model.into_iter().find(fits).map(|(_, route)| route).or(self.otherwise);
        chosen.ok_or_else(|| model.map_or(NoRoute::Unnamed, |model| NoRoute::Model(model.to_owned())))
    }
}

impl RouteTable {
    /// A table of these rules.
    pub fn new(mut rules: Vec<Rule>) -> Self {
        let said = |pattern: &Option<Pattern>| pattern.as_ref().map(Pattern::specificity);
        rules.sort_by_key(|rule| Reverse((rule.prefix.len(), said(&rule.host), said(&rule.model))));
        let asks_for_host = rules.iter().any(|rule| rule.host.is_some());
        Self { rules, asks_for_host }
    }

    /// Whether it matters at which host a request arrives.
    pub fn asks_for_host(&self) -> bool {
        self.asks_for_host
    }

    /// The way of a request with this raw path and this host, which may have a port. A path that nothing fits as it is
    /// is tried in the form that its client most likely meant; it is never decoded.
    pub fn resolve(&self, host: &str, path: &str) -> Result<Destination, NoRoute> {
        let host = if self.asks_for_host { bare_host(host) } else { String::new() };
        let here = |rule: &&Rule| rule.host.as_ref().is_none_or(|pattern| pattern.matches(&host));
        let rules = || self.rules.iter().filter(here);
        let reading =
            if rules().any(|rule| rule.serves_by_name(path)) { Reading::AsSent } else { Reading::AsMeant };
        let mut by_model = Vec::new();
        for rule in rules() {
            let Some(path) = rule.path(path, reading) else { continue };
            let stripped = Some(&rule.strip).filter(|prefix| !prefix.is_empty()).cloned();
            let route = Route {
                upstream: rule.upstream.clone(),
                path: path.into_owned(),
                stripped,
                sizes: rule.sizes,
            };
            match &rule.model {
                Some(model) => by_model.push((model.clone(), route)),
                None if by_model.is_empty() => return Ok(Destination::Settled(route)),
                None => return Ok(Destination::ByModel(Choice { by_model, otherwise: Some(route) })),
            }
        }
        if by_model.is_empty() {
            return Err(NoRoute::Path);
        }
        Ok(Destination::ByModel(Choice { by_model, otherwise: None }))
    }
}

/// How a path without a version is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// There is a prefix for it.
    AsSent,
    /// The version is missing, for the client's base URL lacks it.
    AsMeant,
}

impl Rule {
    /// Whether its prefix names this path though a version is missing in it.
    fn serves_by_name(&self, path: &str) -> bool {
        let prefix = self.prefix_below();
        if prefix == "/" {
            return false;
        }
        let names =
            |below: Cow<'_, str>| path::is_below(&below, prefix) && path::missing_version(&below).is_some();
        self.below(path).is_some_and(names)
    }

    /// The path as the upstream is to be asked for it; nothing if this rule does not serve it.
    fn path<'p>(&self, path: &'p str, reading: Reading) -> Option<Cow<'p, str>> {
        let below = self.below(path)?;
        // What was taken off may have been the version.
        let whole = !path::ends_in_version(&self.strip);
        if let Some(version) = path::missing_version(&below).filter(|_| whole && reading == Reading::AsMeant)
        {
            let versioned = format!("{version}{below}");
            // A prefix `/` serves everything, so the version is what the upstream lacks there too.
            if path::is_below(&versioned, self.prefix_below()) {
                return Some(Cow::Owned(versioned));
            }
        }
        path::is_below(&below, self.prefix_below()).then_some(below)
    }

    /// What is left of the path without what is taken off.
    fn below<'p>(&self, path: &'p str) -> Option<Cow<'p, str>> {
        match path::tidy(path) {
            Cow::Borrowed(path) => self.stripped(path),
            Cow::Owned(path) => Some(Cow::Owned(self.stripped(&path)?.into_owned())),
        }
    }

    fn stripped<'p>(&self, path: &'p str) -> Option<Cow<'p, str>> {
        match path::below(path, &self.strip) {
            Some(_) if self.strip.is_empty() => Some(Cow::Borrowed(path)),
            Some("") => Some(Cow::Borrowed("/")),
            Some(rest) => Some(path::tidy(rest)),
            // A version that would be taken off need not be there.
            None => (path::missing_version(path) == Some(&*self.strip)).then_some(Cow::Borrowed(path)),
        }
    }

    fn prefix_below(&self) -> &str {
        match &self.prefix[self.strip.len()..] {
            "" => "/",
            prefix => prefix,
        }
    }
}

/// The host without its port and the dot that may end it, in lower case.
fn bare_host(host: &str) -> String {
    let end = match host.rfind(']') {
        Some(bracket) => bracket + 1,
        None => host.find(':').unwrap_or(host.len()),
    };
    host[..end].trim_end_matches('.').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::media::UNBOUNDED;

    /// A rule as `NAME STRIP|PREFIX host=… model=…`.
    fn rule(text: &str) -> Rule {
        let mut words = text.split(' ');
        let (name, paths) = (words.next().unwrap(), words.next().unwrap());
        let (strip, below) = paths.split_once('|').unwrap_or(("", paths));
        let pattern = |key: &str| {
            let value = text.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
            value.map(|value| value.parse().unwrap())
        };
        Rule {
            prefix: format!("{strip}{below}"),
            strip: strip.into(),
            host: pattern("host"),
            model: pattern("model"),
            upstream: Arc::new(Upstream::for_test(name, None)),
            sizes: SizeBounds { text: 1, file: UNBOUNDED },
        }
    }

    fn table(rules: &[&str]) -> RouteTable {
        RouteTable::new(rules.iter().map(|text| rule(text)).collect())
    }

    /// The upstream's name and the path it is asked for.
    fn resolved(rules: &[&str], host: &str, path: &str, model: Option<&str>) -> Result<String, NoRoute> {
        let route = match table(rules).resolve(host, path)? {
            Destination::Settled(route) => route,
            Destination::ByModel(choice) => choice.choose(model)?,
        };
        Ok(format!("{} {}", route.upstream.name, route.path))
    }

    fn hit(prefixes: &[&str], path: &str, prefix: &str, sent: &str) {
        let rules: Vec<_> = prefixes.iter().map(|prefix| format!("{prefix} {prefix}")).collect();
        let rules: Vec<_> = rules.iter().map(|rule| &**rule).collect();
        assert_eq!(resolved(&rules, "h", path, None), Ok(format!("{prefix} {sent}")), "{path}");
    }

    #[test]
    fn the_longest_prefix_wins_at_a_segment_border() {
        let prefixes = ["/v1", "/v1/messages", "/v1beta"];
        hit(&prefixes, "/v1/chat/completions", "/v1", "/v1/chat/completions");
        hit(&prefixes, "/v1/messages/count_tokens", "/v1/messages", "/v1/messages/count_tokens");
        hit(&prefixes, "/v1/messages2", "/v1", "/v1/messages2");
        hit(&prefixes, "/v1beta/models/a:generateContent", "/v1beta", "/v1beta/models/a:generateContent");
        hit(&prefixes, "/v1", "/v1", "/v1");
        for path in ["/", "/v2", "/v1x", "/V1/models", "/admin"] {
            assert_eq!(resolved(&["a /v1", "b /v1beta"], "h", path, None), Err(NoRoute::Path), "{path}");
        }
    }

    #[test]
    fn bytes_of_a_path_are_kept() {
        for path in [
            "/v1/models/org%2Fmodel:tag",
            "/v1/a%20b//c",
            "/v1/x;y=1",
            "/v1/%E2%82%AC",
            "/openai/deployments/d/chat/completions",
            "/v1",
            "/v1/v1",
            "/x//y",
            "/v1/v1beta/x",
        ] {
            hit(&["/"], path, "/", path);
        }
    }

    #[test]
    fn base_urls_that_are_slightly_off_still_work() {
        let prefixes = ["/v1"];
        for path in [
            "/v1/messages",
            "//v1/messages",
            "/v1/v1/messages",
            "/v1//v1/v1/messages",
            "/v1//messages",
            "/messages",
            "///messages",
        ] {
            hit(&prefixes, path, "/v1", "/v1/messages");
        }
        hit(&prefixes, "/chat/completions", "/v1", "/v1/chat/completions");
        hit(&["/"], "/chat/completions", "/", "/v1/chat/completions");
        hit(&["/"], "/api/chat", "/", "/api/chat");
        hit(&["/"], "/", "/", "/");
        hit(&prefixes, "/v1/", "/v1", "/v1/");
        hit(&["/messages"], "/messages", "/messages", "/messages");
        hit(&["/messages", "/v1"], "/messages", "/messages", "/messages");
        hit(&["/messages", "/"], "/v1/messages", "/", "/v1/messages");
        let gemini = ["/v1beta", "/v1"];
        for path in [
            "/v1beta/v1beta/models/g:generateContent",
            "/models/g:generateContent",
            "//models/g:generateContent",
        ] {
            hit(&gemini, path, "/v1beta", "/v1beta/models/g:generateContent");
        }
        hit(&gemini, "/models/ft:gpt", "/v1", "/v1/models/ft:gpt");
    }

    #[test]
    fn a_stripped_prefix_is_gone_and_what_is_below_is_as_tolerant() {
        let rules = ["a /openai|", "b /az|/openai", "c /v1|", "d /"];
        for (path, expected) in [
            ("/openai/v1/chat/completions", "a /v1/chat/completions"),
            ("/openai/chat/completions", "a /v1/chat/completions"),
            ("/openai/v1/v1/models", "a /v1/models"),
            ("//openai//v1/models/", "a /v1/models/"),
            ("/openai/models/g:generateContent", "a /v1beta/models/g:generateContent"),
            ("/openai/x%2Fy//z", "a /x%2Fy//z"),
            ("/openai", "a /"),
            ("/openai/", "a /"),
            ("/openai2/x", "d /openai2/x"),
            ("/az/openai/deployments/d", "b /openai/deployments/d"),
            ("/az/else", "d /az/else"),
            // The version itself is taken off here, so that none is put back.
            ("/v1/chat/completions", "c /chat/completions"),
            ("/v1/v1/chat/completions", "c /chat/completions"),
            ("/chat/completions", "c /chat/completions"),
            ("/v1/x", "c /x"),
        ] {
            assert_eq!(resolved(&rules, "h", path, None).as_deref(), Ok(expected), "{path}");
        }
    }

    #[test]
    fn the_route_that_says_most_wins() {
        let rules = [
            "plain /v1",
            "eu /v1 host=eu.example.com",
            "any-example /v1 host=*.example.com",
            "claude /v1 model=claude-*",
            "opus /v1 model=claude-opus-*",
            "eu-claude /v1 host=eu.example.com model=claude-*",
            "long /v1/messages",
            "long-gpt /v1/messages model=gpt",
        ];
        for (host, path, model, expected) in [
            ("x", "/v1/x", None, "plain"),
            ("x", "/v1/x", Some("gpt"), "plain"),
            ("x", "/v1/x", Some("claude-3"), "claude"),
            ("x", "/v1/x", Some("claude-opus-4"), "opus"),
            ("EU.example.com:8443", "/v1/x", Some("gpt"), "eu"),
            ("eu.example.com.", "/v1/x", Some("claude-opus-4"), "eu-claude"),
            ("us.example.com", "/v1/x", Some("claude-3"), "any-example"),
            ("example.com", "/v1/x", None, "plain"),
            ("eu.example.com", "/v1/messages", Some("claude-3"), "long"),
            ("x", "/v1/messages", Some("gpt"), "long-gpt"),
            ("x", "/v1/messages", None, "long"),
            ("x", "/messages", Some("gpt"), "long-gpt"),
        ] {
            let found = resolved(&rules, host, path, model).unwrap();
            assert_eq!(found.split(' ').next(), Some(expected), "{host} {path} {model:?}");
        }
        assert_eq!(bare_host("[::1]:8443"), "[::1]");
    }

    #[test]
    fn a_model_that_no_route_fits_is_named_and_its_absence_told() {
        let rules = ["a /v1 model=claude-*", "b /v1 model=gpt", "c /v2"];
        assert_eq!(resolved(&rules, "h", "/v1/x", Some("gpt")).as_deref(), Ok("b /v1/x"));
        assert_eq!(resolved(&rules, "h", "/v1/x", Some("o3")), Err(NoRoute::Model("o3".to_owned())));
        assert_eq!(resolved(&rules, "h", "/v1/x", None), Err(NoRoute::Unnamed));
        assert!(matches!(table(&rules).resolve("h", "/v2/x"), Ok(Destination::Settled(_))));
        let shorter = ["a /v1/messages model=claude-*", "b /v1"];
        assert_eq!(resolved(&shorter, "h", "/v1/messages", Some("gpt")).as_deref(), Ok("b /v1/messages"));
    }
}
