//! Where a request goes: from its path to an upstream. Pure.

use std::{borrow::Cow, sync::Arc};

use crate::upstream::Target;

/// The paths that clients call when their base URL lacks the version.
const UNVERSIONED: [&str; 7] = [
    "/chat/completions",
    "/completions",
    "/responses",
    "/embeddings",
    "/models",
    "/messages",
    "/moderations",
];

/// No upstream serves this path.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("no upstream serves this path")]
pub struct NoRoute;

/// All prefixes, the longest first.
#[derive(Clone, Debug)]
pub struct RouteTable(Vec<(String, Arc<Target>)>);

/// Where one request goes.
#[derive(Clone, Debug)]
pub struct Route {
    /// The upstream.
    pub target: Arc<Target>,
    /// The path to ask it for, before its base path is put in front.
    pub path: String,
}

impl RouteTable {
    /// A table of prefixes, each `/` or without a slash at its end.
    pub fn new(mut routes: Vec<(String, Arc<Target>)>) -> Self {
        routes.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
        Self(routes)
    }

    /// The upstream with the longest prefix of `path`. A path that no prefix fits is tried in the form that its client
    /// most likely meant; the path itself is never decoded.
    pub fn resolve(&self, path: &str) -> Result<Route, NoRoute> {
        let path = tidy(path);
        let target =
            |path: &str| self.0.iter().find(|(prefix, _)| is_prefix(prefix, path)).map(|(_, target)| target);
        if is_unversioned(&path) {
            let versioned = format!("/v1{path}");
            // A prefix `/` serves everything, so the version is what the upstream lacks there too.
            if let Some(target) = target(&versioned) {
                return Ok(Route { target: target.clone(), path: versioned });
            }
        }
        let target = target(&path).ok_or(NoRoute)?;
        Ok(Route { target: target.clone(), path: path.into_owned() })
    }
}

fn is_prefix(prefix: &str, path: &str) -> bool {
    prefix == "/" || path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn is_unversioned(path: &str) -> bool {
    UNVERSIONED.iter().any(|known| is_prefix(known, path))
}

/// Undoes what base URLs with one slash or one version too many do to a path.
fn tidy(path: &str) -> Cow<'_, str> {
    let start = path.bytes().take_while(|byte| *byte == b'/').count().max(1) - 1;
    let path = &path[start..];
    match path.strip_prefix("/v1/v1/") {
        Some(rest) => Cow::Owned(format!("/v1/{rest}")),
        None => Cow::Borrowed(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(prefixes: &[&str]) -> RouteTable {
        let target = |prefix: &str| Arc::new(Target::for_test(prefix, None));
        RouteTable::new(prefixes.iter().map(|prefix| ((*prefix).to_owned(), target(prefix))).collect())
    }

    fn resolved(prefixes: &[&str], path: &str) -> Option<(String, String)> {
        let route = table(prefixes).resolve(path).ok()?;
        Some((route.target.name.to_string(), route.path))
    }

    fn hit(prefixes: &[&str], path: &str, prefix: &str, sent: &str) {
        assert_eq!(resolved(prefixes, path), Some((prefix.to_owned(), sent.to_owned())), "{path}");
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
            assert_eq!(resolved(&prefixes, path), None, "{path}");
        }
    }

    #[test]
    fn bytes_of_a_path_are_kept() {
        for path in ["/v1/models/org%2Fmodel:tag", "/v1/a%20b//c", "/v1/x;y=1", "/v1/%E2%82%AC"] {
            hit(&["/"], path, "/", path);
        }
    }

    #[test]
    fn base_urls_that_are_slightly_off_still_work() {
        let prefixes = ["/v1"];
        for path in ["/v1/messages", "//v1/messages", "/v1/v1/messages", "/messages", "//messages"] {
            hit(&prefixes, path, "/v1", "/v1/messages");
        }
        hit(&prefixes, "/chat/completions", "/v1", "/v1/chat/completions");
        hit(&["/"], "/chat/completions", "/", "/v1/chat/completions");
        hit(&["/"], "/api/chat", "/", "/api/chat");
        hit(&["/"], "/", "/", "/");
        hit(&prefixes, "/v1/", "/v1", "/v1/");
        hit(&["/messages"], "/messages", "/messages", "/messages");
    }
}
