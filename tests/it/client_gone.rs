//! A client that goes away takes its request with it, and the log says so.

use crate::harness::{Gate, Plain, Proxy, ProxyBuilder, Script, Upstream, Wire, patiently, secret};

async fn start(upstream: &Upstream) -> Proxy {
    ProxyBuilder::before(upstream).tier("alice", "").start().await
}

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leave {
    Close,
    Reset,
}

fn leave(plain: Plain, how: Leave) {
    match how {
        Leave::Close => drop(plain),
        Leave::Reset => plain.reset(),
    }
}

async fn is_cancelled(proxy: &Proxy, upstream: &Upstream, path: &str, bytes: u64) {
    upstream.next_closed().await;
    let line = proxy.logs.request(path).await;
    assert_eq!((&line["ending"], &line["outcome"]), (&"client gone".into(), &"client_gone".into()), "{line}");
    assert_eq!(line["bytes"], bytes);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_the_first_byte_cancels_at_the_upstream() {
    let upstream = Upstream::start(|_| Script::new().hang()).await;
    let proxy = start(&upstream).await;
    for (how, path) in [(Leave::Close, "/v1/close"), (Leave::Reset, "/v1/reset")] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("POST {path}"), "alice", "content-length: 2\r\n").await;
        plain.send("{}").await.unwrap();
        upstream.next_request().await;
        leave(plain, how);
        is_cancelled(&proxy, &upstream, path, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_mid_stream_cancels_at_the_upstream() {
    let upstream = Upstream::start(|_| Script::sse().event("one").hang()).await;
    let proxy = start(&upstream).await;
    for (how, path) in [(Leave::Close, "/v1/close"), (Leave::Reset, "/v1/reset")] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("GET {path}"), "alice", "").await;
        assert_eq!(plain.head().await.unwrap().status, 200);
        leave(plain, how);
        is_cancelled(&proxy, &upstream, path, 11).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_reset_cancels_its_request_and_no_other() {
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = Upstream::start(move |request| match &*request.target {
        "/v1/stays" => Script::sse().event("one").wait(&held).event("two").end(),
        "/v1/midway" => Script::sse().event("one").hang(),
        _ => Script::new().hang(),
    })
    .await;
    let proxy = start(&upstream).await;
    let client = proxy.client();
    let get = |path: &str| client.get(proxy.url(path)).bearer_auth(secret("alice")).send();
    let mut stays = patiently("an answer", get("/v1/stays")).await.unwrap();
    upstream.next_request().await;

    let before_the_answer = tokio::spawn(get("/v1/before"));
    upstream.next_request().await;
    before_the_answer.abort();
    is_cancelled(&proxy, &upstream, "/v1/before", 0).await;

    let mut midway = patiently("an answer", get("/v1/midway")).await.unwrap();
    assert_eq!(midway.chunk().await.unwrap().unwrap(), "data: one\n\n");
    drop(midway);
    is_cancelled(&proxy, &upstream, "/v1/midway", 11).await;

    gate.open();
    let mut rest = Vec::new();
    while let Some(piece) = patiently("the rest", stays.chunk()).await.unwrap() {
        rest.extend_from_slice(&piece);
    }
    assert_eq!(rest, b"data: one\n\ndata: two\n\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_connection_that_drops_cancels_all_its_requests() {
    let upstream = Upstream::start(|_| Script::sse().event("one").hang()).await;
    let proxy = start(&upstream).await;
    // The client's connection lives in the runtime that it was made in, and ends with it.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let client = proxy.client();
    for path in ["/v1/a", "/v1/b"] {
        let request = client.get(proxy.url(path)).bearer_auth(secret("alice")).send();
        let answer = patiently("an answer", runtime.spawn(request)).await.unwrap().unwrap();
        assert_eq!(answer.version(), reqwest::Version::HTTP_2);
        std::mem::forget(answer);
    }
    runtime.shutdown_background();
    for path in ["/v1/a", "/v1/b"] {
        upstream.next_closed().await;
        let line = proxy.logs.request(path).await;
        assert_eq!(
            (&line["ending"], &line["outcome"]),
            (&"client gone".into(), &"client_gone".into()),
            "{line}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_mid_upload_cancels_at_the_upstream() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    for (how, path) in [(Leave::Close, "/v1/close"), (Leave::Reset, "/v1/reset")] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("POST {path}"), "alice", "content-length: 10\r\n").await;
        plain.send("12345").await.unwrap();
        let mut link = wire.accept().await;
        link.head().await;
        assert_eq!(link.bytes(5).await, b"12345");
        leave(plain, how);
        assert_eq!(link.ended().await, b"", "half a request never looks whole");
        assert_eq!(proxy.logs.request(path).await["ending"], "client gone");
    }
}
