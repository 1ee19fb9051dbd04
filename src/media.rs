//! What the `Content-Type` of a request says of its body, and how large such a body may be. Pure.

use hyper::{HeaderMap, header::CONTENT_TYPE};

/// The kinds of bodies that are told apart, by `Content-Type` alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Media<'a> {
    /// JSON and every other text. What says nothing counts as this, and so does what `curl --data` says of JSON.
    Text,
    /// `multipart/form-data`, parts of which can be files.
    Form {
        /// What stands between the parts, without its dashes.
        boundary: &'a str,
    },
    /// Anything else: audio, images, archives, streams of bytes.
    File,
}

impl<'a> Media<'a> {
    /// The kind of the body behind this head.
    pub fn of(headers: &'a HeaderMap) -> Self {
        let Some(text) = headers.get(CONTENT_TYPE).map(|value| value.to_str().unwrap_or("?").trim()) else {
            return Self::Text;
        };
        let (essence, parameters) = text.split_once(';').unwrap_or((text, ""));
        let essence = essence.trim_end().as_bytes();
        let is = |known: &str| essence.eq_ignore_ascii_case(known.as_bytes());
        if is("multipart/form-data") {
            return boundary(parameters).map_or(Self::File, |boundary| Self::Form { boundary });
        }
        let is_text = essence.get(..5).is_some_and(|start| start.eq_ignore_ascii_case(b"text/"));
        let is_json = essence.windows(4).any(|word| word.eq_ignore_ascii_case(b"json"));
        let says_nothing = essence.is_empty() || is("application/x-www-form-urlencoded");
        if is_text || is_json || says_nothing { Self::Text } else { Self::File }
    }
}

fn boundary(parameters: &str) -> Option<&str> {
    let named = |parameter: &&str| {
        let name = parameter.trim_start().get(..9);
        name.is_some_and(|name| name.eq_ignore_ascii_case("boundary="))
    };
    let value = parameters.split(';').find(named)?.trim_start()[9..].trim_end();
    let bare = value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value);
    // RFC 2046 §5.1.1.
    (1..=70).contains(&bare.len()).then_some(bare)
}

/// There is no bound.
pub const UNBOUNDED: u64 = u64::MAX;

/// The most bytes that a body may have, by its kind; [`UNBOUNDED`]: any number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeBounds {
    /// Of JSON and other text.
    pub text: u64,
    /// Of everything else, forms included.
    pub file: u64,
}

impl SizeBounds {
    /// The bound of a body of this kind.
    pub fn of(&self, media: Media<'_>) -> u64 {
        match media {
            Media::Text => self.text,
            Media::Form { .. } | Media::File => self.file,
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn a_content_type_tells_text_from_forms_and_files() {
        let boundary = |boundary| Media::Form { boundary };
        for (text, media) in [
            ("application/json", Media::Text),
            ("Application/JSON; charset=utf-8", Media::Text),
            ("application/vnd.api+json", Media::Text),
            ("application/x-ndjson", Media::Text),
            ("application/jsonl", Media::Text),
            ("text/plain", Media::Text),
            ("application/x-www-form-urlencoded", Media::Text),
            ("", Media::Text),
            ("multipart/form-data; boundary=abc", boundary("abc")),
            ("Multipart/Form-Data; charset=x;Boundary=\"a b'c\" ", boundary("a b'c")),
            ("multipart/form-data", Media::File),
            ("multipart/form-data; boundary=", Media::File),
            ("multipart/mixed; boundary=x", Media::File),
            ("audio/wav", Media::File),
            ("application/octet-stream", Media::File),
            ("nonsense", Media::File),
        ] {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(text))]);
            assert_eq!(Media::of(&headers), media, "{text}");
        }
        assert_eq!(Media::of(&HeaderMap::new()), Media::Text);
    }

    #[test]
    fn files_have_a_bound_of_their_own() {
        let bounds = SizeBounds { text: 1, file: UNBOUNDED };
        assert_eq!((bounds.of(Media::Text), bounds.of(Media::File)), (1, UNBOUNDED));
        assert_eq!(bounds.of(Media::Form { boundary: "x" }), UNBOUNDED);
    }
}
