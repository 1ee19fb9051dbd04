//! Requests that use up nothing of a limit: those that only count tokens, for example, which clients send before every
//! request that costs something. Pure.

use std::str::FromStr;

use hyper::Method;

use crate::pattern::Pattern;

/// A path, or with one `*` several: `/v1/models`, `/v1/files/*`, `/v1beta/models/*:countTokens`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern(Pattern);

/// The text is no [`PathPattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a path; expected one such as \"/v1/messages/count_tokens\", or with one `*` such as \"/v1/files/*\", without \
     `%` and without a query"
)]
pub struct InvalidPath;

impl FromStr for PathPattern {
    type Err = InvalidPath;

    fn from_str(text: &str) -> Result<Self, InvalidPath> {
        let is_plain = |byte: u8| byte.is_ascii_graphic() && !b"%?#\\".contains(&byte);
        if !text.starts_with('/') || !text.bytes().all(is_plain) {
            return Err(InvalidPath);
        }
        text.parse().map(Self).map_err(|_| InvalidPath)
    }
}

impl PathPattern {
    fn fits(&self, path: &str) -> bool {
        let Some(star) = self.0.star(path) else { return false };
        let is_one = |behind: &str| behind.is_empty() || is_one_name(star, behind);
        is_harmless(star) && self.0.behind().is_none_or(is_one)
    }
}

/// In the middle stands one name: no second method behind a colon, and no `;`, behind which some servers read nothing.
fn is_one_name(star: &str, behind: &str) -> bool {
    let has_method = behind.starts_with(':') && star.contains(':');
    !has_method && !star.contains(['/', ';'])
}

/// What an upstream could decode to another path is counted, whatever it is.
fn is_harmless(star: &str) -> bool {
    !star.contains('%')
}

/// What is not counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uncounted(Vec<PathPattern>);

impl FromIterator<PathPattern> for Uncounted {
    fn from_iter<I: IntoIterator<Item = PathPattern>>(patterns: I) -> Self {
        Self(patterns.into_iter().collect())
    }
}

/// The ways in which Anthropic, OpenAI and Google count tokens.
impl Default for Uncounted {
    fn default() -> Self {
        ["/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1beta/models/*:countTokens"]
            .into_iter()
            .map(|text| text.parse::<PathPattern>().expect("the default patterns are valid"))
            .collect()
    }
}

impl Uncounted {
    /// Whether a request is not counted. `path` is the one that the upstream is asked for. An OPTIONS asks what there is
    /// and gets it for nothing, unless it has a body, which may make it something else to an upstream.
    pub fn include(&self, method: &Method, path: &str, body_is_empty: bool) -> bool {
        (method == Method::OPTIONS && body_is_empty) || self.0.iter().any(|pattern| pattern.fits(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uncounted(patterns: &[&str], path: &str) -> bool {
        let patterns: Uncounted = patterns.iter().map(|text| text.parse::<PathPattern>().unwrap()).collect();
        patterns.include(&Method::POST, path, false)
    }

    #[test]
    fn counting_tokens_costs_nothing() {
        let uncounted = Uncounted::default();
        for path in [
            "/v1/messages/count_tokens",
            "/v1/responses/input_tokens",
            "/v1beta/models/gemini-2.5-pro:countTokens",
        ] {
            assert!(uncounted.include(&Method::POST, path, false), "{path}");
        }
        for path in [
            "/v1/messages",
            "/v1/messages/count_tokens/",
            "/v1/messages/count_tokens/x",
            "/v1beta/models/g:generateContent",
            "/v1beta/models/a/b:countTokens",
            "/v1beta/models/g:generateContent%2F:countTokens",
            "/v1beta/models/g:generateContent:countTokens",
            "/v1beta/models/g:generateContent;:countTokens",
            "/v1beta/models/g;:countTokens",
        ] {
            assert!(!uncounted.include(&Method::POST, path, false), "{path}");
        }
    }

    #[test]
    fn a_star_at_the_end_stands_for_all_that_follows() {
        for (path, expected) in [
            ("/v1/files/", true),
            ("/v1/files/a/content", true),
            ("/v1/files", false),
            ("/v1/files/..%2f..%2fchat", false),
            ("/v1/filesystem", false),
        ] {
            assert_eq!(uncounted(&["/v1/files/*"], path), expected, "{path}");
        }
    }

    #[test]
    fn a_question_what_there_is_costs_nothing() {
        let nothing = Uncounted(Vec::new());
        assert!(nothing.include(&Method::OPTIONS, "/v1/x", true));
        assert!(!nothing.include(&Method::OPTIONS, "/v1/x", false));
        assert!(!nothing.include(&Method::GET, "/v1/x", true));
    }

    #[test]
    fn a_pattern_is_a_path() {
        for text in ["", "v1", "*", "/a?b", "/a%2fb", "/a/*/b/*", "/a b", "/ä", "/a#b"] {
            assert_eq!(text.parse::<PathPattern>(), Err(InvalidPath), "{text}");
        }
    }
}
