//! Answers that Tollgate makes itself: the right class of error, in the shape that the clients of the path read.

use serde_json::Value;

use crate::harness::{Answer, Plain, Proxy, ProxyBuilder, Script, Upstream, secret};

/// A path of each API.
const PATHS: [&str; 4] =
    ["/v1/chat/completions", "/v1/messages", "/v1beta/models/g:generateContent", "/api/chat"];

const HANDSHAKE: &str = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                         sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
const PREFLIGHT: &str = "origin: https://evil.example\r\naccess-control-request-method: POST\r\n";
const CUT_SHORT: &str = "content-length: 10\r\n";
/// Whoever asks first whether to send need not be drained.
const TOO_LARGE: &str = "content-length: 2000\r\nexpect: 100-continue\r\n";
const TWO_CODINGS: &str = "transfer-encoding: gzip, chunked\r\n";

/// The classes of an error by API: OpenAI's code, Anthropic's type and Gemini's status.
type Classes = [&'static str; 3];
const INVALID: Classes = ["invalid_request", "invalid_request_error", "INVALID_ARGUMENT"];
const STRANGER: Classes = ["invalid_api_key", "authentication_error", "UNAUTHENTICATED"];
const FORBIDDEN: Classes = ["permission_denied", "permission_error", "PERMISSION_DENIED"];
const MISSING: Classes = ["not_found", "not_found_error", "NOT_FOUND"];
const LARGE: Classes = ["request_too_large", "request_too_large", "INVALID_ARGUMENT"];
const LIMITED: Classes = ["rate_limit_exceeded", "rate_limit_error", "RESOURCE_EXHAUSTED"];
const UNAVAILABLE: Classes = ["server_error", "api_error", "UNAVAILABLE"];

/// One answer on a connection of its own.
async fn asked(proxy: &Proxy, line: &str, id: &str, headers: &str) -> Answer {
    let mut plain = Plain::connect(proxy).await;
    plain.request(line, id, headers).await;
    plain.answer().await.unwrap()
}

/// Whether it is what the clients of the `nth` path make their own exception of.
fn has_the_shape(nth: usize, answer: &Answer, status: u16, classes: Classes) {
    let case = format!("{status} on {}: {answer:?}", PATHS[nth]);
    assert_eq!(answer.status, status, "{case}");
    assert_eq!(answer.header("content-type"), Some("application/json"), "{case}");
    let id = answer.header("x-request-id").unwrap();
    let opens = (status == 401).then_some("Bearer");
    assert_eq!(answer.header("www-authenticate"), opens, "{case}");
    assert!(!id.is_empty() && answer.header("request-id") == Some(id), "{case}");
    let body = answer.json();
    let error = &body["error"];
    let message = match nth {
        0 => {
            assert_eq!((&error["code"], &error["param"]), (&classes[0].into(), &Value::Null), "{case}");
            assert!(error["type"].is_string(), "{case}");
            &error["message"]
        }
        1 => {
            assert_eq!((&body["type"], &body["request_id"]), (&"error".into(), &id.into()), "{case}");
            assert_eq!(error["type"], classes[1], "{case}");
            &error["message"]
        }
        2 => {
            assert_eq!((&error["code"], &error["status"]), (&status.into(), &classes[2].into()), "{case}");
            &error["message"]
        }
        _ => error,
    };
    assert!(message.as_str().is_some_and(|message| message.ends_with('.')), "{case}");
}

/// R4.
#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_has_the_shape_of_its_path() {
    let silent = Upstream::start(|_| Script::new().hang()).await;
    let proxy = ProxyBuilder::before(&silent)
        .upstream("paths = [\"/silent\"]\nstrip_prefix = \"/silent\"\nfirst_byte_timeout = \"300ms\"")
        .upstream("websocket = false")
        .section("[[upstreams]]\nname = \"dead\"\nurl = \"http://127.0.0.1:1\"\npaths = [\"/dead\"]")
        .section("[cors]\norigins = [\"https://app.example.com\"]")
        .server("max_body_size = \"1KiB\"\nbody_timeout = \"300ms\"")
        .tier("alice", "")
        .start()
        .await;
    let large_head = format!("x-large: {}\r\n", "x".repeat(66_000));
    for (nth, path) in PATHS.into_iter().enumerate() {
        let long_query = format!("?q={}", "x".repeat(9000));
        for (method, prefix, query, id, headers, status, classes) in [
            ("GET", "/silent", "?%zz", "alice", "host: another\r\n", 400, INVALID),
            ("POST", "/silent", "", "nobody", "", 401, STRANGER),
            ("OPTIONS", "/silent", "", "nobody", PREFLIGHT, 403, FORBIDDEN),
            ("POST", "/nowhere", "", "alice", "", 404, MISSING),
            ("TRACE", "/silent", "", "alice", "", 405, INVALID),
            ("POST", "/silent", "", "alice", CUT_SHORT, 408, INVALID),
            ("POST", "/silent", "", "alice", TOO_LARGE, 413, LARGE),
            ("GET", "/silent", &long_query, "alice", "", 414, INVALID),
            ("GET", "/silent", "", "alice", HANDSHAKE, 426, INVALID),
            ("GET", "/silent", "", "alice", &large_head, 431, INVALID),
            ("POST", "/silent", "", "alice", TWO_CODINGS, 501, INVALID),
            ("GET", "/dead", "", "alice", "", 502, UNAVAILABLE),
            ("GET", "/silent", "", "alice", "", 504, UNAVAILABLE),
        ] {
            let answer = asked(&proxy, &format!("{method} {prefix}{path}{query}"), id, headers).await;
            has_the_shape(nth, &answer, status, classes);
        }
    }
}

/// R4, R5, R35: those of the limiter also say when to come back.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_the_limiter_has_the_shape_of_its_path() {
    let upstream = Upstream::ok().await;
    let limits = r#"{ requests = 1, per = "1m" }, { requests = 100, per = "1h" }"#;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", limits).start().await;
    let away = ProxyBuilder::before(&upstream).tier("alice", limits).redis("redis://127.0.0.1:1", "");
    let away = away.start().await;
    assert_eq!(proxy.chat(&proxy.client(), "alice").send().await.unwrap().status(), 200);
    for (nth, path) in PATHS.into_iter().enumerate() {
        let answer = asked(&proxy, &format!("POST {path}"), "alice", "content-length: 0\r\n").await;
        has_the_shape(nth, &answer, 429, LIMITED);
        let number = |name: &str| answer.header(name).unwrap().parse::<u64>().unwrap();
        let (wait, millis) = (number("retry-after"), number("retry-after-ms"));
        assert_eq!((wait, wait), (millis.div_ceil(1000), number("x-ratelimit-reset")), "{path}");
        assert_eq!(
            (number("x-ratelimit-limit"), number("x-ratelimit-remaining")),
            (1, 0),
            "the one that refused"
        );
        let said = String::from_utf8(answer.body.clone()).unwrap();
        assert!(said.contains(&format!("try again in {wait}s")), "{said}");
        assert_ne!(answer.header("x-should-retry"), Some("true"), "{path}");

        let answer = asked(&away, &format!("POST {path}"), "alice", "content-length: 0\r\n").await;
        has_the_shape(nth, &answer, 503, UNAVAILABLE);
        assert_eq!(answer.header("retry-after"), Some("1"), "{path}");
    }
    assert_eq!(upstream.received().len(), 1);
    assert!(!format!("{:?}", proxy.logs.all()).contains(&secret("alice")));
}
