//! The limit holds, a refusal is honest, and the headers say so.

use std::{sync::Arc, time::Duration};

use reqwest::{Response, StatusCode};

use crate::harness::{Proxy, ProxyBuilder, Redis, Upstream, secret};

fn number(answer: &Response, name: &str) -> u64 {
    let values: Vec<_> = answer.headers().get_all(name).iter().collect();
    assert_eq!(values.len(), 1, "{name} stands once");
    values[0].to_str().unwrap().parse().unwrap()
}

/// Sends `requests` at once over `connections`, spread over the proxies, and returns the answers.
async fn burst(
    proxies: &[Arc<Proxy>],
    id: &'static str,
    requests: usize,
    connections: usize,
) -> Vec<Response> {
    let senders = (0..connections).map(|n| {
        let proxy = proxies[n % proxies.len()].clone();
        tokio::spawn(async move {
            let client = proxy.client_builder().http1_only().build().unwrap();
            let mut answers = Vec::new();
            for _ in (n..requests).step_by(connections) {
                answers.push(proxy.chat(&client, id).send().await.unwrap());
            }
            answers
        })
    });
    let mut answers = Vec::new();
    for sender in senders.collect::<Vec<_>>() {
        answers.extend(sender.await.unwrap());
    }
    answers
}

async fn a_hundred_pass_and_the_hundred_and_first_waits(proxy: ProxyBuilder) {
    let proxy = proxy.tier("alice", r#"{ requests = 100, per = "4s" }"#).start().await;
    let client = proxy.client();
    for n in 1..=100 {
        let answer = proxy.chat(&client, "alice").send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "request {n}");
        assert_eq!(number(&answer, "x-ratelimit-limit"), 100);
        assert_eq!(number(&answer, "x-ratelimit-remaining"), 100 - n);
    }
    let refused = proxy.chat(&client, "alice").send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    let wait = number(&refused, "retry-after-ms");
    assert_eq!(number(&refused, "retry-after"), wait.div_ceil(1000));
    assert_eq!(number(&refused, "x-ratelimit-reset"), wait.div_ceil(1000));
    assert_eq!(number(&refused, "x-ratelimit-remaining"), 0);
    assert_eq!(refused.headers()["x-ratelimit-source"], "tollgate");
    let later = proxy.chat(&client, "alice").send().await.unwrap();
    if later.status() == StatusCode::TOO_MANY_REQUESTS {
        assert!(number(&later, "retry-after-ms") < wait, "Retry-After counts down");
    }
    // The promise itself is under test here, so this waits exactly as long as it was told to.
    tokio::time::sleep(Duration::from_millis(wait)).await;
    let admitted = proxy.chat(&client, "alice").send().await.unwrap();
    assert_eq!(admitted.status(), StatusCode::OK);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorials_acceptance_holds_in_memory() {
    let upstream = Upstream::ok().await;
    a_hundred_pass_and_the_hundred_and_first_waits(ProxyBuilder::before(&upstream)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tutorials_acceptance_holds_in_redis() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let proxy = ProxyBuilder::before(&upstream).redis(&redis.url(), "");
    a_hundred_pass_and_the_hundred_and_first_waits(proxy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_proxies_and_one_redis_admit_exactly_the_limit() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let proxy = || {
        let proxy = ProxyBuilder::before(&upstream).redis(&redis.url(), "");
        proxy.tier("alice", r#"{ requests = 100, per = "1h" }"#)
    };
    let proxies = [Arc::new(proxy().start().await), Arc::new(proxy().start().await)];
    let answers = burst(&proxies, "alice", 1000, 64).await;
    assert_eq!(answers.len(), 1000);
    let admitted: Vec<_> = answers.iter().filter(|answer| answer.status() == StatusCode::OK).collect();
    let refused = answers.iter().filter(|answer| answer.status() == StatusCode::TOO_MANY_REQUESTS).count();
    assert_eq!((admitted.len(), refused), (100, 900));
    let mut remaining: Vec<_> =
        admitted.iter().map(|answer| number(answer, "x-ratelimit-remaining")).collect();
    remaining.sort_unstable();
    assert_eq!(remaining, (0..100).collect::<Vec<_>>(), "each answer tells of its own decision");
    assert_eq!(upstream.received().len(), 100, "a refusal costs the upstream nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_is_tried_out_without_refusing_anybody() {
    let upstream = Upstream::ok().await;
    let limits = r#"{ requests = 10, per = "1h" }, { requests = 4, per = "1h", enforce = false }"#;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", limits).start().await;
    let client = proxy.client();
    for _ in 0..6 {
        let answer = proxy.chat(&client, "alice").send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        assert_eq!(answer.headers()["ratelimit-policy"], r#""1h";q=10;w=3600, "1h-shadow";q=4;w=3600"#);
    }
    let over = r#"tollgate_over_unenforced_limit_total{tier="alice",limit="1h-shadow"}"#;
    assert_eq!(proxy.metric(over).await, 2.0);
    let near = r#"tollgate_near_limit_total{tier="alice",limit="1h-shadow"}"#;
    assert_eq!(proxy.metric(near).await, 3.0, "from the fourth request on");
}

/// Two readers of one credential that differ would count a caller twice, or not at all.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_has_one_window_however_it_is_written() {
    let upstream = Upstream::ok().await;
    let proxy =
        ProxyBuilder::before(&upstream).tier("alice", r#"{ requests = 8, per = "1h" }"#).start().await;
    let (client, key) = (proxy.client(), secret("alice"));
    let asked = async |slot: &str, value: &str| {
        client.get(proxy.url("/v1/models")).header(slot, value).send().await.unwrap()
    };
    let spellings = [
        ("authorization", format!("Bearer {key}")),
        ("authorization", format!("bearer {key}")),
        ("authorization", format!("BEARER {key}")),
        ("authorization", format!("Bearer   {key}")),
        ("authorization", format!("Bearer {key} ")),
        ("x-api-key", key.clone()),
        ("api-key", key.clone()),
        ("x-goog-api-key", key.clone()),
    ];
    for (nth, (slot, value)) in spellings.iter().enumerate() {
        let answer = asked(slot, value).await;
        assert_eq!(answer.status(), StatusCode::OK, "{slot}: {value}");
        assert_eq!(number(&answer, "x-ratelimit-remaining"), 7 - nth as u64, "{slot}: {value}");
    }
    for (slot, value) in &spellings {
        assert_eq!(asked(slot, value).await.status(), StatusCode::TOO_MANY_REQUESTS, "{slot}: {value}");
    }
    let basic = format!("Basic {key}");
    for value in ["Basic a0E=", &basic, "Bearer ", "Bearer", "", "Bearer  Bearer", "Bearer, x"] {
        let answer = asked("authorization", value).await;
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED, "{value}");
        assert_eq!(answer.headers()["www-authenticate"], "Bearer", "{value}");
    }
    assert_eq!(upstream.received().len(), 8);
}
