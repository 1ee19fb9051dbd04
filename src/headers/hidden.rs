//! Fields of an upstream's answers that clients do not get to see.

use std::str::FromStr;

use hyper::{
    HeaderMap,
    header::{self, HeaderName},
};

use crate::pattern::Pattern;

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

/// The name of a field, or with one `*` those of several: `set-cookie`, `x-ratelimit-*`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldPattern(Pattern);

/// Why a text is no [`FieldPattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidField {
    /// It names nothing.
    #[error(
        "not the name of a header; expected one such as \"set-cookie\", or with one `*` such as \"x-ratelimit-*\""
    )]
    Name,
    /// It names what must stay.
    #[error("this would hide `{0}`, without which no client can read an answer; leave it out")]
    Needed(HeaderName),
}

impl FromStr for FieldPattern {
    type Err = InvalidField;

    fn from_str(text: &str) -> Result<Self, InvalidField> {
        let pattern: Pattern = text.to_ascii_lowercase().parse().map_err(|_| InvalidField::Name)?;
        // HTTP allows a `*` in a name, but here it stands for something else.
        HeaderName::from_str(text).map_err(|_| InvalidField::Name)?;
        match NEEDED.iter().find(|needed| pattern.matches(needed.as_str())) {
            Some(needed) => Err(InvalidField::Needed(needed.clone())),
            None => Ok(Self(pattern)),
        }
    }
}

/// What is hidden of one upstream's answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hidden(Vec<FieldPattern>);

impl FromIterator<FieldPattern> for Hidden {
    fn from_iter<I: IntoIterator<Item = FieldPattern>>(patterns: I) -> Self {
        Self(patterns.into_iter().collect())
    }
}

impl Hidden {
    /// Removes it all. Tollgate's own fields are set later, whatever their names.
    pub fn remove_from(&self, headers: &mut HeaderMap) {
        for FieldPattern(pattern) in &self.0 {
            match pattern.word() {
                Some(name) => drop(headers.remove(name)),
                None => super::remove_all(headers, |name| pattern.matches(name)),
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
        let hidden: Hidden = hidden.iter().map(|text| text.parse::<FieldPattern>().unwrap()).collect();
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
            ("*-Type", header::CONTENT_TYPE),
            ("transfer-encoding", header::TRANSFER_ENCODING),
            ("sec-*", header::SEC_WEBSOCKET_ACCEPT),
            ("sec-websocket-protocol", header::SEC_WEBSOCKET_PROTOCOL),
        ] {
            assert_eq!(text.parse::<FieldPattern>(), Err(InvalidField::Needed(needed)), "{text}");
        }
        for text in ["", "a b", "x:*", "x-*-*", "**", "ä"] {
            assert_eq!(text.parse::<FieldPattern>(), Err(InvalidField::Name), "{text}");
        }
    }
}
