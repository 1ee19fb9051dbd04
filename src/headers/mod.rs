//! The header fields that Tollgate removes and sets. All names stand in one table here. Pure.

mod forwarded;
mod hidden;
mod limits;

use hyper::{
    HeaderMap,
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};

pub use self::{
    forwarded::{Downstream, append_via, set_forwarded},
    hidden::{FieldPattern, Hidden, InvalidField},
    limits::{PolicyField, set_refusal, set_statuses, whole_seconds},
};

/// The limit of the tightest window.
pub const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
/// What is left of it.
pub const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
/// Whole seconds until more is left.
pub const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
/// Tells our refusals from an upstream's.
pub const SOURCE: HeaderName = HeaderName::from_static("x-ratelimit-source");
/// `draft-ietf-httpapi-ratelimit-headers-10`: what is left of every limit.
pub const RATELIMIT: HeaderName = HeaderName::from_static("ratelimit");
/// The same draft: every limit.
pub const RATELIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// Milliseconds; the SDKs of OpenAI and Anthropic prefer it to `Retry-After`.
pub const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// Tells those SDKs not to retry by themselves.
pub const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");
/// The request's id, in OpenAI's spelling.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The request's id, in Anthropic's spelling.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// The clients that a request passed through proxies for, the last one next to the upstream.
pub const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// The host that the client asked for.
pub const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
/// `https`, or what else the client spoke.
pub const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
/// Keeps proxies of the nginx kind in front of us from holding a stream back.
pub const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Which retry of a call a request is, as the SDKs of OpenAI and Anthropic count: 0 is the first try.
pub const STAINLESS_RETRY_COUNT: HeaderName = HeaderName::from_static("x-stainless-retry-count");

/// Where the rest of an upload goes, in Google's resumable protocol: <https://ai.google.dev/gemini-api/docs/files>.
pub const UPLOAD_URL: HeaderName = HeaderName::from_static("x-goog-upload-url");

/// Those that can hold a key, in the order in which they are tried.
pub static CREDENTIAL_SLOTS: [HeaderName; 4] = [
    HeaderName::from_static("x-api-key"),
    header::AUTHORIZATION,
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-goog-api-key"),
];

/// RFC 9110 §7.6.1 and what old software adds. `Connection` itself names more. `Trailer` is not among them: it is about
/// the message, and without it hyper sends an answer's trailers to no client of HTTP/1.1.
static HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// What no `Connection` can make the connection's business: framing and media type, credentials, what proxies say of a
/// request, and the handshake of a WebSocket. A client that names one of them wants it deleted after a proxy in front of
/// us has set it, or after it was judged here.
static NEVER_HOP_BY_HOP: [HeaderName; 20] = [
    header::AUTHORIZATION,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::FORWARDED,
    header::HOST,
    header::SEC_WEBSOCKET_ACCEPT,
    header::SEC_WEBSOCKET_EXTENSIONS,
    header::SEC_WEBSOCKET_KEY,
    header::SEC_WEBSOCKET_PROTOCOL,
    header::SEC_WEBSOCKET_VERSION,
    header::VIA,
    HeaderName::from_static("api-key"),
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("x-goog-api-key"),
    HeaderName::from_static("x-real-ip"),
    X_FORWARDED_FOR,
    X_FORWARDED_HOST,
    X_FORWARDED_PROTO,
    X_REQUEST_ID,
];

/// What an upstream says of itself and what would be wrong when Tollgate says it: that its host is reached elsewhere too,
/// or in TLS alone, and who refused.
static ABOUT_THE_UPSTREAM: [HeaderName; 3] = [header::ALT_SVC, header::STRICT_TRANSPORT_SECURITY, SOURCE];

/// The host that a request is for, with its port where it names one. Both protocols say it once, in places of their own.
pub fn host(head: &Parts) -> &str {
    match head.uri.authority() {
        Some(authority) => authority.as_str(),
        None => head.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default(),
    }
}

/// The items of a field that is a list, apart by commas, over all lines in which it stands. What is not text is no item.
pub fn items<'h>(headers: &'h HeaderMap, field: &HeaderName) -> impl Iterator<Item = &'h str> + use<'h> {
    let values = headers.get_all(field).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}

/// Which retry of a call this is, where the client's SDK says so.
pub fn retry_count(headers: &HeaderMap) -> Option<u32> {
    headers.get(STAINLESS_RETRY_COUNT)?.to_str().ok()?.parse().ok()
}

/// Removes what concerns only the one connection. Runs before anything is set, so that nobody can name a header of
/// ours in `Connection` and have it deleted.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = items(headers, &header::CONNECTION)
            .filter_map(|name| name.parse().ok())
            .filter(|name| !NEVER_HOP_BY_HOP.contains(name))
            .collect();
        named.iter().for_each(|name| drop(headers.remove(name)));
    }
    keep_one_framing(headers);
    HOP_BY_HOP.iter().for_each(|name| drop(headers.remove(name)));
}

/// Removes all fields whose names fit.
pub fn remove_all(headers: &mut HeaderMap, fits: impl Fn(&str) -> bool) {
    let fitting: Vec<HeaderName> = headers.keys().filter(|name| fits(name.as_str())).cloned().collect();
    fitting.iter().for_each(|name| drop(headers.remove(name)));
}

/// A length beside chunks is wrong, for the chunks are what was read, and one that is repeated is said once
/// (RFC 9112 §6.3). hyper refuses repeated ones that differ.
fn keep_one_framing(headers: &mut HeaderMap) {
    let Some(length) = headers.remove(header::CONTENT_LENGTH) else { return };
    let first = length.to_str().ok().and_then(|length| length.split(',').next()?.trim().parse::<u64>().ok());
    if let Some(first) = first.filter(|_| !headers.contains_key(header::TRANSFER_ENCODING)) {
        headers.insert(header::CONTENT_LENGTH, first.into());
    }
}

/// Removes from an answer what is true of its upstream alone, and the repetitions of what an answer says once.
pub fn remove_claims_of_upstream(headers: &mut HeaderMap) {
    ABOUT_THE_UPSTREAM.iter().for_each(|name| drop(headers.remove(name)));
    for name in [header::DATE, header::SERVER] {
        if headers.get_all(&name).iter().nth(1).is_some()
            && let Some(first) = headers.get(&name).cloned()
        {
            headers.insert(name, first);
        }
    }
}

/// What a stream needs so that no proxy on the way collects or changes it. An upstream's own values stay.
pub fn keep_streaming(headers: &mut HeaderMap) {
    let streams = |value: &HeaderValue| {
        let value = value.as_bytes();
        value.starts_with(b"text/event-stream") || value.starts_with(b"application/x-ndjson")
    };
    if headers.get(header::CONTENT_TYPE).is_some_and(streams) {
        headers.entry(ACCEL_BUFFERING).or_insert(HeaderValue::from_static("no"));
        headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache, no-transform"));
    }
}

/// Asks an upstream for a WebSocket, or tells a client that it has one. Runs after [`remove_hop_by_hop`].
pub fn switch_to_websocket(headers: &mut HeaderMap) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("Upgrade"));
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
        let values: Vec<_> = headers.get_all(name).iter().collect();
        assert_eq!(values.len(), 1, "{name} stands once");
        values[0].to_str().unwrap()
    }

    #[test]
    fn hop_by_hop_headers_and_those_named_in_connection_go() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, X-Private"),
            ("connection", "content-length, Authorization, x-request-id,x-forwarded-for, host,,"),
            ("authorization", "Bearer x"),
            ("x-request-id", "r1"),
            ("x-forwarded-for", "192.0.2.1"),
            ("x-private", "1"),
            ("te", "trailers"),
            ("content-length", "5"),
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        remove_hop_by_hop(&mut headers);
        let mut left: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        left.sort_unstable();
        let stays = [
            ("anthropic-beta", "a"),
            ("anthropic-beta", "b"),
            ("authorization", "Bearer x"),
            ("content-length", "5"),
            ("x-forwarded-for", "192.0.2.1"),
            ("x-request-id", "r1"),
        ];
        assert_eq!(left, stays);
    }

    #[test]
    fn an_answer_says_once_what_it_says_once_and_nothing_of_its_upstreams_host() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("date", "first"),
            ("server", "cloudflare"),
            ("date", "second"),
            ("alt-svc", "h3=\":443\""),
            ("strict-transport-security", "max-age=1"),
            ("x-ratelimit-source", "tollgate"),
            ("vary", "a"),
            ("vary", "b"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        remove_claims_of_upstream(&mut headers);
        assert_eq!((text(&headers, &header::DATE), text(&headers, &header::SERVER)), ("first", "cloudflare"));
        assert_eq!(headers.len(), 4, "{headers:?}");
    }

    #[test]
    fn one_framing_is_left() {
        for (lengths, chunks, left) in [
            (&["5"][..], true, None),
            (&["5"], false, Some("5")),
            (&["5", "5"], false, Some("5")),
            (&["5, 5"], false, Some("5")),
            (&["5", "5"], true, None),
            (&[], false, None),
        ] {
            let mut headers = HeaderMap::new();
            for length in lengths {
                headers.append(header::CONTENT_LENGTH, HeaderValue::from_static(length));
            }
            if chunks {
                headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
            remove_hop_by_hop(&mut headers);
            let values: Vec<_> = headers.iter().map(|(_, value)| value.to_str().unwrap()).collect();
            assert_eq!(values, Vec::from_iter(left), "{lengths:?}");
        }
    }

    #[test]
    fn streams_are_marked_and_an_upstreams_own_marks_stay() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        keep_streaming(&mut headers);
        assert_eq!(
            (text(&headers, &ACCEL_BUFFERING), text(&headers, &header::CACHE_CONTROL)),
            ("no", "no-store")
        );
        let mut plain = HeaderMap::new();
        plain.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        keep_streaming(&mut plain);
        assert_eq!(plain.len(), 1);
    }
}
