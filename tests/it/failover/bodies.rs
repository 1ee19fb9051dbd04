//! What is sent again has the same body, and what can't be kept is sent once.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use super::{before, nobody, of, post};
use crate::harness::{Plain, Received, Script, Upstream, Wire, header, patiently, secret};

/// An upstream whose every request fails but for the last of so many.
fn failing(times: usize) -> impl Fn(&Received) -> Script + Send + Sync + Clone + 'static {
    let count = Arc::new(AtomicUsize::new(0));
    move |_| {
        let failed = count.fetch_add(1, Relaxed) < times;
        Script::json(if failed { 503 } else { 200 }, "{}")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_sent_again_byte_for_byte() {
    let body: Vec<u8> = (0..900_000_u32).map(|n| (n.wrapping_mul(n) >> 6) as u8).collect();
    let behaviour = failing(1);
    let (one, two) = (Upstream::start(behaviour.clone()).await, Upstream::start(behaviour).await);
    let proxy = before(&of(&[&one, &two]), "").start().await;
    assert_eq!(post(&proxy, &proxy.client(), "/v1/length", body.clone()).await.status(), 200);
    let both = [one.received(), two.received()].concat();
    assert_eq!(both.len(), 2);
    assert!(both.iter().all(|request| request.body == body));
    assert_eq!(both[0].header("content-length"), both[1].header("content-length"));

    let behaviour = failing(1);
    let (one, two) = (Upstream::start(behaviour.clone()).await, Upstream::start(behaviour).await);
    let proxy = before(&of(&[&one, &two]), "").start().await;
    let mut client = Plain::connect(&proxy).await;
    client.request("POST /v1/chunked", "alice", "transfer-encoding: chunked\r\n").await;
    for piece in body.chunks(70_000) {
        let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
        client.send(chunk).await.unwrap();
    }
    client.send("0\r\n\r\n").await.unwrap();
    assert_eq!(client.answer().await.unwrap().status, 200);
    let both = [one.received(), two.received()].concat();
    assert_eq!(both.len(), 2);
    assert!(both.iter().all(|request| request.body == body));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_too_large_to_keep_is_sent_once_but_waits_for_a_connection() {
    let body = vec![7; 300_000];
    let behaviour = failing(1);
    let (one, two) = (Upstream::start(behaviour.clone()).await, Upstream::start(behaviour).await);
    let proxy = before(&of(&[&one, &two]), "retry = { max_body = \"64KiB\" }").start().await;
    assert_eq!(post(&proxy, &proxy.client(), "/v1/x", body.clone()).await.status(), 503);
    assert_eq!(proxy.logs.request("/v1/x").await["attempts"], 1);

    let good = Upstream::ok().await;
    let proxy = before(
        &[nobody().await, nobody().await, nobody().await, good.url()],
        "retry = { attempts = 4, max_body = \"64KiB\" }",
    );
    let proxy = proxy.start().await;
    assert_eq!(post(&proxy, &proxy.client(), "/v1/x", body.clone()).await.status(), 200);
    assert!(good.received()[0].body == body);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_early_failure_takes_nothing_from_a_body_that_is_still_coming() {
    let (one, two) = (Wire::listen().await, Wire::listen().await);
    let proxy = before(&[one.url(), two.url()], "").start().await;
    let mut client = Plain::connect(&proxy).await;
    client.request("POST /v1/x", "alice", "content-length: 10\r\n").await;
    client.send("01234").await.unwrap();
    let (mut first, other) = tokio::select! {
        link = one.accept() => (link, &two),
        link = two.accept() => (link, &one),
    };
    first.head().await;
    assert_eq!(first.bytes(5).await, b"01234");
    first.send("HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n").await;
    let mut second = other.accept().await;
    second.head().await;
    assert_eq!(second.bytes(5).await, b"01234");
    client.send("56789").await.unwrap();
    assert_eq!(second.bytes(5).await, b"56789");
    second.ok().await;
    assert_eq!(client.answer().await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_waits_for_100_is_told_once_and_head_has_no_body() {
    let behaviour = failing(1);
    let (one, two) = (Upstream::start(behaviour.clone()).await, Upstream::start(behaviour).await);
    let proxy = before(&of(&[&one, &two]), "").start().await;
    let mut client = Plain::connect(&proxy).await;
    client.request("POST /v1/x", "alice", "expect: 100-continue\r\ncontent-length: 5\r\n").await;
    assert_eq!(client.head().await.unwrap().status, 100);
    client.send("hello").await.unwrap();
    assert_eq!(client.answer().await.unwrap().status, 200);
    let both = [one.received(), two.received()].concat();
    assert_eq!(both.iter().map(|request| &request.body[..]).collect::<Vec<_>>(), [b"hello", b"hello"]);

    let answer =
        |status: u16| Script::new().send(format!("HTTP/1.1 {status} X\r\ncontent-length: 7\r\n\r\n"));
    let count = Arc::new(AtomicUsize::new(0));
    let behaviour = move |_: &_| answer(if count.fetch_add(1, Relaxed) == 0 { 500 } else { 200 });
    let (one, two) = (Upstream::start(behaviour.clone()).await, Upstream::start(behaviour).await);
    let proxy = before(&of(&[&one, &two]), "").start().await;
    let request = proxy.client().head(proxy.url("/v1/x")).bearer_auth(secret("alice")).send();
    let answer = patiently("an answer", request).await.unwrap();
    assert_eq!((answer.status().as_u16(), header(&answer, "content-length")), (200, "7"));
    assert_eq!(one.received().len() + two.received().len(), 2);
}
