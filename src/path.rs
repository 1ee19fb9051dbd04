//! Raw paths of requests, which are compared and forwarded as they were sent: never decoded, but forgiving about what base
//! URLs with a slash or a version too many or too few do to them. Pure.

use std::borrow::Cow;

/// The paths that clients of OpenAI and Anthropic call when their base URL lacks the version.
const UNVERSIONED: [&str; 13] = [
    "/chat/completions",
    "/completions",
    "/responses",
    "/embeddings",
    "/models",
    "/messages",
    "/moderations",
    "/audio/speech",
    "/audio/transcriptions",
    "/audio/translations",
    "/images/generations",
    "/images/edits",
    "/images/variations",
];

/// What clients of Gemini do with a model, which tells their path without its version from OpenAI's.
const GEMINI_METHODS: [&str; 7] = [
    "generateContent",
    "streamGenerateContent",
    "countTokens",
    "embedContent",
    "batchEmbedContents",
    "predict",
    "predictLongRunning",
];

/// What follows a prefix that ends at the border of a segment: nothing, or a slash and more.
pub fn below<'p>(path: &'p str, prefix: &str) -> Option<&'p str> {
    path.strip_prefix(prefix).filter(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether a path lies below this prefix. Everything lies below `/`.
pub fn is_below(path: &str, prefix: &str) -> bool {
    prefix == "/" || below(path, prefix).is_some()
}

/// Whether the last segment is `v1`, `v1beta`, `v4` or one of their kin.
pub fn ends_in_version(path: &str) -> bool {
    path.rsplit('/').next().is_some_and(is_version)
}

/// The version that a client with a base URL without one means.
pub fn missing_version(path: &str) -> Option<&'static str> {
    if !UNVERSIONED.iter().any(|known| is_below(path, known)) {
        return None;
    }
    let method = path.rsplit_once(':').map_or("", |(_, method)| method);
    Some(if GEMINI_METHODS.contains(&method) { "/v1beta" } else { "/v1" })
}

/// The path without the slashes and versions that stand twice at its start.
pub fn tidy(path: &str) -> Cow<'_, str> {
    let path = one_slash(path);
    let Some(version) = first_segment(path).filter(|segment| is_version(segment)) else {
        return Cow::Borrowed(path);
    };
    let behind = &path[1 + version.len()..];
    let rest = one_slash(behind);
    let again = first_segment(rest) == Some(version) && rest.len() > 1 + version.len();
    if again {
        tidy(rest)
    } else if rest.len() < behind.len() {
        Cow::Owned(format!("/{version}{rest}"))
    } else {
        Cow::Borrowed(path)
    }
}

/// The path with one slash at its start where there are several.
pub fn one_slash(path: &str) -> &str {
    let slashes = path.bytes().take_while(|byte| *byte == b'/').count();
    &path[slashes.max(1) - 1..]
}

fn first_segment(path: &str) -> Option<&str> {
    path.strip_prefix('/')?.split('/').next()
}

fn is_version(segment: &str) -> bool {
    let rest = segment.strip_prefix('v').unwrap_or_default();
    rest.starts_with(|c: char| c.is_ascii_digit()) && rest.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_ends_at_the_border_of_a_segment() {
        assert_eq!(
            (below("/v1/x", "/v1"), below("/v1", "/v1"), below("/v1x", "/v1")),
            (Some("/x"), Some(""), None)
        );
        assert!(is_below("/anything", "/") && !is_below("/v10", "/v1"));
    }

    #[test]
    fn what_stands_twice_at_the_start_stands_once() {
        for (path, expected) in [
            ("//x", "/x"),
            ("///", "/"),
            ("/v1/v1/messages", "/v1/messages"),
            ("/v1/v1/v1/messages", "/v1/messages"),
            ("/v1//v1//messages", "/v1/messages"),
            ("/v1//messages", "/v1/messages"),
            ("/v1beta/v1beta/models", "/v1beta/models"),
            ("/v1beta/v1/models", "/v1beta/v1/models"),
            ("/v1/v1", "/v1/v1"),
            ("/v1/v1/", "/v1/"),
            ("/v1/x//y", "/v1/x//y"),
            ("/x//y", "/x//y"),
            ("/v1", "/v1"),
            ("/", "/"),
            ("", ""),
        ] {
            assert_eq!(tidy(path), expected, "{path}");
        }
    }

    #[test]
    fn a_missing_version_is_known_by_what_is_called() {
        for (path, version) in [
            ("/chat/completions", Some("/v1")),
            ("/models/", Some("/v1")),
            ("/models/ft:gpt:predicted", Some("/v1")),
            ("/models/g:streamGenerateContent", Some("/v1beta")),
            ("/v1/models", None),
            ("/modelsx", None),
            ("/files", None),
        ] {
            assert_eq!(missing_version(path), version, "{path}");
        }
        for (path, ends) in
            [("/v1", true), ("/a/v4", true), ("/v1beta", true), ("/v", false), ("/v1/x", false), ("", false)]
        {
            assert_eq!(ends_in_version(path), ends, "{path}");
        }
    }
}
