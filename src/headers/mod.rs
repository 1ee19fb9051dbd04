//! The header fields that Tollgate removes and sets. All names stand in one table here. Pure.

mod forwarded;
mod hidden;

use std::{fmt::Write as _, time::Duration};

use hyper::{
    HeaderMap,
    header::{self, HeaderName, HeaderValue},
    http::request::Parts,
};

pub use self::{
    forwarded::{Downstream, append_via, set_forwarded},
    hidden::{FieldPattern, Hidden, InvalidField},
};
use crate::limit::{Limit, Status};

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

/// Waits longer than this make SDKs do anything from hammering to sleeping for an hour.
const LONGEST_CLIENT_RETRY: Duration = Duration::from_secs(59);

/// The host that a request is for, with its port where it names one. Both protocols say it once, in places of their own.
pub fn host(head: &Parts) -> &str {
    match head.uri.authority() {
        Some(authority) => authority.as_str(),
        None => head.headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default(),
    }
}

/// Which retry of a call this is, where the client's SDK says so.
pub fn retry_count(headers: &HeaderMap) -> Option<u32> {
    headers.get(STAINLESS_RETRY_COUNT)?.to_str().ok()?.parse().ok()
}

/// Removes what concerns only the one connection. Runs before anything is set, so that nobody can name a header of
/// ours in `Connection` and have it deleted.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    if headers.contains_key(header::CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(header::CONNECTION)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .flat_map(|value| value.split(','))
            .filter_map(|name| name.trim().parse().ok())
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

/// Sets what the limits say about an admitted request, in place of an upstream's fields of the same names.
pub fn set_statuses(headers: &mut HeaderMap, field: &PolicyField, statuses: &[Status]) {
    let Some(tightest) = statuses.iter().min_by(|a, b| room(a).total_cmp(&room(b))) else { return };
    set_one(headers, tightest, tightest.reset_after);
    set_all(headers, field, statuses);
}

/// Sets what a refusal says: all of it about the limit that refused, and when to come back.
pub fn set_refusal(
    headers: &mut HeaderMap,
    field: &PolicyField,
    statuses: &[Status],
    by: usize,
    wait: Duration,
) {
    if let Some(refusing) = statuses.get(by) {
        set_one(headers, &Status { remaining: 0, ..*refusing }, wait);
    }
    set_all(headers, field, statuses);
    headers.insert(SOURCE, HeaderValue::from_static("tollgate"));
    headers.insert(header::RETRY_AFTER, whole_seconds(wait).max(1).into());
    headers.insert(RETRY_AFTER_MS, (wait.as_micros().div_ceil(1000) as u64).max(1).into());
    if wait > LONGEST_CLIENT_RETRY {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
}

/// Whole seconds, rounded up: a caller that waits them is never early.
pub fn whole_seconds(wait: Duration) -> u64 {
    wait.as_micros().div_ceil(1_000_000) as u64
}

fn room(status: &Status) -> f64 {
    f64::from(status.remaining) / f64::from(status.limit)
}

fn set_one(headers: &mut HeaderMap, status: &Status, reset: Duration) {
    headers.insert(LIMIT, status.limit.into());
    headers.insert(REMAINING, status.remaining.into());
    headers.insert(RESET, whole_seconds(reset).into());
}

fn set_all(headers: &mut HeaderMap, field: &PolicyField, statuses: &[Status]) {
    headers.insert(RATELIMIT_POLICY, field.value.clone());
    if let Some(value) = field.remaining(statuses) {
        headers.insert(RATELIMIT, value);
    }
}

/// The value of `RateLimit-Policy` for a list of limits, and the names by which `RateLimit` refers to them.
///
/// Each is a List of String Items with parameters (RFC 9651): `"1m";q=100;w=60` and `"1m";r=99;t=60`. A window is
/// given in whole seconds and left out where it has none.
#[derive(Clone, Debug)]
pub struct PolicyField {
    value: HeaderValue,
    names: Vec<String>,
}

impl PolicyField {
    /// The field for these limits.
    pub fn new(limits: &[Limit]) -> Self {
        let names: Vec<String> = limits.iter().map(name).collect();
        let items = limits.iter().zip(&names).map(|(limit, name)| {
            let window = limit.window.length();
            let seconds =
                if window.subsec_nanos() == 0 { format!(";w={}", window.as_secs()) } else { String::new() };
            format!("\"{name}\";q={}{seconds}", limit.requests)
        });
        let value = items.collect::<Vec<_>>().join(", ");
        Self { value: HeaderValue::try_from(value).expect("names and numbers are visible ASCII"), names }
    }

    /// The names of the limits, in their order: for metrics too.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    fn remaining(&self, statuses: &[Status]) -> Option<HeaderValue> {
        let mut text = String::with_capacity(32 * statuses.len());
        for (name, status) in self.names.iter().zip(statuses) {
            let separator = if text.is_empty() { "" } else { ", " };
            let (remaining, reset) = (status.remaining, whole_seconds(status.reset_after));
            write!(text, "{separator}\"{name}\";r={remaining};t={reset}").ok()?;
        }
        HeaderValue::try_from(text).ok()
    }
}

fn name(limit: &Limit) -> String {
    let attempts = if limit.count_refused { "-attempts" } else { "" };
    let shadow = if limit.enforce { "" } else { "-shadow" };
    format!("{}{attempts}{shadow}", limit.window)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;
    use crate::limit::Window;

    fn limit(requests: u32, window: Duration) -> Limit {
        let requests = NonZeroU32::new(requests).unwrap();
        Limit::new(requests, Window::new(window).unwrap())
    }

    fn status(limit: u32, remaining: u32, reset_millis: u64) -> Status {
        Status { limit, remaining, reset_after: Duration::from_millis(reset_millis), over: false }
    }

    fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
        let values: Vec<_> = headers.get_all(name).iter().collect();
        assert_eq!(values.len(), 1, "{name} stands once");
        values[0].to_str().unwrap()
    }

    #[test]
    fn the_tightest_limit_is_shown_and_every_limit_named() {
        let limits = [limit(100, Duration::from_secs(60)), limit(1000, Duration::from_secs(86_400))];
        let mut headers = HeaderMap::new();
        headers.append(LIMIT, HeaderValue::from_static("7"));
        headers.append(LIMIT, HeaderValue::from_static("8"));
        let statuses = [status(100, 50, 1), status(1000, 400, 5_000_001)];
        set_statuses(&mut headers, &PolicyField::new(&limits), &statuses);
        assert_eq!(
            (text(&headers, &LIMIT), text(&headers, &REMAINING), text(&headers, &RESET)),
            ("1000", "400", "5001")
        );
        assert_eq!(text(&headers, &RATELIMIT_POLICY), r#""1m";q=100;w=60, "1d";q=1000;w=86400"#);
        assert_eq!(text(&headers, &RATELIMIT), r#""1m";r=50;t=1, "1d";r=400;t=5001"#);
    }

    #[test]
    fn a_refusal_is_about_the_limit_that_refused() {
        let limits = [limit(100, Duration::from_millis(1500)), limit(10, Duration::from_secs(60))];
        let refuse = |wait_millis| {
            let mut headers = HeaderMap::new();
            let statuses = [status(100, 0, 10), status(10, 0, wait_millis)];
            set_refusal(
                &mut headers,
                &PolicyField::new(&limits),
                &statuses,
                1,
                Duration::from_millis(wait_millis),
            );
            headers
        };
        let headers = refuse(6_420);
        assert_eq!(
            (text(&headers, &LIMIT), text(&headers, &REMAINING), text(&headers, &RESET)),
            ("10", "0", "7")
        );
        assert_eq!((text(&headers, &header::RETRY_AFTER), text(&headers, &RETRY_AFTER_MS)), ("7", "6420"));
        assert_eq!(text(&headers, &SOURCE), "tollgate");
        assert_eq!(text(&headers, &RATELIMIT_POLICY), r#""1500ms";q=100, "1m";q=10;w=60"#);
        assert!(!headers.contains_key(SHOULD_RETRY));
        assert_eq!(text(&refuse(59_001), &SHOULD_RETRY), "false");
        assert_eq!(text(&refuse(1), &header::RETRY_AFTER), "1");
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
