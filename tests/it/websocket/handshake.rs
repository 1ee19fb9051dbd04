//! The handshake: who may have one, what an upstream may say to it, and what is passed on of it.

use reqwest::StatusCode;

use super::{ACCEPT, HANDSHAKE, LIMITS, TARGET, ask, key};
use crate::harness::{Plain, ProxyBuilder, Script, Upstream, Wire, secret};

#[tokio::test(flavor = "multi_thread")]
async fn nothing_behind_a_handshake_goes_anywhere_before_the_upstream_agrees() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", LIMITS).start().await;
    for agrees in [true, false] {
        let mut client = Plain::connect(&proxy).await;
        let smuggled =
            format!("GET /v1/smuggled HTTP/1.1\r\nhost: a\r\nx-api-key: {}-no\r\n\r\n", secret("alice"));
        client
            .send(format!("GET {TARGET} HTTP/1.1\r\n{HANDSHAKE}{}\r\n{smuggled}", key("alice")))
            .await
            .unwrap();
        let mut server = wire.accept().await;
        server.head().await;
        if agrees {
            server.send("HTTP/1.1 101 Yes\r\nupgrade: WebSocket\r\nconnection: upgrade\r\n\r\n").await;
            assert_eq!(client.head().await.unwrap().status, 101);
            assert_eq!(server.bytes(smuggled.len()).await, smuggled.as_bytes());
        } else {
            server.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").await;
            assert_eq!(client.answer().await.unwrap().status, 200);
            // It was no frame but a request, and one without a valid key.
            assert_eq!(client.answer().await.unwrap().status, 401);
            drop(client);
            assert_eq!(server.ended().await, b"");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_upstream_says_instead_passes_as_it_is() {
    let upstream = Upstream::start(|request| {
        Script::json(request.target.rsplit('/').next().unwrap().parse().unwrap(), r#"{"theirs":1}"#)
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for status in [200, 400, 401, 403, 404, 426, 429, 503] {
        let mut client = Plain::connect(&proxy).await;
        let head = format!("GET /v1/{status} HTTP/1.1\r\n{HANDSHAKE}{}\r\n", key("alice"));
        client.send(head).await.unwrap();
        let answer = client.answer().await.unwrap();
        assert_eq!((answer.status, &*answer.body), (status, &br#"{"theirs":1}"#[..]));
        assert_eq!((answer.header("upgrade"), answer.header("x-ratelimit-limit")), (None, Some("100")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_switch_that_nobody_asked_for_is_no_answer() {
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/plain" => Script::switch(ACCEPT).echo(),
        _ => Script::new().send("HTTP/1.1 101 Hm\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n").echo(),
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let plain = proxy.client().get(proxy.url("/v1/plain")).bearer_auth(secret("alice")).send().await.unwrap();
    assert_eq!(plain.status(), StatusCode::BAD_GATEWAY);
    let (_, answer) = ask(&proxy, "/v1/realtime", &key("alice")).await;
    assert_eq!(answer.status, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn switched_off_it_is_refused_at_once_so_that_clients_fall_back() {
    let upstream = Upstream::ok().await;
    let proxy =
        ProxyBuilder::before(&upstream).upstream("websocket = false").tier("alice", LIMITS).start().await;
    for (path, field) in
        [("/v1/responses", "code"), ("/v1/messages", "type"), ("/v1beta/models/m:live", "status")]
    {
        let mut client = Plain::connect(&proxy).await;
        client.send(format!("GET {path} HTTP/1.1\r\n{HANDSHAKE}{}\r\n", key("alice"))).await.unwrap();
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.status, 426);
        assert_eq!((answer.header("connection"), answer.header("upgrade")), (Some("close"), None));
        assert!(answer.json()["error"][field].is_string(), "{path}: {:?}", answer.json());
        assert_eq!(client.rest().await.unwrap(), b"", "an orderly end");
    }
    assert!(upstream.received().is_empty());
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(answer.headers()["x-ratelimit-remaining"], "99", "a fall back costs nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_in_any_slot_opens_and_goes_no_further() {
    let upstream = Upstream::start(|request| {
        let chosen = request.headers.iter().any(|(name, _)| name == "sec-websocket-protocol");
        Script::switch(if chosen { "sec-websocket-protocol: realtime\r\n" } else { "" }).echo()
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream)
        .upstream("credential = { header = \"authorization\", value = \"Bearer theirs\" }")
        .tier("alice", LIMITS)
        .start()
        .await;
    let ours = secret("alice");
    let subprotocols = format!(
        "sec-websocket-protocol: realtime, openai-insecure-api-key.{ours}, openai-organization.o\r\n"
    );
    for (target, headers, sent) in [
        ("/v1/realtime", key("alice"), "/v1/realtime"),
        ("/v1/realtime", format!("x-api-key: {ours}\r\n"), "/v1/realtime"),
        ("/v1/realtime", format!("api-key: {ours}\r\n"), "/v1/realtime"),
        ("/v1/realtime", format!("x-goog-api-key: {ours}\r\n"), "/v1/realtime"),
        ("/v1/realtime", subprotocols, "/v1/realtime"),
        (&format!("/ws/google?key={ours}&a=b"), String::new(), "/ws/google?a=b"),
        (
            &format!("/openai/realtime?api-version=1&api-key={ours}"),
            String::new(),
            "/openai/realtime?api-version=1",
        ),
        (&format!("/openai/realtime?Authorization=Bearer%20{ours}"), String::new(), "/openai/realtime"),
    ] {
        let (_client, answer) = ask(&proxy, target, &headers).await;
        assert_eq!(answer.status, 101, "{target} {headers}");
        let request = upstream.next_request().await;
        assert_eq!((&*request.target, request.header("authorization")), (sent, Some("Bearer theirs")));
        let shown = format!("{request:?} {answer:?}");
        assert!(!shown.contains("sk-tg") && !shown.contains("insecure"), "{shown}");
        if headers.contains("openai-organization") {
            let offered = request.header("sec-websocket-protocol");
            assert_eq!(offered, Some("realtime, openai-organization.o"));
            assert_eq!(answer.header("sec-websocket-protocol"), Some("realtime"));
        }
    }
    let logs = format!("{:?}", proxy.logs.all());
    assert!(!logs.contains("sk-tg"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_in_the_query_opens_plain_requests_too() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let target = format!("/openai/deployments/d/chat/completions?api-version=1&api-key={}", secret("alice"));
    let answer = proxy.client().post(proxy.url(&target)).body("{}").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(upstream.next_request().await.target, "/openai/deployments/d/chat/completions?api-version=1");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_is_judged_and_counted_like_any_request() {
    let upstream = Upstream::start(|_| Script::switch(ACCEPT).echo()).await;
    let proxy = ProxyBuilder::before(&upstream)
        .upstream("paths = [\"/v1\"]")
        .tier("alice", r#"{ requests = 2, per = "1h" }"#)
        .start()
        .await;
    assert_eq!(ask(&proxy, TARGET, "").await.1.status, 401);
    assert_eq!(ask(&proxy, "/elsewhere", &key("alice")).await.1.status, 404);
    for remaining in ["1", "0"] {
        let (mut client, answer) = ask(&proxy, TARGET, &key("alice")).await;
        assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (101, Some(remaining)));
        // Nothing inside counts.
        for _ in 0..3 {
            client.send("\x01").await.unwrap();
            client.bytes(1).await.unwrap();
        }
    }
    let (_, answer) = ask(&proxy, TARGET, &key("alice")).await;
    assert_eq!((answer.status, answer.header("x-ratelimit-source")), (429, Some("tollgate")));
    assert!(answer.header("retry-after").is_some());
    assert_eq!(upstream.received().len(), 2);
}
