//! Where requests go: by path, host and model, with a prefix taken off or a version put back, and byte for byte otherwise.

use std::{
    collections::VecDeque,
    convert::Infallible,
    fmt::Write as _,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame};
use reqwest::StatusCode;
use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{
    Plain, Proxy, ProxyBuilder, Received, Script, Upstream, Wire, clients, patiently, secret,
};

/// An upstream that answers with its name.
async fn named(name: &'static str) -> Upstream {
    Upstream::start(move |_| Script::json(200, &format!("\"{name}\""))).await
}

/// The table of one more upstream.
fn table(name: &str, upstream: &Upstream, lines: &str) -> String {
    format!("[[upstreams]]\nname = \"{name}\"\nurl = \"{}\"\n{lines}\n", upstream.url())
}

/// Claude has an upstream of its own, a GPT another, and the rest a third.
struct ByModel {
    claude: Upstream,
    gpt: Upstream,
    other: Upstream,
}

impl ByModel {
    async fn start() -> Self {
        Self { claude: named("claude").await, gpt: named("gpt").await, other: named("other").await }
    }

    fn before(&self, of_other: &str) -> ProxyBuilder {
        let claude =
            table("claude", &self.claude, "paths = [\"/v1\", \"/v1beta\"]\nmatch = { model = \"claude-*\" }");
        let gpt = table(
            "gpt",
            &self.gpt,
            "paths = [\"/v1\", \"/openai\"]\nmatch = { model = [\"gpt-4o\", \"o*\"] }",
        );
        ProxyBuilder::before(&self.other).upstream(of_other).section(&claude).section(&gpt)
    }

    fn received(&self) -> Vec<Received> {
        [&self.claude, &self.gpt, &self.other].into_iter().flat_map(Upstream::received).collect()
    }
}

async fn post(
    proxy: &Proxy,
    client: &reqwest::Client,
    path: &str,
    kind: &str,
    body: Vec<u8>,
) -> (u16, Value) {
    let request = client.post(proxy.url(path)).bearer_auth(secret("alice")).header("content-type", kind);
    let answer = patiently("an answer", request.body(body).send()).await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

fn chat(model: &str) -> Vec<u8> {
    format!(r#"{{"messages":[{{"role":"user","content":"\"model\":\"gpt-4o\""}}],"model":"{model}"}}"#)
        .into_bytes()
}

fn form(model: &str) -> Vec<u8> {
    let part = |name: &str, value: &str| {
        format!("--xyz\r\ncontent-disposition: form-data; {name}\r\n\r\n{value}\r\n")
    };
    let file = part("name=\"file\"; filename=\"model\"", &"\0audio".repeat(50_000));
    format!("{file}{}--xyz--\r\n", part("name=\"model\"", model)).into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_model_leads_to_its_upstream_wherever_it_is_named() {
    let upstreams = ByModel::start().await;
    let proxy = upstreams.before("paths = [\"/v1\"]").tier("alice", "").start().await;
    let json = "application/json";
    let multipart = "multipart/form-data; boundary=xyz";
    for (protocol, client) in clients(&proxy) {
        for (path, kind, body, served_by) in [
            ("/v1/messages", json, chat("claude-opus-4"), "claude"),
            ("/v1/chat/completions", json, chat("gpt-4o"), "gpt"),
            ("/v1/chat/completions", json, chat("o3"), "gpt"),
            ("/v1/chat/completions", json, chat("gpt-4o-mini"), "other"),
            ("/chat/completions", json, chat("\\u006f3"), "gpt"),
            ("/v1/audio/transcriptions", multipart, form("gpt-4o"), "gpt"),
            ("/v1/audio/transcriptions", multipart, form("whisper-1"), "other"),
            ("/v1beta/models/claude-x:generateContent", json, chat("ignored"), "claude"),
            ("/openai/deployments/gpt-4o/chat/completions?api-version=1", json, chat("ignored"), "gpt"),
            ("/v1/models/claude-x", json, Vec::new(), "claude"),
            ("/v1/realtime?model=gpt-4o", json, Vec::new(), "gpt"),
            // What names no model that is looked for goes where none is asked for.
            ("/v1/files", "application/octet-stream", chat("gpt-4o"), "other"),
            ("/v1/x", json, b"{\"model\":5}".to_vec(), "other"),
            ("/v1/x", json, b"not json".to_vec(), "other"),
            ("/v1/x", json, Vec::new(), "other"),
        ] {
            let answer = post(&proxy, &client, path, kind, body.clone()).await;
            assert_eq!(answer, (200, served_by.into()), "{protocol} {path}");
            let received = upstreams.received().into_iter().max_by_key(|received| received.body == body);
            assert!(
                received.is_some_and(|received| received.body == body),
                "{protocol} {path}: byte for byte"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_behind_long_messages_is_found_and_the_body_stays_whole() {
    let upstreams = ByModel::start().await;
    let proxy = upstreams.before("paths = [\"/v1\"]").server("model_lookahead = \"2MiB\"").tier("alice", "");
    let proxy = proxy.start().await;
    let long = |bytes: usize| {
        let start = format!(r#"{{"messages":["{}"],"model":"claude-x","#, "\\\"}".repeat(bytes / 3));
        format!(r#"{start}"and":"{}"}}"#, "more".repeat(200_000)).into_bytes()
    };
    for (protocol, client) in clients(&proxy) {
        for (bytes, served_by) in [(1_500_000, "claude"), (2_500_000, "other")] {
            let body = long(bytes);
            let request = client.post(proxy.url("/v1/messages")).bearer_auth(secret("alice"));
            let chunked = reqwest::Body::wrap(Unsized::new(&body));
            for (framing, request_body) in
                [("length", reqwest::Body::from(body.clone())), ("chunks", chunked)]
            {
                let request = request.try_clone().unwrap().body(request_body);
                let answer = patiently("an answer", request.send()).await.unwrap();
                assert_eq!(answer.text().await.unwrap(), format!("\"{served_by}\""), "{protocol} {framing}");
                let upstream = if served_by == "claude" { &upstreams.claude } else { &upstreams.other };
                let received = upstream.next_request().await;
                assert!(received.body == body, "{protocol} {framing}: {} bytes came", received.body.len());
                let length = (framing == "length").then(|| body.len().to_string());
                assert_eq!(received.header("content-length"), length.as_deref(), "{protocol} {framing}");
            }
        }
    }
}

/// A body that does not say how long it is.
struct Unsized(VecDeque<Bytes>);

impl Unsized {
    fn new(body: &[u8]) -> Self {
        Self(body.chunks(70_001).map(Bytes::copy_from_slice).collect())
    }
}

impl Body for Unsized {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(piece))))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_behind_the_model_is_not_waited_for() {
    let wire = Wire::listen().await;
    let upstreams = ByModel::start().await;
    let proxy = upstreams.before("paths = [\"/v1\"]").tier("alice", "");
    let late = format!("[[upstreams]]\nname = \"late\"\nurl = \"{}\"\npaths = [\"/v1\"]\n", wire.url());
    let proxy = proxy.section(&format!("{late}match = {{ model = \"late\" }}")).start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/x", "alice", "content-length: 30\r\n").await;
    plain.send(r#"{"model":"la"#).await.unwrap();
    plain.send(r#"te","#).await.unwrap();
    let mut link = wire.accept().await;
    assert_eq!(link.head().await.header("content-length"), Some("30"));
    assert_eq!(link.bytes(16).await, br#"{"model":"late","#);
    plain.send(r#""rest": "of"  }"#.get(..14).unwrap()).await.unwrap();
    assert_eq!(link.bytes(14).await.len(), 14);
    link.ok().await;
    assert_eq!(plain.answer().await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_nobody_serves_is_named_in_the_dialect_and_its_absence_told() {
    let upstreams = ByModel::start().await;
    let tier = r#"{ requests = 100, per = "1h" }"#;
    let proxy =
        upstreams.before("paths = [\"/else\"]").server("model_lookahead = \"1KiB\"").tier("alice", tier);
    let proxy = proxy.start().await;
    let client = proxy.client();
    let json = "application/json";
    let (status, body) = post(&proxy, &client, "/v1/chat/completions", json, chat("llama\\\"3")).await;
    assert_eq!((status, &body["error"]["code"]), (404, &"not_found".into()));
    assert!(body["error"]["message"].as_str().unwrap().contains("`llama\"3`"), "{body}");
    let (status, body) = post(&proxy, &client, "/v1/messages", json, chat("llama")).await;
    assert_eq!((status, &body["error"]["type"]), (404, &"not_found_error".into()));
    let (status, body) = post(&proxy, &client, "/v1beta/models/g:generateContent", json, chat("x")).await;
    assert_eq!((status, &body["error"]["status"]), (404, &"NOT_FOUND".into()));

    let late = format!(r#"{{"x":"{}","model":"claude-x"}}"#, "x".repeat(200_000)).into_bytes();
    for (why, body) in [("late", late), ("none", b"{}".to_vec()), ("no body", Vec::new())] {
        let (status, body) = post(&proxy, &client, "/v1/messages", json, body).await;
        assert_eq!((status, &body["error"]["type"]), (400, &"invalid_request_error".into()), "{why}");
        assert!(body["error"]["message"].as_str().unwrap().contains("`model`"), "{body}");
    }
    let gzip = client
        .post(proxy.url("/v1/messages"))
        .bearer_auth(secret("alice"))
        .header("content-encoding", "gzip");
    assert_eq!(gzip.body(chat("claude-x")).send().await.unwrap().status(), StatusCode::BAD_REQUEST);
    assert!(upstreams.received().is_empty());
    let line = proxy.logs.request("/v1/chat/completions").await;
    assert_eq!((&line["outcome"], &line["status"]), (&"no_route".into(), &404.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_looked_for_only_after_admission() {
    let upstreams = ByModel::start().await;
    let proxy = upstreams
        .before("paths = [\"/else\"]")
        .tier("alice", r#"{ requests = 1, per = "1h" }"#)
        .start()
        .await;
    let body = chat("claude-x");
    let expect = format!("content-length: {}\r\nexpect: 100-continue\r\n", body.len());

    // What the head alone condemns costs the limit nothing.
    for line in ["POST /v1beta/models/g:generateContent", "POST /nowhere"] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(line, "alice", &expect).await;
        assert_eq!(plain.answer().await.unwrap().status, 404, "{line}: at once");
    }
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/messages", "alice", &expect).await;
    assert_eq!(plain.head().await.unwrap().status, 100);
    plain.send(&body).await.unwrap();
    assert_eq!(plain.answer().await.unwrap().body, b"\"claude\"");
    assert_eq!(upstreams.claude.next_request().await.body, body);

    for (id, status) in [("alice", 429), ("nobody", 401)] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request("POST /v1/messages", id, &expect).await;
        assert_eq!(plain.answer().await.unwrap().status, status, "at once, and no 100 before");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_fails_while_its_model_is_looked_for_is_told_of() {
    let upstreams = ByModel::start().await;
    let proxy =
        upstreams.before("paths = [\"/else\"]").server("body_timeout = \"300ms\"\nmax_body_size = \"1KiB\"");
    let proxy = proxy.tier("alice", "").start().await;
    let chunked = "transfer-encoding: chunked\r\n";
    let long = format!("4000\r\n{{\"x\":\"{}\r\n", "x".repeat(0x4000 - 6));
    for (sent, status) in [("8\r\n{\"mode\"", 408), ("zz\r\n", 400), (&*long, 413)] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request("POST /v1/messages", "alice", chunked).await;
        plain.send(sent).await.unwrap();
        let answer = plain.answer().await.unwrap();
        assert_eq!((answer.status, &answer.json()["type"]), (status, &"error".into()));
    }
    assert!(upstreams.received().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_host_leads_to_its_upstream_on_both_protocols() {
    let (eu, any) = (named("eu").await, named("any").await);
    let proxy = ProxyBuilder::before(&any).upstream("paths = [\"/v1\"]");
    let proxy = proxy.section(&table(
        "eu",
        &eu,
        "paths = [\"/v1\"]\nmatch = { host = [\"eu.example.com\", \"*.eu.example.com\"] }",
    ));
    let proxy = proxy.tier("alice", "").start().await;
    for (host, served_by) in [("eu.example.com", "eu"), ("a.eu.example.com", "eu"), ("example.com", "any")] {
        let url = format!("https://{host}:{}/v1/x", proxy.address.port());
        let builder = || {
            let address = [proxy.address];
            proxy.client_builder().tls_danger_accept_invalid_hostnames(true).resolve_to_addrs(host, &address)
        };
        for client in [builder().http1_only().build().unwrap(), builder().build().unwrap()] {
            let answer = client.get(&url).bearer_auth(secret("alice")).send().await.unwrap();
            assert_eq!(answer.text().await.unwrap(), format!("\"{served_by}\""), "{host}");
        }
    }
    let mut plain = Plain::connect(&proxy).await;
    let capitals = format!("host: A.Eu.Example.COM:8443\r\nx-api-key: {}\r\n", secret("alice"));
    plain.send(format!("GET /v1/x HTTP/1.1\r\n{capitals}\r\n")).await.unwrap();
    assert_eq!(plain.answer().await.unwrap().body, b"\"eu\"");
    let client = proxy.client();
    let (status, _) = post(&proxy, &client, "/v2/x", "text/plain", Vec::new()).await;
    assert_eq!(status, 404, "that path is served at another host");
}

/// Every target goes out as it came in, or as the second column says.
#[tokio::test(flavor = "multi_thread")]
async fn targets_keep_their_bytes_but_for_what_is_told_to_change() {
    let upstream = Upstream::ok().await;
    let url = |path: &str| format!("url = \"{}{path}\"", upstream.url());
    let mut more = String::new();
    for (name, path, lines) in [
        ("stripped", "", "paths = [\"/openai\"]\nstrip_prefix = \"/openai\""),
        ("based", "/api/paas/v4/", "paths = [\"/zhipu\"]\nstrip_prefix = \"/zhipu\""),
        ("rebased", "/v1beta/openai", "paths = [\"/g/v1\"]\nstrip_prefix = \"/g/v1\""),
    ] {
        writeln!(more, "[[upstreams]]\nname = \"{name}\"\n{}\n{lines}", url(path)).unwrap();
    }
    let proxy = ProxyBuilder::before(&upstream).upstream("paths = [\"/\"]").section(&more).tier("alice", "");
    let proxy = proxy.start().await;
    let mut plain = Plain::connect(&proxy).await;
    let same = "";
    for (asked, sent) in [
        ("/v1/models/org%2Fmodel:tag", same),
        ("/v1/a%20b;x=1/%E2%82%AC", same),
        ("/v1/messages?beta=true", same),
        ("/openai2/deployments/d/chat/completions?api-version=2024-06-01", same),
        ("/v1beta/models/g:streamGenerateContent?alt=sse&$alt=json%3Benum", same),
        ("/v1beta/models/g%3Ax:countTokens?x=%2f%2F", same),
        ("/v1/x?b=2&a=1&empty=&flag&b=3&c=%26+%2B", same),
        ("/v1/x?q=a/b//c?d:e@f", same),
        ("/v1/x/", same),
        ("/v1/x//y", same),
        ("/v1/~user/(a)!*'$,=+", same),
        ("/v1", same),
        ("/", same),
        ("/api/chat", same),
        ("//v1/models?a=%20", "/v1/models?a=%20"),
        ("/v1/v1/models/a%2Fb", "/v1/models/a%2Fb"),
        ("/v1//models", "/v1/models"),
        ("/v1beta/v1beta/models/g:generateContent?alt=sse", "/v1beta/models/g:generateContent?alt=sse"),
        ("/models/g:generateContent?alt=sse", "/v1beta/models/g:generateContent?alt=sse"),
        ("/models/", "/v1/models/"),
        ("/openai/v1/models/a%2Fb:c?x=%20&y", "/v1/models/a%2Fb:c?x=%20&y"),
        ("/openai/chat/completions?a", "/v1/chat/completions?a"),
        ("//openai//v1/v1/messages/", "/v1/messages/"),
        ("/openai", "/"),
        ("/openai?x=1", "/?x=1"),
        ("/openai/openai/deployments/d%2F/x?api-version=1", "/openai/deployments/d%2F/x?api-version=1"),
        ("/zhipu/v1/chat/completions", "/api/paas/v4/chat/completions"),
        ("/zhipu/chat/completions", "/api/paas/v4/chat/completions"),
        ("/zhipu/files%2Fa?b", "/api/paas/v4/files%2Fa?b"),
        ("/g/v1/chat/completions", "/v1beta/openai/chat/completions"),
    ] {
        plain.request(&format!("GET {asked}"), "alice", "").await;
        assert_eq!(plain.answer().await.unwrap().status, 200, "{asked}");
        let received = upstream.next_request().await;
        assert_eq!(received.target, if sent == same { asked } else { sent }, "{asked}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn routes_change_with_a_reload() {
    let upstreams = ByModel::start().await;
    let before = ProxyBuilder::before(&upstreams.other).tier("alice", "");
    let proxy = before.clone().start().await;
    let client = proxy.client();
    let ask = async || post(&proxy, &client, "/v1/messages", "application/json", chat("claude-x")).await.1;
    assert_eq!(ask().await, "other");
    let claude = table("claude", &upstreams.claude, "paths = [\"/v1\"]\nmatch = { model = \"claude-*\" }");
    proxy.write_config(&before.upstream("paths = [\"/\"]\nmax_body_size = \"1KiB\"").section(&claude));
    proxy.signal(Signal::HUP).await;
    proxy.logs.wait_for("the reload", |line| line["fields"]["message"] == "reloaded").await;
    assert_eq!(ask().await, "claude");
    let large = post(&proxy, &client, "/else", "application/json", vec![b' '; 2000]).await;
    assert_eq!(large.0, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_dialect_of_the_path_below_a_stripped_prefix() {
    let upstream = Upstream::ok().await;
    let strip = "paths = [\"/local\"]\nstrip_prefix = \"/local\"\nmax_body_size = \"1KiB\"";
    let proxy = ProxyBuilder::before(&upstream).upstream(strip).tier("alice", "").start().await;
    let client = proxy.client();
    let large = vec![b' '; 2000];
    for (path, kind) in [
        ("/local/api/delete", "/error"),
        ("/local/v1/messages", "/error/type"),
        ("/local/v1beta/models/g:generateContent", "/error/status"),
        ("/local/chat/completions", "/error/code"),
    ] {
        let (status, body) = post(&proxy, &client, path, "application/json", large.clone()).await;
        assert!(status == 413 && body.pointer(kind).is_some_and(Value::is_string), "{path}: {status} {body}");
    }
    for path in ["/elsewhere/api/chat", "/api/tags"] {
        let (status, body) = post(&proxy, &client, path, "application/json", Vec::new()).await;
        assert!(status == 404 && body["error"].is_string(), "{path}: {body}");
    }
    let (_, body) = post(&proxy, &client, "/api/v1/chat/completions", "application/json", Vec::new()).await;
    assert_eq!(body["error"]["code"], "not_found", "{body}");
}
