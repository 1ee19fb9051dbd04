//! Fields of an upstream's answers that clients do not get to see.

use std::str::FromStr;

use hyper::{
    HeaderMap,
    header::{self, HeaderName},
};

/// Without these no client can read an answer, or take it for the one to its WebSocket's handshake.
static NEEDED: [HeaderName; 9] = [
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::SEC_WEBSOCKET_ACCEPT,
    header::SEC_WEBSOCKET_EXTENSIONS,
    header::SEC_WEBSOCKET_PROTOCOL,
];

/// One field, or all that begin alike: `set-cookie`, `x-ratelimit-*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// This one.
    Name(HeaderName),
    /// All whose names begin so, in lower case.
    Prefix(String),
}

/// Why a text is no [`Pattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPattern {
    /// It names nothing.
    #[error(
        "not the name of a header; expected one such as \"set-cookie\", or a beginning such as \"x-ratelimit-*\""
    )]
    Name,
    /// It names what must stay.
    #[error("this would hide `{0}`, without which no client can read an answer; leave it out")]
    Needed(HeaderName),
}

impl FromStr for Pattern {
    type Err = InvalidPattern;

    fn from_str(text: &str) -> Result<Self, InvalidPattern> {
        let pattern = match text.strip_suffix('*') {
            None => Self::Name(name(text)?),
            Some("") => Self::Prefix(String::new()),
            Some(beginning) => Self::Prefix(name(beginning)?.as_str().to_owned()),
        };
        match NEEDED.iter().find(|needed| pattern.fits(needed)) {
            Some(needed) => Err(InvalidPattern::Needed(needed.clone())),
            None => Ok(pattern),
        }
    }
}

/// HTTP allows a `*` in a name, but here it stands for what follows, and stands once.
fn name(text: &str) -> Result<HeaderName, InvalidPattern> {
    text.parse().ok().filter(|_| !text.contains('*')).ok_or(InvalidPattern::Name)
}

impl Pattern {
    fn fits(&self, name: &HeaderName) -> bool {
        match self {
            Self::Name(hidden) => hidden == name,
            Self::Prefix(beginning) => name.as_str().starts_with(&**beginning),
        }
    }
}

/// What is hidden of one upstream's answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hidden(Vec<Pattern>);

impl FromIterator<Pattern> for Hidden {
    fn from_iter<I: IntoIterator<Item = Pattern>>(patterns: I) -> Self {
        Self(patterns.into_iter().collect())
    }
}

impl Hidden {
    /// Removes it all. Tollgate's own fields are set later, whatever their names.
    pub fn remove_from(&self, headers: &mut HeaderMap) {
        for pattern in &self.0 {
            match pattern {
                Pattern::Name(name) => drop(headers.remove(name)),
                Pattern::Prefix(_) => {
                    let fitting: Vec<HeaderName> =
                        headers.keys().filter(|name| pattern.fits(name)).cloned().collect();
                    fitting.iter().for_each(|name| drop(headers.remove(name)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn what_is_hidden_goes_and_the_rest_stays() {
        let mut headers = HeaderMap::new();
        for name in [
            "set-cookie",
            "openai-organization",
            "vary",
            "x-ratelimit-limit-requests",
            "set-cookie",
            "x-ratelimit",
            "openai-organization-id",
            "vary",
        ] {
            headers.append(name, HeaderValue::from_static("1"));
        }
        let hidden = ["OpenAI-Organization", "x-ratelimit-*", "set-cookie"];
        let hidden: Hidden = hidden.iter().map(|text| text.parse::<Pattern>().unwrap()).collect();
        hidden.remove_from(&mut headers);
        let mut left: Vec<_> = headers.iter().map(|(name, _)| name.as_str()).collect();
        left.sort_unstable();
        assert_eq!(left, ["openai-organization-id", "vary", "vary", "x-ratelimit"]);
    }

    #[test]
    fn what_a_client_needs_is_never_hidden() {
        for (text, needed) in [
            ("content-type", header::CONTENT_TYPE),
            ("Content-Length", header::CONTENT_LENGTH),
            ("content-*", header::CONTENT_ENCODING),
            ("*", header::CONTENT_ENCODING),
            ("transfer-encoding", header::TRANSFER_ENCODING),
            ("sec-*", header::SEC_WEBSOCKET_ACCEPT),
            ("sec-websocket-protocol", header::SEC_WEBSOCKET_PROTOCOL),
        ] {
            assert_eq!(text.parse::<Pattern>(), Err(InvalidPattern::Needed(needed)), "{text}");
        }
        for text in ["", "a b", "x:*", "x-*-y", "**", "ä"] {
            assert_eq!(text.parse::<Pattern>(), Err(InvalidPattern::Name), "{text}");
        }
    }
}
