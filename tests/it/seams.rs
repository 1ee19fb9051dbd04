//! Where two features meet: what holds for each of them still holds.

use std::time::Duration;

use rustix::process::Signal;

use crate::harness::{
    Answer, Http2Upstream, Plain, Proxy, ProxyBuilder, Upstream, Wire, close_and_drain, converse, header,
    patiently, secret,
};

const LIMITS: &str = r#"{ requests = 1000, per = "1h" }"#;

/// What every client sends that asks for a WebSocket, but for its credential.
const HANDSHAKE: &str = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
     sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

const SWITCH: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
     sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// Asks for a WebSocket, with these further header lines.
async fn ask(proxy: &Proxy, target: &str, headers: &str) -> Plain {
    let mut client = Plain::connect(proxy).await;
    client.request(&format!("GET {target}"), "alice", &format!("{HANDSHAKE}{headers}")).await;
    client
}

async fn has_begun_to_drain(proxy: &Proxy) {
    let draining = |line: &serde_json::Value| {
        line["fields"]["message"].as_str().is_some_and(|said| said.starts_with("draining"))
    };
    proxy.logs.wait_for("the drain", draining).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_else_comes_by_a_connection_of_http2_is_no_beginning_of_an_answer() {
    let (silent, good) = (Http2Upstream::start().await, Http2Upstream::start().await);
    let lines = "http2 = true\nfirst_byte_timeout = \"300ms\"\nretry = { on = [\"timeout\"] }";
    let proxy = ProxyBuilder::before_endpoints(&[silent.url(), good.url()])
        .upstream(lines)
        .tier("alice", LIMITS)
        .start()
        .await;
    tokio::spawn(async move { good.answer_all().await });
    let client = proxy.client();
    let tried_twice = async {
        for n in 0.. {
            let path = format!("/v1/{n}");
            let request = client.post(proxy.url(&path)).bearer_auth(secret("alice")).body("{}");
            assert_eq!(request.send().await.unwrap().status(), 200, "{path}");
            if proxy.logs.request(&path).await["attempts"] == 2 {
                return;
            }
        }
    };
    patiently("a request that was tried twice", tried_twice).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_whose_answer_has_begun_is_not_tried_again() {
    let wire = Wire::listen().await;
    let retry = "retry = { on = [\"broken\", \"connect\"] }";
    let proxy = ProxyBuilder::before_url(&wire.url()).upstream(retry).tier("alice", LIMITS).start().await;
    let mut client = ask(&proxy, "/v1/realtime", "").await;
    let mut server = wire.accept().await;
    server.head().await;
    server.send("HTTP/1.1 101 Swi").await;
    drop(server);
    assert_eq!(client.answer().await.unwrap().status, 502);
    assert_eq!(proxy.logged("/v1/realtime").await["attempts"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_is_under_way_when_a_drain_begins_becomes_a_tunnel() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url())
        .server("drain_timeout = \"1h\"")
        .tier("alice", LIMITS)
        .start()
        .await;
    let mut client = ask(&proxy, "/v1/realtime", "").await;
    let mut server = wire.accept().await;
    server.head().await;
    proxy.signal(Signal::TERM).await;
    has_begun_to_drain(&proxy).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    server.send(SWITCH).await;
    let answer: Answer = client.head().await.unwrap();
    assert_eq!((answer.status, answer.header("connection")), (101, Some("Upgrade")));
    converse(&mut client, &mut server).await;
    close_and_drain(proxy, client, server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_list_of_the_connections_fields_takes_a_handshake_apart() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", LIMITS).start().await;
    let listed = "connection: sec-websocket-key, Sec-WebSocket-Version\r\n";
    let mut client = ask(&proxy, "/v1/realtime", listed).await;
    let mut server = wire.accept().await;
    let request = server.head().await;
    assert_eq!(request.header("connection"), Some("Upgrade"));
    assert_eq!(request.header("sec-websocket-key"), Some("dGhlIHNhbXBsZSBub25jZQ=="));
    assert_eq!(request.header("sec-websocket-version"), Some("13"));
    server.send(SWITCH.replace("upgrade\r\nupgrade", "upgrade, sec-websocket-accept\r\nupgrade")).await;
    let answer = client.head().await.unwrap();
    assert_eq!(answer.header("sec-websocket-accept"), Some("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    assert_eq!(answer.header("connection"), Some("Upgrade"));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_head_alone_decides_is_refused_for_nothing() {
    let upstream = Upstream::ok().await;
    let builder =
        ProxyBuilder::before(&upstream).upstream("match = { model = \"gpt-*\" }\npaths = [\"/v1\"]");
    let proxy = builder.tier("alice", LIMITS).start().await;
    let client = proxy.client();
    for path in ["/v1/models", "/v1/files"] {
        let answer = client.get(proxy.url(path)).bearer_auth(secret("alice")).send().await.unwrap();
        assert_eq!(answer.status(), 400, "{path}: nothing names a model");
    }
    assert_eq!(ask(&proxy, "/v1/responses", "").await.answer().await.unwrap().status, 400);
    let body = r#"{"model":"gpt-5"}"#;
    let request = client.post(proxy.url("/v1/x")).bearer_auth(secret("alice")).body(body);
    let answer = request.header("content-type", "application/json").send().await.unwrap();
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "999", "this was the first that counts");
}

/// As long as one of the upstreams takes it, only the model can tell.
#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_its_model_leads_astray_costs_nothing() {
    let upstream = Upstream::ok().await;
    let builder = ProxyBuilder::before(&upstream)
        .upstream("match = { model = \"gpt-*\" }\npaths = [\"/v1\"]")
        .section(&format!(
            "[[upstreams]]\nname = \"other\"\nurl = \"{}\"\npaths = [\"/v1\"]\nwebsocket = false",
            upstream.url()
        ));
    let proxy = builder.tier("alice", LIMITS).start().await;
    assert_eq!(ask(&proxy, "/v1/responses", "").await.answer().await.unwrap().status, 426);
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "999");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_goes_to_no_fallback_that_is_not_to_have_it() {
    let (wire, other) = (Wire::listen().await, Upstream::ok().await);
    let fallback = format!("[[upstreams]]\nname = \"other\"\nurl = \"{}\"\nwebsocket = false", other.url());
    let builder = ProxyBuilder::before_url(&wire.url()).upstream("fallback = \"other\"").section(&fallback);
    let proxy = builder.tier("alice", LIMITS).start().await;
    wire.close();
    let mut client = ask(&proxy, "/v1/realtime", "").await;
    assert_eq!(client.answer().await.unwrap().status, 502);
    assert!(other.received().is_empty());
    assert_eq!(proxy.chat(&proxy.client(), "alice").send().await.unwrap().status(), 200);
}
