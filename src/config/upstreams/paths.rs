//! Which paths go to an upstream: `paths`, `strip_prefix`.

use super::Match;
use crate::{
    config::{field::Field, source::Unique, table::TableReader},
    path,
    pattern::Pattern,
};

/// What no two upstreams have in common: a prefix with a host and a model.
pub(super) type Claim = (String, Option<Pattern>, Option<Pattern>);

/// Which requests go to an upstream that names no paths, and no host or model either.
#[derive(Clone, Copy)]
pub(super) enum Unnamed {
    /// All: there is no other one.
    Everything,
    /// None but those that another upstream leaves to it.
    Nothing,
    /// Nobody can tell.
    Wrong,
}

/// Each prefix is claimed for what `matches` says; if that is nothing, it was wrong, and nobody knows. Where `match` tells
/// what comes here, that can be every path.
pub(super) fn paths(
    table: &mut TableReader<'_>,
    unnamed: Unnamed,
    matches: (Option<Field<'_>>, Option<&Match>),
    taken: &mut Unique<Claim>,
) -> Vec<String> {
    let Some(field) = table.field("paths") else {
        let every = "/".to_owned();
        return match (matches, unnamed) {
            ((Some(place), matches), _) => {
                claim(&every, matches, place, taken);
                vec![every]
            }
            (_, Unnamed::Everything) => vec![every],
            (_, Unnamed::Nothing) => Vec::new(),
            (_, Unnamed::Wrong) => {
                table.report_missing(
                    "`paths` is missing; with several upstreams each names its own, such as `paths = [\"/v1\"]`"
                        .to_owned(),
                );
                Vec::new()
            }
        };
    };
    let items = field.items().unwrap_or_default();
    if field.is_empty_array() {
        field.report("no request would come here; expected at least one prefix, such as \"/v1\"".to_owned());
    }
    let mut prefixes = Vec::new();
    for item in items {
        if let Some(prefix) = item.parsed(prefix) {
            claim(&prefix, matches.1, item, taken);
            prefixes.push(prefix);
        }
    }
    prefixes
}

/// Reports once, however much of it is taken.
fn claim(prefix: &str, matches: Option<&Match>, place: Field<'_>, taken: &mut Unique<Claim>) {
    let mut each = matches.into_iter().flat_map(Match::each);
    let _all_free =
        each.all(|(host, model)| taken.claim((prefix.to_owned(), host.cloned(), model.cloned()), place));
}

/// A prefix of all paths, which there is something of.
pub(super) fn strip_prefix(field: Field<'_>, paths: &[String]) -> Option<String> {
    let strip = field.parsed(prefix)?;
    if strip == "/" {
        return field.wrong(
            "there is nothing to take off; leave it out, or write one such as \"/openai\"".to_owned(),
        );
    }
    match paths.iter().find(|path| path::below(path, &strip).is_none()) {
        None => Some(strip),
        Some(path) => field.wrong(format!("each of `paths` must begin with it, and `{path}` does not")),
    }
}

/// A prefix without the slash at its end. It is compared with the path as it was sent, so what could be written in two
/// ways is refused.
fn prefix(text: &str) -> Result<String, &'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._~!$&'()*+,;=:@/".contains(c);
    if !text.starts_with('/') {
        return Err("a prefix begins with `/`, such as \"/v1\"");
    }
    if text.contains('%') {
        return Err("a prefix is compared with the path as it was sent; write it without `%`");
    }
    if !text.chars().all(plain) {
        return Err(
            "a prefix holds letters, digits and `-._~!$&'()*+,;=:@/`: no space, no query, no fragment",
        );
    }
    if text.contains("//") || text.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("a prefix has no empty, `.` or `..` segments; write the path that they lead to");
    }
    let trimmed = text.trim_end_matches('/');
    Ok(if trimmed.is_empty() { "/".to_owned() } else { trimmed.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_has_one_spelling() {
        for (text, expected) in [
            ("/", "/"),
            ("/v1", "/v1"),
            ("/v1/", "/v1"),
            ("/openai/v1/chat", "/openai/v1/chat"),
            ("/v1/models/x:y", "/v1/models/x:y"),
            ("/v1...", "/v1..."),
        ] {
            assert_eq!(prefix(text).as_deref(), Ok(expected), "{text}");
        }
        let wrong = [
            "",
            "v1",
            "http://x/",
            "/a?b",
            "/a#b",
            "/%2e%2e",
            "/a/../b",
            "/..",
            "/./a",
            "//",
            "/a//b",
            "/a//",
            "/a b",
            "/a\n",
            "/ä",
            "/a\\b",
            "/v1/*/{x}",
        ];
        for text in wrong {
            assert!(prefix(text).is_err(), "{text}");
        }
    }
}
