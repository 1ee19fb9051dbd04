//! Connections to upstreams are used again, and one that went stale meanwhile costs the caller nothing.

use std::time::Duration;

use reqwest::{Client, RequestBuilder};
use tokio::task::JoinSet;

use crate::harness::{Proxy, ProxyBuilder, Script, Upstream, Wire, header, patiently, secret};

const LIMITS: &str = r#"{ requests = 50, per = "1h" }"#;

fn post(proxy: &Proxy, client: &Client, path: &str, body: impl Into<reqwest::Body>) -> RequestBuilder {
    client.post(proxy.url(path)).bearer_auth(secret("alice")).body(body)
}

/// A proxy with one worker's pool: all requests of one HTTP/2 client come by one connection, and so to one worker.
async fn start(url: &str) -> (Proxy, Client) {
    let proxy = ProxyBuilder::before_url(url).tier("alice", LIMITS).start().await;
    let client = proxy.client();
    (proxy, client)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_used_again_after_every_kind_of_complete_answer() {
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/stream" => Script::sse().event("one").end(),
        "/v1/error" => Script::json(500, "{}"),
        _ => Script::json(200, "{}"),
    })
    .await;
    let (proxy, client) = start(&upstream.url()).await;
    for path in ["/v1/plain", "/v1/stream", "/v1/error", "/v1/plain"] {
        post(&proxy, &client, path, "{}").send().await.unwrap().bytes().await.unwrap();
    }
    assert_eq!(upstream.connections(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_the_upstream_closed_while_it_was_idle_is_not_noticed() {
    let upstream = Upstream::start(|_| Script::json(200, "{}").close()).await;
    let (proxy, client) = start(&upstream.url()).await;
    for _ in 0..20 {
        let answer = post(&proxy, &client, "/v1/x", "{}").send().await.unwrap();
        assert_eq!(answer.status(), 200);
        answer.bytes().await.unwrap();
    }
    assert_eq!(upstream.received().len(), 20);
}

/// R11. Closing meets the next request at every moment: before it is sent, under way, and half read.
#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_closes_idle_connections_at_any_moment_is_not_noticed() {
    const REQUESTS: usize = 1000;
    let wire = Wire::listen().await;
    let url = wire.url();
    let closes_early = tokio::spawn(async move {
        let mut links = JoinSet::new();
        for nth in 0_u64.. {
            let mut link = wire.accept().await;
            links.spawn(async move {
                link.request().await;
                link.ok().await;
                // About as long as the next request takes to come.
                let idle = Duration::from_micros(nth * 37 % 4000);
                while tokio::time::timeout(idle, link.request()).await.is_ok() {
                    link.ok().await;
                }
            });
        }
    });
    let proxy = ProxyBuilder::before_url(&url).tier("alice", "").start().await;
    let clients = (0..3).map(|_| {
        let (client, url) = (proxy.client(), proxy.url("/v1/x"));
        tokio::spawn(async move {
            for _ in 0..REQUESTS {
                let answer = client.post(&url).bearer_auth(secret("alice")).body("{}").send().await.unwrap();
                assert_eq!(answer.status(), 200);
                answer.bytes().await.unwrap();
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        patiently("all requests", client).await.unwrap();
    }
    closes_early.abort();
    assert!(closes_early.await.is_err_and(|error| error.is_cancelled()));
}

/// One answer, which puts the connection into the pool, and then `fate` for the next request on it.
async fn on_a_reused_connection(
    body: Vec<u8>,
    fate: impl Fn() -> Script + Send + Sync + 'static,
) -> (Proxy, reqwest::Response, Upstream) {
    let upstream = Upstream::start(move |request| match (request.connection, &*request.target) {
        (0, "/v1/second") => fate(),
        _ => Script::json(200, "{}"),
    })
    .await;
    let (proxy, client) = start(&upstream.url()).await;
    post(&proxy, &client, "/v1/first", "{}").send().await.unwrap().bytes().await.unwrap();
    let answer = patiently("an answer", post(&proxy, &client, "/v1/second", body).send()).await.unwrap();
    (proxy, answer, upstream)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_on_a_stale_connection_is_sent_once_more_with_the_same_body() {
    let body: Vec<u8> = (0..200_000_u32).map(|n| (n.wrapping_mul(n) >> 6) as u8).collect();
    for fate in [Script::close, Script::reset] {
        let (proxy, answer, upstream) =
            on_a_reused_connection(body.clone(), move || fate(Script::new())).await;
        assert_eq!(answer.status(), 200);
        assert_eq!(header(&answer, "x-ratelimit-remaining"), "48", "counted once");
        answer.bytes().await.unwrap();
        let received = upstream.received();
        let seen: Vec<_> = received.iter().map(|request| (&*request.target, request.connection)).collect();
        assert_eq!(seen, [("/v1/first", 0), ("/v1/second", 0), ("/v1/second", 1)]);
        assert!(received[1].body == body && received[2].body == body);
        assert_eq!(received[1].headers, received[2].headers);
        assert_eq!(proxy.logs.request("/v1/second").await["outcome"], "answered");
        assert_eq!(proxy.logs.requests().len(), 2, "one line for each request");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_too_large_to_keep_is_not_sent_again() {
    let (proxy, answer, upstream) = on_a_reused_connection(vec![7; 300_000], || Script::new().close()).await;
    assert_eq!(answer.status(), 502);
    assert_eq!(upstream.received().len(), 2);
    assert_eq!(proxy.logs.request("/v1/second").await["outcome"], "upstream_failed");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_sent_again_after_the_first_byte_of_an_answer() {
    for begun in ["H", "HTTP/1.1 200 OK\r\ncontent-le"] {
        let (_, answer, upstream) =
            on_a_reused_connection(b"{}".to_vec(), move || Script::new().send(begun).close()).await;
        assert_eq!(answer.status(), 502, "{begun}");
        assert_eq!(upstream.received().len(), 2, "{begun}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_failure_is_the_answer() {
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/second" => Script::new().close(),
        _ => Script::json(200, "{}"),
    })
    .await;
    let (proxy, client) = start(&upstream.url()).await;
    post(&proxy, &client, "/v1/first", "{}").send().await.unwrap().bytes().await.unwrap();
    assert_eq!(post(&proxy, &client, "/v1/second", "{}").send().await.unwrap().status(), 502);
    assert_eq!(upstream.received().len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed_in_time() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).upstream("pool_idle_timeout = \"200ms\"").tier("alice", "");
    let proxy = proxy.start().await;
    post(&proxy, &proxy.client(), "/v1/x", "{}").send().await.unwrap().bytes().await.unwrap();
    assert_eq!(upstream.next_closed().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_whose_upload_was_cut_short_is_not_used_again() {
    let wire = Wire::listen().await;
    let (proxy, client) = start(&wire.url()).await;
    let body = vec![7; 8_000_000];
    let first = tokio::spawn(post(&proxy, &client, "/v1/first", body).send());
    let mut busy = wire.accept().await;
    busy.head().await;
    busy.ok().await;
    assert_eq!(patiently("an answer", first).await.unwrap().unwrap().status(), 200);
    let second = tokio::spawn(post(&proxy, &client, "/v1/second", "{}").send());
    let mut fresh = wire.accept().await;
    assert_eq!(fresh.request().await.target, "/v1/second");
    fresh.ok().await;
    assert_eq!(patiently("an answer", second).await.unwrap().unwrap().status(), 200);
}
