//! The nouns of the tests: an upstream that does as it is told, the proxy before it, Redis, and clients.

pub(crate) mod attack;
mod certificates;
mod cluster;
mod command;
mod front;
mod http2_upstream;
pub(crate) mod oracle;
mod plain;
mod proxy;
pub(crate) mod raw;
mod redis;
mod sentinel;
mod upstream;
mod weak_link;
mod wire;

use std::time::Duration;

pub(crate) use self::{
    certificates::Certificates,
    cluster::Cluster,
    command::{Said, pasted, tollgate, tollgate_reading},
    front::{Greeting, TlsFront, TunnelProxy},
    http2_upstream::{Answering, Arrival, Http2Upstream},
    plain::{Answer, Plain},
    proxy::{Proxy, ProxyBuilder, key, secret},
    redis::{Redis, free_port},
    sentinel::Sentinel,
    upstream::{Gate, Received, Script, Upstream},
    weak_link::{Mishap, WeakLink},
    wire::{Link, Wire},
};

/// Nothing in a test takes longer on a busy machine. It bounds a hang and decides nothing else.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A tunnel passes bytes both ways.
pub(crate) async fn converse(client: &mut Plain, server: &mut Link) {
    client.send("ping").await.unwrap();
    assert_eq!(server.bytes(4).await, b"ping");
    server.send("pong").await;
    assert_eq!(client.bytes(4).await.unwrap(), b"pong");
}

/// The upstream closes a tunnel, then its client does, and a proxy that drains has waited for that alone.
pub(crate) async fn close_and_drain(proxy: Proxy, mut client: Plain, server: Link) {
    drop(server);
    assert_eq!(client.rest().await.unwrap(), b"");
    drop(client);
    assert_eq!(proxy.ended().await.code(), Some(0));
}

/// What still comes of an answer.
pub(crate) async fn rest_of(answer: &mut reqwest::Response) -> reqwest::Result<String> {
    let mut rest = String::new();
    while let Some(chunk) = patiently("the rest of an answer", answer.chunk()).await? {
        rest.push_str(str::from_utf8(&chunk).unwrap());
    }
    Ok(rest)
}

/// Waits for an event, and fails the test instead of hanging it.
pub(crate) async fn patiently<T>(what: &str, event: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, event).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not happen within {PATIENCE:?}"),
    }
}

/// One client for each protocol that the proxy speaks.
pub(crate) fn clients(proxy: &Proxy) -> [(&'static str, reqwest::Client); 2] {
    [("HTTP/1.1", proxy.client_builder().http1_only().build().unwrap()), ("HTTP/2", proxy.client())]
}

/// The only value of a header.
pub(crate) fn header<'a>(answer: &'a reqwest::Response, name: &str) -> &'a str {
    let values: Vec<_> = answer.headers().get_all(name).iter().collect();
    assert_eq!(values.len(), 1, "{name} stands once");
    values[0].to_str().unwrap()
}
