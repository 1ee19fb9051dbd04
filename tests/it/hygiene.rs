//! What proxies and upstreams could read differently is refused or made canonical, byte by byte on HTTP/1.1.

use crate::harness::{ProxyBuilder, Received, Upstream, raw::Raw, secret};

const LIMITS: &str = r#"{ requests = 1000, per = "1m" }"#;

/// What becomes of a request. Connections may close after any answer.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// It is answered with this, and the upstream sees nothing.
    Refused(u16),
    /// The upstream gets one request: this target, this body.
    Passes(&'static str, &'static str),
}
use Fate::{Passes, Refused};

/// A request with this body, in chunks.
macro_rules! chunked {
    ($body:literal) => {
        concat!(
            "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}connection: close\r\ntransfer-encoding: chunked\r\n\r\n",
            $body
        )
    };
}

/// `{key}` stands for the credential's field. A request that could smuggle carries `GET /v1/smuggled` behind it.
const CORPUS: &[(&str, &str, Fate)] = &[
    // Framing.
    (
        "a length and a coding",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: 60\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nhost: a\r\n{key}\r\n",
        Passes("/v1/x", "hi"),
    ),
    (
        "a coding and a length",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\nhi\r\n0\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nhost: a\r\n{key}\r\n",
        Passes("/v1/x", "hi"),
    ),
    (
        "two lengths",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: 2\r\ncontent-length: 3\r\n\r\nhi!",
        Refused(400),
    ),
    (
        "a length with a sign",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: +2\r\n\r\nhi",
        Refused(400),
    ),
    (
        "a list of lengths",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: 2, 2\r\n\r\nhi",
        Refused(400),
    ),
    (
        "a length twice, with zeros",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: 2\r\ncontent-length: 002\r\nconnection: close\r\n\r\nhi",
        Passes("/v1/x", "hi"),
    ),
    (
        "gzip before chunked",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(501),
    ),
    (
        "gzip alone",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: gzip\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(400),
    ),
    (
        "chunked twice",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(501),
    ),
    (
        "chunked with a control character",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: \x0bchunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(400),
    ),
    (
        "chunked in HTTP/1.0",
        "POST /v1/x HTTP/1.0\r\nhost: a\r\n{key}transfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(400),
    ),
    (
        "a trailer",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\ncontent-length: 9\r\n\r\n",
        Passes("/v1/x", "hi"),
    ),
    (
        "a negative length",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: -1\r\n\r\nhi",
        Refused(400),
    ),
    (
        "a length in hexadecimal",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: 0x2\r\n\r\nhi",
        Refused(400),
    ),
    ("no length", "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length:\r\n\r\nhi", Refused(400)),
    (
        "a length beyond 64 bits",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length: 18446744073709551618\r\n\r\nhi",
        Refused(400),
    ),
    (
        "a length with a space before the colon",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length : 2\r\n\r\nhi",
        Refused(400),
    ),
    (
        "a length on a folded line",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}content-length:\r\n 2\r\n\r\nhi",
        Refused(400),
    ),
    (
        "chunked before identity",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding: chunked, identity\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(400),
    ),
    (
        "chunked with a space before the colon",
        "POST /v1/x HTTP/1.1\r\nhost: a\r\n{key}transfer-encoding : chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        Refused(400),
    ),
    // Chunks.
    ("a bare LF behind a size", chunked!("2\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("a bare CR behind a size", chunked!("2\rhi\r\n0\r\n\r\n"), Refused(400)),
    ("a bare CR in an extension", chunked!("2;a\rb\r\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("a bare LF in an extension", chunked!("2;a\nb\r\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("a bare LF behind data", chunked!("2\r\nhi\n0\r\n\r\n"), Refused(400)),
    ("a bare CR behind data", chunked!("2\r\nhi\r0\r\n\r\n"), Refused(400)),
    ("more data than its size", chunked!("2\r\nhi!\r\n0\r\n\r\n"), Refused(400)),
    ("a size with 0x", chunked!("0x2\r\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("a size with a sign", chunked!("+2\r\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("a size beyond 64 bits", chunked!("10000000000000002\r\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("a size behind a space", chunked!(" 2\r\nhi\r\n0\r\n\r\n"), Refused(400)),
    ("an extension", chunked!("2;a=b\r\nhi\r\n0\r\n\r\n"), Passes("/v1/x", "hi")),
    // Fields.
    (
        "the credential among the connection's own",
        "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}connection: x-api-key, authorization, host, close\r\n\r\n",
        Passes("/v1/x", ""),
    ),
    ("an empty name", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}: b\r\n\r\n", Refused(400)),
    ("a DEL", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}x-a: b\x7fc\r\n\r\n", Refused(400)),
    ("a folded first line", "GET /v1/x HTTP/1.1\r\n host: a\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a folded line", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}x-a: b\r\n c\r\n\r\n", Refused(400)),
    ("a space before the colon", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}x-a : b\r\n\r\n", Refused(400)),
    ("no colon", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}x-a\r\n\r\n", Refused(400)),
    ("a NUL", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}x-a: b\0c\r\n\r\n", Refused(400)),
    ("a bare CR", "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}x-a: b\rc\r\n\r\n", Refused(400)),
    ("bare LFs", "GET /v1/x HTTP/1.1\nhost: a\n{key}connection: close\n\n", Passes("/v1/x", "")),
    // Hosts.
    ("no host", "GET /v1/x HTTP/1.1\r\n{key}\r\n", Refused(400)),
    ("two hosts", "GET /v1/x HTTP/1.1\r\nhost: a\r\nhost: b\r\n{key}\r\n", Refused(400)),
    ("the same host twice", "GET /v1/x HTTP/1.1\r\nhost: a\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a user in the host", "GET /v1/x HTTP/1.1\r\nhost: u@a\r\n{key}\r\n", Refused(400)),
    ("a path in the host", "GET /v1/x HTTP/1.1\r\nhost: a/b\r\n{key}\r\n", Refused(400)),
    // Targets.
    (
        "the absolute form",
        "GET http://a/v1/x?q HTTP/1.1\r\nhost: a\r\n{key}connection: close\r\n\r\n",
        Passes("/v1/x?q", ""),
    ),
    ("the absolute form of another", "GET http://b/v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("the absolute form with a user", "GET http://u@a/v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("two spaces", "GET  /v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a tab", "GET\t/v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a way up behind encoded slashes", "GET /v1/a%2F..%2fx HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("an asterisk", "OPTIONS * HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("no slash", "GET v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a way up", "GET /v1/../x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a hidden way up", "GET /v1/%2e%2E/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("an encoded NUL", "GET /v1/%00 HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("an encoded line end", "GET /v1/x%0d%0ax: HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a broken escape", "GET /v1/%zz HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a backslash", "GET /v1\\x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a fragment", "GET /v1/x#y HTTP/1.1\r\nhost: a\r\n{key}connection: close\r\n\r\n", Passes("/v1/x", "")),
    (
        "escapes that stay as they are",
        "GET /v1/a%2Fb%20c?d=%C3%A9&e HTTP/1.1\r\nhost: a\r\n{key}connection: close\r\n\r\n",
        Passes("/v1/a%2Fb%20c?d=%C3%A9&e", ""),
    ),
    // Methods and versions.
    ("CONNECT", "CONNECT a:443 HTTP/1.1\r\nhost: a:443\r\n{key}\r\n", Refused(405)),
    ("TRACE", "TRACE /v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(405)),
    ("a method of their own", "BREW /v1/x HTTP/1.1\r\nhost: a\r\n{key}\r\n", Refused(405)),
    ("no version", "GET /v1/x\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a version in small letters", "GET /v1/x http/1.1\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("the other protocol's version", "GET /v1/x HTTP/2.0\r\nhost: a\r\n{key}\r\n", Refused(400)),
    ("a version to come", "GET /v1/x HTTP/1.2\r\nhost: a\r\n{key}\r\n", Refused(400)),
    (
        "a WebSocket with a key that is none",
        "GET /v1/realtime HTTP/1.1\r\nhost: a\r\n{key}connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: eA==\r\n\r\n",
        Refused(400),
    ),
    (
        "a WebSocket with a body",
        "GET /v1/realtime HTTP/1.1\r\nhost: a\r\n{key}connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\ncontent-length: 60\r\n\r\nGET /v1/smuggled HTTP/1.1\r\nhost: a\r\n{key}\r\n",
        Refused(400),
    ),
    (
        "a WebSocket by POST",
        "POST /v1/realtime HTTP/1.1\r\nhost: a\r\n{key}connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        Refused(400),
    ),
    (
        "a WebSocket of another version",
        "GET /v1/realtime HTTP/1.1\r\nhost: a\r\n{key}connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 8\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        Refused(426),
    ),
    (
        "a WebSocket that a proxy has taken the connection from",
        "GET /v1/realtime HTTP/1.1\r\nhost: a\r\n{key}upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        Refused(426),
    ),
    (
        "an offer of HTTP/2",
        "GET /v1/x HTTP/1.1\r\nhost: a\r\n{key}connection: upgrade, http2-settings, close\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n",
        Passes("/v1/x", ""),
    ),
];

/// One framing, one host, and nothing that was said to Tollgate alone.
fn is_canonical(request: &Received, upstream: &Upstream) {
    assert_eq!(request.header("host"), Some(&upstream.url()["http://".len()..]));
    for name in ["connection", "upgrade", "http2-settings", "x-api-key", "te", "trailer", "keep-alive"] {
        assert_eq!(request.header(name), None, "{name} does not pass");
    }
    let framings = ["content-length", "transfer-encoding"].map(|name| request.header(name).is_some());
    assert_ne!(framings, [true, true], "one framing");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_means_two_things() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let key = format!("x-api-key: {}\r\n", secret("alice"));
    let mut seen = 0;
    for (case, request, fate) in CORPUS {
        let mut raw = Raw::to(&proxy).await;
        raw.send(request.replace("{key}", &key)).await;
        let answer = raw.answer().await;
        let status = answer.as_ref().map(|answer| answer.status);
        let passed = upstream.received().split_off(seen);
        match *fate {
            Refused(expected) => {
                assert_eq!((status, passed.len()), (Some(expected), 0), "{case}");
            }
            Passes(target, body) => {
                assert_eq!(status, Some(200), "{case}");
                raw.rest().await;
                let passed = upstream.received().split_off(seen);
                assert_eq!(passed.len(), 1, "{case}: {passed:#?}");
                assert_eq!((&*passed[0].target, &*passed[0].body), (target, body.as_bytes()), "{case}");
                is_canonical(&passed[0], &upstream);
                seen += 1;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_tells_why_in_the_dialect_of_its_path() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let mut raw = Raw::to(&proxy).await;
    raw.get("/v1/a%00", "alice").await;
    let answer = raw.answer().await.unwrap();
    let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    assert_eq!(body["error"]["type"], "invalid_request_error");
    assert!(body["error"]["message"].as_str().unwrap().contains("broken percent-encoding"), "{body}");
    raw.get("/v1/models", "alice").await;
    assert_eq!(raw.answer().await.unwrap().status, 200, "the connection goes on");
}
