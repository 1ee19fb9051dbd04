//! An upstream that fails is never taken for one that answered, and the caller is told in its own dialect.

use reqwest::Response;
use serde_json::Value;

use crate::harness::{
    Gate, Link, Proxy, ProxyBuilder, Script, Upstream, Wire, clients, header, patiently, secret,
};

const LIMITS: &str = r#"{ requests = 50, per = "1h" }"#;

async fn get(proxy: &Proxy, client: &reqwest::Client, path: &str) -> Response {
    let request = client.get(proxy.url(path)).bearer_auth(secret("alice")).send();
    patiently("the head of an answer", request).await.unwrap()
}

/// An answer of our own, and the log line about it.
async fn failure(proxy: &Proxy, path: &str, status: u16, outcome: &str) -> (Value, Value) {
    let answer = get(proxy, &proxy.client(), path).await;
    assert_eq!(answer.status(), status, "{path}");
    assert_eq!(header(&answer, "content-type"), "application/json");
    assert!(answer.headers().contains_key("x-request-id"));
    assert!(
        answer.headers().contains_key("x-ratelimit-remaining"),
        "it was admitted, so it is told what is left"
    );
    let body = answer.json().await.unwrap();
    let line = proxy.logs.request(path).await;
    assert_eq!((&line["status"], &line["outcome"]), (&status.into(), &outcome.into()), "{line}");
    (body, line)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_connection_is_502_in_the_dialect_and_the_reason_stays_in_the_log() {
    let wire = Wire::listen().await;
    let url = wire.url();
    wire.close();
    let proxy = ProxyBuilder::before_url(&url).tier("alice", LIMITS).start().await;
    let (openai, line) = failure(&proxy, "/v1/chat/completions", 502, "upstream_failed").await;
    assert_eq!(openai["error"]["type"], "server_error");
    assert!(line["reason"].as_str().unwrap().contains("refused"), "{line}");
    let (anthropic, _) = failure(&proxy, "/v1/messages", 502, "upstream_failed").await;
    assert_eq!((&anthropic["type"], &anthropic["error"]["type"]), (&"error".into(), &"api_error".into()));
    let (gemini, _) = failure(&proxy, "/v1beta/models/g:generateContent", 502, "upstream_failed").await;
    assert_eq!(gemini["error"]["status"], "UNAVAILABLE");
    let (ollama, _) = failure(&proxy, "/api/chat", 502, "upstream_failed").await;
    assert!(ollama["error"].is_string());
    let port = url.rsplit(':').next().unwrap().to_owned();
    for body in [openai, anthropic, gemini, ollama].map(|body| body.to_string()) {
        for detail in ["refused", "os error", "127.0.0.1", &*port] {
            assert!(!body.contains(detail), "`{detail}` is the operator's business: {body}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_never_answers_is_504() {
    let upstream = Upstream::start(|_| Script::new().hang()).await;
    let proxy = ProxyBuilder::before(&upstream).upstream("first_byte_timeout = \"300ms\"");
    let proxy = proxy.tier("alice", LIMITS).start().await;
    let (body, _) = failure(&proxy, "/v1/messages", 504, "upstream_timeout").await;
    assert_eq!(body["type"], "error");
    upstream.next_closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_hang_hold_up_no_others() {
    const HANGING: usize = 100;
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/hangs" => Script::new().hang(),
        _ => Script::json(200, "{}"),
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let client = proxy.client();
    let mut hanging = tokio::task::JoinSet::new();
    for _ in 0..HANGING {
        let client = if hanging.len() % 2 == 0 { client.clone() } else { proxy.client() };
        let request = client.get(proxy.url("/v1/hangs")).bearer_auth(secret("alice"));
        hanging.spawn(request.send());
    }
    for _ in 0..HANGING {
        assert_eq!(upstream.next_request().await.target, "/v1/hangs");
    }
    for (protocol, client) in clients(&proxy) {
        assert_eq!(get(&proxy, &client, "/v1/fine").await.status(), 200, "{protocol}");
    }
    assert_eq!(get(&proxy, &client, "/v1/fine").await.status(), 200, "on their own connection too");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_accepts_no_connection_is_504() {
    // A queue of one that is full: the kernel then ignores whoever knocks.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    let brief = std::time::Duration::from_millis(500);
    while let Ok(waiting) = tokio::time::timeout(brief, tokio::net::TcpStream::connect(address)).await {
        queue.push(waiting.unwrap());
    }
    let proxy =
        ProxyBuilder::before_url(&format!("http://{address}")).upstream("connect_timeout = \"300ms\"");
    let proxy = proxy.tier("alice", LIMITS).start().await;
    let (_, line) = failure(&proxy, "/v1/models", 504, "upstream_timeout").await;
    assert!(line["reason"].as_str().unwrap().contains("connecting"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_answer_is_502_and_its_connection_not_used_again() {
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/garbage" => Script::new().send("SSH-2.0-OpenSSH_9.6\r\n\r\n").hang(),
        "/v1/switch" => Script::new()
            .send("HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n")
            .hang(),
        "/v1/huge" => Script::new().send("HTTP/1.1 200 OK\r\nx: ").send("x".repeat(1 << 20)).hang(),
        "/v1/lengths" => {
            Script::new().send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{}").hang()
        }
        "/v1/nothing" => Script::new().close(),
        "/v1/half" => Script::new().send("HTTP/1.1 200 OK\r\ncontent-").close(),
        "/v1/reset" => Script::new().reset(),
        _ => Script::json(200, "{}"),
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for path in ["garbage", "switch", "huge", "lengths", "nothing", "half", "reset"] {
        let before = upstream.connections();
        let path = format!("/v1/{path}");
        let (body, _) = failure(&proxy, &path, 502, "upstream_failed").await;
        assert_eq!(body["error"]["type"], "server_error");
        assert_eq!(upstream.connections(), before + 1, "{path}: a fresh connection, and no second try");
        assert_eq!(upstream.next_request().await.target, path);
        upstream.next_closed().await;
    }
    assert_eq!(get(&proxy, &proxy.client(), "/v1/fine").await.status(), 200);
}

/// Every way in which an answer can break, after `data: one`.
const BREAKS: [&str; 7] =
    ["fin-chunked", "fin-in-chunk", "fin-length", "rst-chunked", "rst-close", "chunk-size", "stall"];

fn broken(path: &str) -> Script {
    let length =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 100\r\n\r\ndata: one\n\n";
    let close = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: one\n\n";
    match path {
        "/v1/fin-chunked" => Script::sse().event("one").close(),
        "/v1/fin-in-chunk" => Script::sse().send("64\r\ndata: one\n\n").close(),
        "/v1/fin-length" => Script::new().send(length).close(),
        "/v1/chunk-size" => Script::sse().event("one").send("zz\r\n\r\n"),
        "/v1/stall" => Script::sse().event("one").hang(),
        "/v1/rst-close" => Script::new().send(close).reset(),
        _ => Script::sse().event("one").reset(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_answer_never_ends_cleanly_and_what_came_before_arrives() {
    let gates: std::sync::Arc<[Gate; BREAKS.len() * 2]> = Default::default();
    let held = gates.clone();
    let upstream = Upstream::start(move |request| {
        // What was sent before a reset can be lost on the way here, so each break waits until the event has arrived.
        let nth: usize = request.header("x-nth").unwrap().parse().unwrap();
        broken(&request.target).wait_before_last(&held[nth])
    })
    .await;
    let proxy =
        ProxyBuilder::before(&upstream).upstream("idle_timeout = \"1s\"").tier("alice", LIMITS).start().await;
    let mut nth = 0;
    for (protocol, client) in clients(&proxy) {
        for name in BREAKS {
            let path = format!("/v1/{name}");
            let request = client.get(proxy.url(&path)).bearer_auth(secret("alice")).header("x-nth", nth);
            let mut answer = patiently("a head", request.send()).await.unwrap();
            let first = patiently("the event", answer.chunk()).await.unwrap().unwrap();
            assert_eq!(first, "data: one\n\n", "{protocol} {name}");
            gates[nth].open();
            let mut said = Vec::new();
            while let Ok(piece) = patiently("the break", answer.chunk()).await {
                said.extend(piece.unwrap_or_else(|| panic!("{protocol} {name}: a clean end")));
            }
            let expected = if name == "fin-length" { "" } else { "data: {\"error\":" };
            let said = String::from_utf8(said).unwrap();
            assert!(said.starts_with(expected) && said.is_empty() == expected.is_empty(), "{name}: {said}");
            upstream.next_closed().await;
            let line = proxy.logs.request(&path).await;
            let outcome = if name == "stall" { "upstream_stalled" } else { "upstream_broke" };
            assert_eq!((&line["ending"], &line["outcome"]), (&"broken".into(), &outcome.into()), "{line}");
            assert_eq!(line["bytes"], 11 + said.len());
            nth += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_came_with_the_break_arrives_too() {
    let event = "x".repeat(5000);
    let sent = event.clone();
    // Head, event and break in one piece, so that all are there before anything is passed on.
    let upstream = Upstream::start(move |_| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        Script::new().send(format!("{head}{:x}\r\n{sent}\r\nzz\r\n", sent.len())).hang()
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for (protocol, client) in clients(&proxy) {
        for _ in 0..20 {
            let mut answer = get(&proxy, &client, "/v1/x").await;
            let mut arrived = Vec::new();
            let broke = loop {
                match patiently("a piece", answer.chunk()).await {
                    Ok(Some(piece)) => arrived.extend_from_slice(&piece),
                    Ok(None) => break false,
                    Err(_) => break true,
                }
            };
            assert!(broke, "{protocol}");
            assert_eq!(arrived.len(), event.len(), "{protocol}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_behind_an_answer_are_no_answer_to_the_next_caller() {
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/first" => Script::new().send(
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil",
        ),
        _ => Script::json(200, "good"),
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let client = proxy.client();
    for _ in 0..50 {
        assert_eq!(get(&proxy, &client, "/v1/first").await.text().await.unwrap(), "{}");
        assert_eq!(get(&proxy, &client, "/v1/second").await.text().await.unwrap(), "good");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_half_closes_after_its_answer_is_heard_out() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let client = proxy.client();
    let answer = get(&proxy, &client, "/v1/x");
    let upstream = async {
        let mut link: Link = wire.accept().await;
        link.request().await;
        link.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").await;
        link.ended().await;
    };
    let (answer, ()) = tokio::join!(answer, upstream);
    assert_eq!(answer.text().await.unwrap(), "{}");
}
