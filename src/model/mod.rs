//! Which model a request asks for: named by its URL or in its body. Pure, and asked only where a route depends on it.
//!
//! As the APIs have it: Gemini and Vertex `/models/NAME:method`, OpenAI `/models/NAME`, Azure `/deployments/NAME/`, the
//! realtime API `?model=NAME`, everything else a member `model` of the JSON body or a field `model` of a form.

mod form;
mod json;

use std::ops::ControlFlow;

use hyper::{HeaderMap, Method, Uri, header::CONTENT_ENCODING};
use percent_encoding::percent_decode_str;

use crate::media::Media;

/// A longer name is none. The longest real ones are Amazon's resource names.
const MAX_NAME_BYTES: usize = 1024;

/// The model that the URL names, if it names one.
pub fn in_url(method: &Method, uri: &Uri) -> Option<String> {
    let path = uri.path().trim_end_matches('/');
    let name = if let Some((_, rest)) = path.split_once("/deployments/") {
        rest.split('/').next()?
    } else if let Some((_, rest)) = path.rsplit_once("/models/") {
        without_method(method, rest)
    } else if path.ends_with("/realtime") {
        let parameters = uri.query()?.split('&').filter_map(|parameter| parameter.split_once('='));
        parameters.into_iter().find(|(name, _)| matches!(*name, "model" | "deployment"))?.1
    } else {
        return None;
    };
    let name = percent_decode_str(name).decode_utf8().ok()?;
    (1..=MAX_NAME_BYTES).contains(&name.len()).then(|| name.into_owned())
}

/// A name can hold colons of its own, as those of fine-tuned models do; a method is one word and only called by POST.
fn without_method<'p>(method: &Method, rest: &'p str) -> &'p str {
    match rest.rsplit_once(':') {
        Some((name, called))
            if method == Method::POST && called.bytes().all(|byte| byte.is_ascii_alphabetic()) =>
        {
            name
        }
        _ => rest,
    }
}

/// Looks for the model in a body, piece by piece, however it is cut.
#[derive(Debug)]
pub struct Scanner(Format);

#[derive(Debug)]
enum Format {
    Json(json::Scanner),
    Form(form::Scanner),
}

impl Scanner {
    /// A scanner of a body with these headers; nothing, if it can't be one that names a model. A compressed one is not
    /// looked into.
    pub fn of_body(headers: &HeaderMap) -> Option<Self> {
        let is_plain =
            |value: &hyper::header::HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
        if !headers.get_all(CONTENT_ENCODING).iter().all(is_plain) {
            return None;
        }
        match Media::of(headers) {
            Media::Text => Some(Self(Format::Json(json::Scanner::default()))),
            Media::Form { boundary } => Some(Self(Format::Form(form::Scanner::new(boundary)))),
            Media::File => None,
        }
    }

    /// Takes the next piece. Breaks with the model, or with nothing where there is none, whatever follows.
    pub fn feed(&mut self, piece: &[u8]) -> ControlFlow<Option<String>> {
        match &mut self.0 {
            Format::Json(scanner) => scanner.feed(piece),
            Format::Form(scanner) => scanner.feed(piece),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_can_name_the_model() {
        for (method, uri, model) in [
            ("POST", "/v1beta/models/gemini-2.0-flash:generateContent?alt=sse", Some("gemini-2.0-flash")),
            (
                "POST",
                "/v1/projects/p/locations/l/publishers/anthropic/models/claude@1:rawPredict",
                Some("claude@1"),
            ),
            ("POST", "/v1beta/models/a%2Fb%3Ac:streamGenerateContent", Some("a/b:c")),
            ("GET", "/v1/models/ft:gpt-4o:org::id", Some("ft:gpt-4o:org::id")),
            ("GET", "/v1/models/org/model/", Some("org/model")),
            ("DELETE", "/v1/models/ft:gpt:mine", Some("ft:gpt:mine")),
            ("POST", "/openai/deployments/gpt-4o/chat/completions?api-version=1", Some("gpt-4o")),
            ("GET", "/v1/realtime?x=1&model=gpt%2Drealtime", Some("gpt-realtime")),
            ("GET", "/openai/realtime?api-version=1&deployment=d", Some("d")),
            ("GET", "/v1/realtime", None),
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/", None),
            ("POST", "/v1/chat/completions?model=not-here", None),
            ("POST", "/v1beta/models/%ff:generateContent", None),
        ] {
            let named = in_url(&method.parse().unwrap(), &uri.parse().unwrap());
            assert_eq!(named.as_deref(), model, "{uri}");
        }
        let long = format!("/v1/models/{}", "x".repeat(MAX_NAME_BYTES + 1));
        assert_eq!(in_url(&Method::GET, &long.parse().unwrap()), None);
    }

    #[test]
    fn only_plain_text_and_forms_are_looked_into() {
        let scans = |fields: &[(&'static str, &'static str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.append(*name, value.parse().unwrap());
            }
            Scanner::of_body(&headers).is_some()
        };
        assert!(
            scans(&[]) && scans(&[("content-type", "application/json"), ("content-encoding", "identity")])
        );
        assert!(scans(&[("content-type", "multipart/form-data; boundary=x")]));
        assert!(!scans(&[("content-type", "audio/wav")]));
        assert!(!scans(&[("content-encoding", "gzip")]));
        assert!(!scans(&[("content-encoding", "identity"), ("content-encoding", "zstd")]));
    }
}
