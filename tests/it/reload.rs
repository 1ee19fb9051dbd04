//! SIGHUP swaps what can be swapped, all of it or nothing.

use rustix::process::Signal;
use serde_json::Value;

use crate::harness::{Gate, Proxy, ProxyBuilder, Script, Upstream};

const LIMITS: &str = r#"{ requests = 100, per = "1m" }"#;

/// Sends SIGHUP and waits for the line that begins so.
pub(crate) async fn reload(proxy: &Proxy, expected: &str) -> Value {
    let before = proxy.logs.all().len();
    proxy.signal(Signal::HUP).await;
    let says =
        |line: &Value| line["fields"]["message"].as_str().is_some_and(|said| said.starts_with(expected));
    let logs = proxy.logs.clone();
    let fresh = move |line: &Value| logs.all()[before..].contains(line);
    proxy.logs.wait_for(expected, |line| says(line) && fresh(line)).await
}

async fn status(proxy: &Proxy, id: &str) -> u16 {
    proxy.chat(&proxy.client(), id).send().await.unwrap().status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_tiers_and_upstreams_change_without_a_restart() {
    let (first, second) = (Upstream::ok().await, Upstream::ok().await);
    let proxy = ProxyBuilder::before(&first).tier("alice", LIMITS).start().await;
    assert_eq!((status(&proxy, "alice").await, status(&proxy, "bob").await), (200, 401));
    proxy.write_config(&ProxyBuilder::before(&second).tier("bob", LIMITS));
    reload(&proxy, "reloaded").await;
    assert_eq!((status(&proxy, "alice").await, status(&proxy, "bob").await), (401, 200));
    assert_eq!((first.received().len(), second.received().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lowered_limit_holds_at_once_and_what_was_counted_stays_counted() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for _ in 0..3 {
        assert_eq!(status(&proxy, "alice").await, 200);
    }
    proxy.write_config(&ProxyBuilder::before(&upstream).tier("alice", r#"{ requests = 3, per = "1m" }"#));
    reload(&proxy, "reloaded").await;
    assert_eq!(status(&proxy, "alice").await, 429);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_file_changes_nothing_and_is_reported() {
    let upstream = Upstream::ok().await;
    let builder = ProxyBuilder::before(&upstream).tier("alice", LIMITS);
    let proxy = builder.clone().start().await;
    proxy.write_config(&builder.section("[tires.typo]"));
    let line = reload(&proxy, "not reloaded").await;
    assert!(line["fields"]["error"].as_str().unwrap().contains("tires"), "{line}");
    assert_eq!(status(&proxy, "alice").await, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_under_the_policy_it_began_with() {
    let gate = Gate::default();
    let script = Script::sse().event("one").wait(&gate).event("two").end();
    let upstream = Upstream::start(move |_| script.clone()).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let mut answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(answer.chunk().await.unwrap().unwrap(), "data: one\n\n");
    proxy.write_config(&ProxyBuilder::before(&upstream).tier("bob", LIMITS));
    reload(&proxy, "reloaded").await;
    gate.open();
    assert_eq!(answer.text().await.unwrap(), "data: two\n\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_served_to_new_connections_and_streams_go_on() {
    let gate = Gate::default();
    let script = Script::sse().event("one").wait(&gate).event("two").end();
    let upstream = Upstream::start(move |_| script.clone()).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let old_client = proxy.client();
    let mut stream = proxy.chat(&old_client, "alice").send().await.unwrap();
    assert_eq!(stream.chunk().await.unwrap().unwrap(), "data: one\n\n");
    let fresh_old_client = proxy.client();
    let donor = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for file in ["server.crt", "server.key"] {
        std::fs::copy(donor.certificates.join(file), proxy.certificates.join(file)).unwrap();
    }
    reload(&proxy, "reloaded").await;
    assert_eq!(status(&proxy, "alice").await, 200, "a client that trusts the new certificate");
    let refused = proxy.chat(&fresh_old_client, "alice").send().await;
    assert!(refused.is_err(), "the old one is not served any more");

    // Half of a renewal is no reason to serve nothing.
    std::fs::write(proxy.certificates.join("server.key"), "").unwrap();
    reload(&proxy, "not reloaded").await;
    assert_eq!(status(&proxy, "alice").await, 200);
    gate.open();
    assert_eq!(stream.text().await.unwrap(), "data: two\n\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_a_restart_is_named() {
    let upstream = Upstream::ok().await;
    let builder = ProxyBuilder::before(&upstream).tier("alice", LIMITS);
    let proxy = builder.clone().start().await;
    proxy.write_config(&builder.server("max_streams = 7"));
    let line = reload(&proxy, "reloaded, but").await;
    assert_eq!(line["fields"]["sections"], "[server]");
}
