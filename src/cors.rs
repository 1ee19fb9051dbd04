//! Which web pages may call, by the CORS protocol of the Fetch standard. Pure.
//!
//! A browser asks before it sends a key (a preflight), and hands an answer to its page only if the answer allows it, a
//! refusal too. Where this is on, Tollgate alone decides on origins, and what an upstream says of them gets no further.

use std::{str::FromStr, time::Duration};

use hyper::{
    HeaderMap, Method,
    header::{self, HeaderValue, ORIGIN, VARY},
    http::{request::Parts, uri::Authority},
};

use crate::{
    headers::{items, remove_all},
    pattern::Pattern,
};

/// What a page may read of an answer beside what every page may: what Tollgate says there, and what an upload in several
/// requests goes on by.
const EXPOSED: &str = "x-ratelimit-limit, x-ratelimit-remaining, x-ratelimit-reset, x-ratelimit-source, ratelimit, \
                       ratelimit-policy, retry-after, retry-after-ms, x-should-retry, x-request-id, request-id, \
                       location, x-goog-upload-url, x-goog-upload-status, x-goog-upload-size-received, \
                       x-goog-upload-chunk-granularity";

/// What the answer to a preflight depends on.
const PREFLIGHT_VARIES_BY: &str = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers";

/// How the names of all fields begin by which an answer allows anything.
const BEGINNING: &str = "access-control-";

/// Which pages may call, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cors {
    /// Where they come from.
    pub origins: Vec<OriginPattern>,
    /// How long a browser may remember the answer to a preflight.
    pub max_age: Duration,
    /// Whether browsers may add cookies and client certificates. Never with [`OriginPattern::Any`].
    pub credentials: bool,
}

/// One origin, or many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OriginPattern {
    /// `*`: every page.
    Any,
    /// An origin as browsers write it, or such as `https://*.example.com`, where the `*` is one label or several.
    Of(Pattern),
}

/// Why a text is no [`OriginPattern`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidOrigin {
    /// No browser writes one like it.
    #[error(
        "not an origin; expected a scheme, a host and a port if need be, such as \"https://app.example.com\", or \
         \"https://*.example.com\", or \"*\""
    )]
    Form,
    /// It goes on behind the host and the port.
    #[error("an origin ends with its host or port; write it without a path, and without a `/` at its end")]
    Path,
    /// Browsers leave this port out.
    #[error("browsers leave out the port that the scheme has anyway; write the origin without it")]
    Port,
    /// Browsers write small letters.
    #[error("browsers write an origin in small letters; do the same")]
    Case,
}

/// The page that a preflight asks for may not call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("pages of this origin may not call")]
pub struct OriginNotAllowed;

/// What browsers are told by the answer to one request.
#[derive(Clone, Debug)]
pub struct Grant {
    /// The value of `Access-Control-Allow-Origin`; none: no page may read the answer.
    allowed: Option<HeaderValue>,
    /// Whether the answer to another page would be another.
    depends_on_origin: bool,
    credentials: bool,
    preflight: Option<Preflight>,
}

/// What the page wants to send, which is all allowed: which methods and fields there are, the upstream knows.
#[derive(Clone, Debug)]
struct Preflight {
    method: HeaderValue,
    headers: Option<HeaderValue>,
    max_age: Duration,
}

impl Cors {
    /// Decides on the page that a request comes from, if it comes from one.
    pub fn grant(&self, request: &Parts) -> Grant {
        let origin = request.headers.get(ORIGIN);
        let is_open = self.origins.contains(&OriginPattern::Any);
        let allowed = if is_open {
            Some(HeaderValue::from_static("*"))
        } else {
            origin.filter(|origin| origin.to_str().is_ok_and(|origin| self.allows(origin))).cloned()
        };
        let asked = request.headers.get(header::ACCESS_CONTROL_REQUEST_METHOD);
        let preflight = asked.filter(|_| origin.is_some() && request.method == Method::OPTIONS);
        Grant {
            allowed,
            depends_on_origin: !is_open,
            credentials: self.credentials,
            preflight: preflight.map(|method| Preflight {
                method: method.clone(),
                headers: request.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned(),
                max_age: self.max_age,
            }),
        }
    }

    fn allows(&self, origin: &str) -> bool {
        self.origins.iter().any(|pattern| match pattern {
            OriginPattern::Any => true,
            OriginPattern::Of(pattern) => {
                pattern.star(origin).is_some_and(|star| pattern.word().is_some() || are_labels(star))
            }
        })
    }
}

/// Labels of a host's name. Anything else before the known end could be another host.
fn are_labels(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !text.is_empty() && text.bytes().all(is_plain)
}

impl Grant {
    /// Whether the request only asks if a page may send another one.
    pub fn is_preflight(&self) -> bool {
        self.preflight.is_some()
    }

    /// Refuses a page that may not call.
    pub fn permit(&self) -> Result<(), OriginNotAllowed> {
        if self.allowed.is_some() { Ok(()) } else { Err(OriginNotAllowed) }
    }

    /// Takes an allowed origin out of the request. An upstream that has a list of its own, as Ollama does, knows nothing
    /// of Tollgate's pages and would refuse them.
    pub fn settle(&self, headers: &mut HeaderMap) {
        if self.allowed.is_some() {
            headers.remove(ORIGIN);
        }
    }

    /// Says it in the head of the answer, in place of all that an upstream says.
    pub fn mark(self, headers: &mut HeaderMap) {
        remove_all(headers, |name| name.starts_with(BEGINNING));
        if self.is_preflight() {
            headers.insert(VARY, HeaderValue::from_static(PREFLIGHT_VARIES_BY));
        } else if self.depends_on_origin && !varies_by_origin(headers) {
            headers.append(VARY, HeaderValue::from_static("Origin"));
        }
        let Some(allowed) = self.allowed else { return };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
        if self.credentials {
            headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
        match self.preflight {
            Some(preflight) => preflight.mark(headers),
            None => {
                drop(
                    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED)),
                );
            }
        }
    }
}

impl Preflight {
    fn mark(self, headers: &mut HeaderMap) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, self.method);
        if let Some(asked) = self.headers {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, asked);
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, self.max_age.as_secs().into());
    }
}

fn varies_by_origin(headers: &HeaderMap) -> bool {
    items(headers, &VARY).any(|name| name == "*" || name.eq_ignore_ascii_case("origin"))
}

impl FromStr for OriginPattern {
    type Err = InvalidOrigin;

    fn from_str(text: &str) -> Result<Self, InvalidOrigin> {
        let pattern = || text.parse().map(Self::Of).map_err(|_| InvalidOrigin::Form);
        match text {
            "*" => return Ok(Self::Any),
            // Pages from files and in sandboxes.
            "null" => return pattern(),
            _ => {}
        }
        let (scheme, place) = text.split_once("://").ok_or(InvalidOrigin::Form)?;
        if text.bytes().any(|byte| byte.is_ascii_uppercase()) {
            return Err(InvalidOrigin::Case);
        }
        if place.contains(['/', '?', '#']) {
            return Err(InvalidOrigin::Path);
        }
        check_place(scheme, place.strip_prefix("*.").unwrap_or(place))?;
        pattern()
    }
}

fn check_place(scheme: &str, place: &str) -> Result<(), InvalidOrigin> {
    let is_of_scheme = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    let authority: Authority = place.parse().map_err(|_| InvalidOrigin::Form)?;
    let port = place.strip_prefix(authority.host()).ok_or(InvalidOrigin::Form)?;
    let is_plain =
        !place.contains(['@', '*']) && (port.is_empty() || authority.port_u16().is_some_and(|port| port > 0));
    if !is_plain || scheme.is_empty() || !scheme.bytes().all(is_of_scheme) {
        return Err(InvalidOrigin::Form);
    }
    match (scheme, authority.port_u16()) {
        ("https", Some(443)) | ("http", Some(80)) => Err(InvalidOrigin::Port),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn cors(origins: &[&str]) -> Cors {
        let origins = origins.iter().map(|text| text.parse().unwrap()).collect();
        Cors { origins, max_age: Duration::from_secs(600), credentials: false }
    }

    fn request(method: Method, fields: &[(&'static str, &str)]) -> Parts {
        let mut request = Request::builder().method(method);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn marked(grant: Grant, sent: &[(&'static str, &'static str)]) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.append(*name, HeaderValue::from_static(value));
        }
        grant.mark(&mut headers);
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
    }

    #[test]
    fn an_origin_is_allowed_as_a_whole() {
        let cors =
            cors(&["https://app.example.com", "http://localhost:3000", "https://*.example.org", "null"]);
        for origin in [
            "https://app.example.com",
            "http://localhost:3000",
            "https://a.example.org",
            "https://a.b-c.example.org",
            "null",
        ] {
            assert!(cors.allows(origin), "{origin}");
        }
        for origin in [
            "",
            "http://app.example.com",
            "https://app.example.com:8443",
            "https://app.example.com.evil",
            "https://evil-app.example.com",
            "https://APP.example.com",
            "http://localhost",
            "https://example.org",
            "https://.example.org",
            "https://evil/.example.org",
            "https://evil:1@.example.org",
            "https://evilexample.org",
            "https://a.example.org:444",
        ] {
            assert!(!cors.allows(origin), "{origin}");
        }
    }

    #[test]
    fn an_answer_allows_its_page_and_no_other() {
        let cors = cors(&["https://app"]);
        let theirs = [
            ("access-control-allow-origin", "*"),
            ("access-control-allow-origin", "https://other"),
            ("access-control-expose-headers", "x"),
            ("vary", "accept"),
        ];
        let allowed = cors.grant(&request(Method::POST, &[("origin", "https://app")]));
        let fields = marked(allowed, &theirs);
        let origins = fields.iter().filter(|(name, _)| name == "access-control-allow-origin");
        assert_eq!(origins.map(|(_, value)| &**value).collect::<Vec<_>>(), ["https://app"]);
        assert!(fields.contains(&("access-control-expose-headers".to_owned(), EXPOSED.to_owned())));
        for other in [&[("origin", "https://other")][..], &[]] {
            let fields = marked(cors.grant(&request(Method::POST, other)), &theirs);
            let left = [("vary", "accept"), ("vary", "Origin")].map(|(a, b)| (a.to_owned(), b.to_owned()));
            assert_eq!(fields, left);
        }
        let once = marked(cors.grant(&request(Method::GET, &[])), &[("vary", "accept, ORIGIN")]);
        assert_eq!(once.len(), 1, "{once:?}");
    }

    #[test]
    fn an_answer_to_all_is_the_same_for_all() {
        for fields in [&[("origin", "https://any")][..], &[]] {
            let fields = marked(cors(&["*"]).grant(&request(Method::GET, fields)), &[]);
            assert!(fields.contains(&("access-control-allow-origin".to_owned(), "*".to_owned())));
            assert!(fields.iter().all(|(name, _)| name != "vary"));
        }
    }

    #[test]
    fn a_preflight_allows_what_was_asked_for() {
        let asks = [
            ("origin", "https://app"),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,x-stainless-os"),
        ];
        let grant = cors(&["https://app"]).grant(&request(Method::OPTIONS, &asks));
        assert!(grant.is_preflight() && grant.permit().is_ok());
        let mut fields = marked(grant, &[]);
        fields.sort();
        let expected = [
            ("access-control-allow-headers", "authorization,x-stainless-os"),
            ("access-control-allow-methods", "POST"),
            ("access-control-allow-origin", "https://app"),
            ("access-control-max-age", "600"),
            ("vary", PREFLIGHT_VARIES_BY),
        ];
        assert_eq!(fields, expected.map(|(name, value)| (name.to_owned(), value.to_owned())));

        let other = cors(&["https://other"]).grant(&request(Method::OPTIONS, &asks));
        assert_eq!(other.permit(), Err(OriginNotAllowed));
        assert_eq!(marked(other, &[]).len(), 1);
        for (method, fields) in
            [(Method::POST, &asks[..]), (Method::OPTIONS, &asks[..1]), (Method::OPTIONS, &asks[1..])]
        {
            assert!(!cors(&["*"]).grant(&request(method, fields)).is_preflight());
        }
    }

    #[test]
    fn an_allowed_origin_is_settled_here() {
        for (origin, left) in [("https://app", false), ("https://other", true)] {
            let mut request = request(Method::POST, &[("origin", origin)]);
            let grant = cors(&["https://app"]).grant(&request);
            grant.settle(&mut request.headers);
            assert_eq!(request.headers.contains_key(ORIGIN), left, "{origin}");
        }
    }

    #[test]
    fn a_pattern_is_written_as_browsers_write_origins() {
        for text in [
            "http://[::1]:3000",
            "chrome-extension://abcdef",
            "https://xn--mnchen-3ya.de",
            "https://*.a.b:8443",
        ] {
            assert!(text.parse::<OriginPattern>().is_ok(), "{text}");
        }
        use InvalidOrigin::{Case, Form, Path, Port};
        for (text, wrong) in [
            ("", Form),
            ("app.example.com", Form),
            ("https://", Form),
            ("://app", Form),
            ("https://a b", Form),
            ("https://u@app", Form),
            ("https://app:0", Form),
            ("https://app:port", Form),
            ("https://app.*", Form),
            ("https://*", Form),
            ("https://*.", Form),
            ("https://a.*.b", Form),
            ("https://münchen.de", Form),
            ("https://app/", Path),
            ("https://app/x", Path),
            ("https://app:443", Port),
            ("http://*.app:80", Port),
            ("https://App", Case),
        ] {
            assert_eq!(text.parse::<OriginPattern>(), Err(wrong), "{text}");
        }
    }
}
