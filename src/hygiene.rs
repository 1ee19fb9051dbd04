//! Requests that are not forwarded, whoever sends them. Pure.
//!
//! hyper accepts much that proxies and upstreams read differently, which is where smuggling lives. What is refused here
//! no LLM API needs; everything else goes through byte for byte.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use hyper::{
    HeaderMap, Method, Uri, Version,
    header::{
        CONNECTION, CONTENT_LENGTH, HOST, HeaderName, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION,
        TRANSFER_ENCODING, UPGRADE,
    },
    http::request::Parts,
};

use crate::headers::items;

/// Longer targets are refused.
const MAX_TARGET_BYTES: usize = 8 * 1024;

/// Why a request is not forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unclean {
    /// CONNECT, TRACE or an invention.
    #[error("this method is not forwarded")]
    Method,
    /// The target is too long.
    #[error("the URL is longer than 8 KiB")]
    TargetTooLong,
    /// The head has more fields than this.
    #[error("there are more than {0} header fields")]
    TooManyFields(usize),
    /// The head has more bytes than this.
    #[error("the URL and the header fields have more than {0} bytes together")]
    HeadTooLarge(usize),
    /// The path could mean different things to different readers.
    #[error(
        "the URL's path must start with `/` and hold no `..`, backslash, NUL, control character or broken percent-encoding"
    )]
    Path,
    /// No host, two, or one that is none.
    #[error("exactly one valid Host is required")]
    Host,
    /// A coding other than `chunked`.
    #[error("the only transfer coding that is understood is `chunked`")]
    TransferCoding,
    /// `Upgrade: websocket` without `Connection: upgrade`, as proxies that know no WebSocket leave it.
    #[error("a WebSocket handshake needs `Connection: upgrade`, which a proxy on the way may have removed")]
    Upgrade,
    /// Half a WebSocket handshake.
    #[error("a WebSocket handshake is a GET in HTTP/1.1 with one valid Sec-WebSocket-Key and without a body")]
    Handshake,
    /// A draft of WebSocket.
    #[error("the only version of WebSocket that is understood is 13")]
    WebSocketVersion,
}

/// What a client wants to speak once its request is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// What it speaks already.
    Http,
    /// WebSocket (RFC 6455): the request is a whole and valid handshake.
    WebSocket,
}

/// How large the head of a request may be. hyper takes more than this, for what it turns away gets an answer without a
/// body, which no SDK understands.
#[derive(Clone, Copy, Debug)]
pub struct HeadBounds {
    /// Its fields; a name that is repeated counts each time.
    pub fields: usize,
    /// Its bytes, as HTTP/1.1 writes them.
    pub bytes: usize,
}

/// Lets through what can be forwarded safely.
pub fn inspect(request: &Parts, bounds: HeadBounds) -> Result<Protocol, Unclean> {
    method(&request.method)?;
    target(&request.uri)?;
    size(request, bounds)?;
    host(&request.uri, &request.headers, request.version)?;
    transfer_coding(&request.headers)?;
    if names(&request.headers, &UPGRADE, "websocket") {
        return handshake(request).map(|()| Protocol::WebSocket);
    }
    // An offer to speak HTTP/2 in clear text is ignored, as curl expects.
    Ok(Protocol::Http)
}

fn method(method: &Method) -> Result<(), Unclean> {
    let forwarded = [
        Method::POST,
        Method::GET,
        Method::DELETE,
        Method::PUT,
        Method::PATCH,
        Method::HEAD,
        Method::OPTIONS,
    ];
    if forwarded.contains(method) { Ok(()) } else { Err(Unclean::Method) }
}

fn target(uri: &Uri) -> Result<(), Unclean> {
    let target = uri.path_and_query().ok_or(Unclean::Path)?.as_str();
    if target.len() > MAX_TARGET_BYTES {
        return Err(Unclean::TargetTooLong);
    }
    let path = uri.path();
    let plain = |byte: u8| byte.is_ascii_graphic() && byte != b'\\';
    if !path.starts_with('/') || !target.bytes().all(plain) || path.split('/').any(climbs) || !decodes(path) {
        return Err(Unclean::Path);
    }
    Ok(())
}

fn size(request: &Parts, bounds: HeadBounds) -> Result<(), Unclean> {
    const AROUND_A_FIELD: usize = ": \r\n".len();
    if request.headers.len() > bounds.fields {
        return Err(Unclean::TooManyFields(bounds.fields));
    }
    let target = request.uri.path_and_query().map_or(0, |target| target.as_str().len());
    let fields = request.headers.iter();
    let fields = fields.map(|(name, value)| name.as_str().len() + value.len() + AROUND_A_FIELD);
    if target + fields.sum::<usize>() > bounds.bytes {
        return Err(Unclean::HeadTooLarge(bounds.bytes));
    }
    Ok(())
}

/// Whether a segment is `.` or `..` in any encoding, or becomes several of which one is, for a reader who decodes before
/// he splits.
fn climbs(segment: &str) -> bool {
    if !segment.contains('%') {
        return is_dots(segment);
    }
    let decoded = segment.to_ascii_lowercase().replace("%2e", ".").replace("%3b", ";");
    decoded.split("%2f").any(is_dots)
}

/// With or without parameters behind a `;`.
fn is_dots(segment: &str) -> bool {
    let name = segment.split(';').next().unwrap_or_default();
    name == "." || name == ".."
}

/// Whether every `%` begins two hexadecimal digits that stand for neither NUL nor backslash nor another control character.
fn decodes(path: &str) -> bool {
    path.split('%').skip(1).all(|rest| {
        let Some(hex) = rest.get(..2).filter(|hex| hex.bytes().all(|byte| byte.is_ascii_hexdigit())) else {
            return false;
        };
        u8::from_str_radix(hex, 16).is_ok_and(|byte| byte != b'\\' && !byte.is_ascii_control())
    })
}

fn host(uri: &Uri, headers: &HeaderMap, version: Version) -> Result<(), Unclean> {
    let mut hosts = headers.get_all(HOST).iter();
    let (first, second) = (hosts.next(), hosts.next());
    let named = match (uri.authority(), first) {
        (_, Some(_)) if second.is_some() => return Err(Unclean::Host),
        (Some(authority), Some(host)) if authority.as_str().as_bytes() != host.as_bytes() => {
            return Err(Unclean::Host);
        }
        (Some(authority), _) => authority.as_str(),
        (None, Some(host)) => host.to_str().map_err(|_| Unclean::Host)?,
        // HTTP/1.0 knew no Host.
        (None, None) if version == Version::HTTP_10 => return Ok(()),
        (None, None) => return Err(Unclean::Host),
    };
    let valid = named.parse::<hyper::http::uri::Authority>().is_ok() && !named.contains('@');
    if valid { Ok(()) } else { Err(Unclean::Host) }
}

fn transfer_coding(headers: &HeaderMap) -> Result<(), Unclean> {
    let mut codings = headers.get_all(TRANSFER_ENCODING).iter();
    match (codings.next(), codings.next()) {
        (None, _) => Ok(()),
        (Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        _ => Err(Unclean::TransferCoding),
    }
}

/// RFC 6455 §4.2.1. Who asks for a WebSocket waits for its answer, so what is not one is refused and never ignored.
fn handshake(request: &Parts) -> Result<(), Unclean> {
    let headers = &request.headers;
    if !names(headers, &CONNECTION, "upgrade") {
        return Err(Unclean::Upgrade);
    }
    let is_bare = request.method == Method::GET
        && request.version == Version::HTTP_11
        && !headers.contains_key(TRANSFER_ENCODING)
        && headers.get_all(CONTENT_LENGTH).iter().all(|length| length == "0");
    if !is_bare || !the_only(headers, SEC_WEBSOCKET_KEY).is_some_and(is_nonce) {
        return Err(Unclean::Handshake);
    }
    match the_only(headers, SEC_WEBSOCKET_VERSION) {
        Some(b"13") => Ok(()),
        _ => Err(Unclean::WebSocketVersion),
    }
}

/// 16 bytes in base64.
fn is_nonce(key: &[u8]) -> bool {
    BASE64_STANDARD.decode(key).is_ok_and(|nonce| nonce.len() == 16)
}

/// Whether a comma-separated field names this word, in any case.
fn names(headers: &HeaderMap, field: &HeaderName, word: &str) -> bool {
    items(headers, field).any(|name| name.eq_ignore_ascii_case(word))
}

fn the_only(headers: &HeaderMap, field: HeaderName) -> Option<&[u8]> {
    let mut values = headers.get_all(field).into_iter();
    let first = values.next()?;
    values.next().is_none().then_some(first.as_bytes())
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn verdict(request: hyper::http::request::Builder) -> Result<Protocol, Unclean> {
        inspect(&request.body(()).unwrap().into_parts().0, HeadBounds { fields: 8, bytes: 20_000 })
    }

    fn get(target: &str) -> hyper::http::request::Builder {
        Request::get(target).header("host", "localhost:8443")
    }

    #[test]
    fn ordinary_requests_pass() {
        for target in [
            "/",
            "/v1/models?limit=1",
            "/v1/models/org%2Fmodel:tag",
            "/v1/a%20b",
            "/v1/...",
            "/v1/a..b",
            "/v1/..a%2F..b%2F...",
            "//v1/x",
        ] {
            assert_eq!(verdict(get(target)), Ok(Protocol::Http), "{target}");
        }
        assert_eq!(
            verdict(Request::get("https://localhost/v1").version(Version::HTTP_2)),
            Ok(Protocol::Http)
        );
    }

    #[test]
    fn ambiguous_paths_do_not() {
        for target in [
            "/v1/../admin",
            "/v1/%2e%2E/x",
            "/v1/.%2e/x",
            "/./x",
            "/v1/..;/x",
            "/v1/..%3Bx/y",
            "/v1/models%2f..%2Fx",
            "/v1/%2e%2e%2fx",
            "/v1/x%2f.",
            "/v1/a%00",
            "/v1/a%5cb",
            "/v1/%zz",
            "/v1/%4",
            "/v1/%0d%0a",
            "/v1/%",
        ] {
            assert_eq!(verdict(get(target)), Err(Unclean::Path), "{target}");
        }
        assert_eq!(verdict(get("*").method("OPTIONS")), Err(Unclean::Path));
        let long = format!("/v1/{}", "x".repeat(9000));
        assert_eq!(verdict(get(&long)), Err(Unclean::TargetTooLong));
    }

    #[test]
    fn a_head_has_so_many_fields_and_so_many_bytes() {
        let more = |fields: usize| (0..fields).fold(get("/"), |request, _| request.header("x-a", "1"));
        assert_eq!(verdict(more(7)), Ok(Protocol::Http));
        assert_eq!(verdict(more(8)), Err(Unclean::TooManyFields(8)));
        // The other bytes: the target, the host's field, and what stands around the value.
        let filled = |bytes: usize| get("/").header("x-b", "x".repeat(bytes - 1 - 22 - 7));
        assert_eq!(verdict(filled(20_000)), Ok(Protocol::Http));
        assert_eq!(verdict(filled(20_001)), Err(Unclean::HeadTooLarge(20_000)));
    }

    #[test]
    fn strange_methods_do_not() {
        for method in ["TRACE", "CONNECT", "BREW", "post"] {
            assert_eq!(verdict(get("/v1").method(method)), Err(Unclean::Method), "{method}");
        }
    }

    #[test]
    fn one_host_is_required() {
        assert_eq!(verdict(Request::get("/v1")), Err(Unclean::Host));
        assert_eq!(verdict(get("/v1").header("host", "other")), Err(Unclean::Host));
        assert_eq!(verdict(Request::get("/v1").header("host", "user@host")), Err(Unclean::Host));
        assert_eq!(verdict(Request::get("/v1").header("host", "a/b")), Err(Unclean::Host));
        assert_eq!(verdict(Request::get("http://a/v1").header("host", "b")), Err(Unclean::Host));
        assert_eq!(verdict(Request::get("/v1").version(Version::HTTP_10)), Ok(Protocol::Http));
    }

    #[test]
    fn only_chunked_is_a_coding() {
        assert_eq!(verdict(get("/v1").header("transfer-encoding", "Chunked")), Ok(Protocol::Http));
        assert_eq!(
            verdict(get("/v1").header("transfer-encoding", "gzip, chunked")),
            Err(Unclean::TransferCoding)
        );
        let twice = get("/v1").header("transfer-encoding", "chunked").header("transfer-encoding", "chunked");
        assert_eq!(verdict(twice), Err(Unclean::TransferCoding));
    }

    /// A whole handshake, with one field changed, or left out where its value is empty.
    fn handshake(changed: &str, value: &str) -> hyper::http::request::Builder {
        let fields = [
            ("upgrade", "websocket"),
            ("connection", "Upgrade"),
            ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
            ("sec-websocket-version", "13"),
        ];
        let others = fields.into_iter().filter(|(name, _)| *name != changed);
        let all = others.chain([(changed, value)].into_iter().filter(|(_, value)| !value.is_empty()));
        all.fold(get("/v1/realtime"), |request, (name, value)| request.header(name, value))
    }

    #[test]
    fn a_whole_handshake_passes() {
        for (name, value) in [
            ("accept", "*/*"),
            ("upgrade", "h2c, WebSocket"),
            ("connection", "keep-alive, upgrade"),
            ("content-length", "0"),
        ] {
            assert_eq!(verdict(handshake(name, value)), Ok(Protocol::WebSocket), "{name}: {value}");
        }
    }

    #[test]
    fn half_a_handshake_does_not() {
        for (name, value, refusal) in [
            ("connection", "", Unclean::Upgrade),
            ("connection", "keep-alive", Unclean::Upgrade),
            ("sec-websocket-key", "", Unclean::Handshake),
            ("sec-websocket-key", "eA==", Unclean::Handshake),
            ("sec-websocket-key", "no base64 at all, but 24", Unclean::Handshake),
            ("content-length", "2", Unclean::Handshake),
            ("transfer-encoding", "chunked", Unclean::Handshake),
            ("sec-websocket-version", "", Unclean::WebSocketVersion),
            ("sec-websocket-version", "8", Unclean::WebSocketVersion),
        ] {
            assert_eq!(verdict(handshake(name, value)), Err(refusal), "{name}: {value}");
        }
        assert_eq!(verdict(handshake("a", "b").method("POST")), Err(Unclean::Handshake));
        assert_eq!(verdict(handshake("a", "b").version(Version::HTTP_10)), Err(Unclean::Handshake));
        let two_keys = handshake("a", "b").header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
        assert_eq!(verdict(two_keys), Err(Unclean::Handshake));
    }

    #[test]
    fn an_offer_of_http2_is_ignored() {
        assert_eq!(verdict(get("/v1").header("upgrade", "h2c")), Ok(Protocol::Http));
        assert_eq!(verdict(handshake("upgrade", "")), Ok(Protocol::Http));
    }
}
