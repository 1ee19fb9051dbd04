//! Without Redis each process counts its share, and how many there are it has learnt while Redis was there.

use redis::Commands;

use super::says;
use crate::harness::{Proxy, ProxyBuilder, Redis, Upstream, patiently};

const MARKS: &str = "ratelimit:{~replicas}:1";

async fn replica(upstream: &Upstream, redis: &Redis, lines: &str) -> Proxy {
    let local = format!("on_store_failure = \"local\"\n{lines}");
    let builder = ProxyBuilder::before(upstream).server("workers = 1").redis(&redis.url(), &local);
    builder.tier("alice", r#"{ requests = 4, per = "1h" }"#).start().await
}

async fn knows(proxy: &Proxy, replicas: u32) {
    let learnt = |line: &serde_json::Value| {
        says(line, "the number of processes") && line["fields"]["replicas"] == replicas
    };
    proxy.logs.wait_for("the number of replicas", learnt).await;
    assert_eq!(proxy.metric("tollgate_limiter_replicas").await, f64::from(replicas));
}

async fn statuses(proxy: &Proxy, requests: usize) -> Vec<u16> {
    let client = proxy.client();
    let mut seen = Vec::new();
    for _ in 0..requests {
        let answer = patiently("an answer", proxy.chat(&client, "alice").send()).await.unwrap();
        seen.push(answer.status().as_u16());
    }
    seen
}

#[tokio::test(flavor = "multi_thread")]
async fn each_counts_its_share_of_what_it_has_learnt() {
    let (upstream, mut redis) = (Upstream::ok().await, Redis::start().await);
    let mut replicas = Vec::new();
    for _ in 0..3 {
        replicas.push(replica(&upstream, &redis, "").await);
    }
    for proxy in &replicas {
        knows(proxy, 3).await;
    }
    redis.kill().await;
    for proxy in &replicas {
        assert_eq!(statuses(proxy, 4).await, [200, 200, 429, 429], "a third of four, rounded up");
        assert_eq!(proxy.metric("tollgate_limiter_replicas").await, 3.0, "the last that was known");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_file_says_holds_and_nothing_is_asked() {
    let (upstream, mut redis) = (Upstream::ok().await, Redis::start().await);
    let stated = replica(&upstream, &redis, "replicas = 2").await;
    let learning = replica(&upstream, &redis, "").await;
    // By the time that one has learnt, the other would have left its mark.
    let marks = async { while redis.connection().zcard::<_, u32>(MARKS).unwrap() == 0 {} };
    patiently("a heartbeat", marks).await;
    assert_eq!(stated.metric("tollgate_limiter_replicas").await, 2.0);
    assert_eq!(learning.metric("tollgate_limiter_replicas").await, 1.0);
    assert_eq!(redis.connection().zcard::<_, u32>(MARKS).unwrap(), 1);
    let expires_in: i64 = redis.connection().pttl(MARKS).unwrap();
    assert!((1..=10_000).contains(&expires_in), "{expires_in} ms");
    redis.kill().await;
    assert_eq!(statuses(&stated, 3).await, [200, 200, 429]);
    assert_eq!(statuses(&learning, 5).await, [200, 200, 200, 200, 429]);
}

/// The heartbeat is its own affair: a decision is one call, as it is without.
#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_adds_nothing_to_a_decision() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let proxy = replica(&upstream, &redis, "").await;
    proxy.has_looked_at_redis().await;
    let before = redis.calls("evalsha");
    assert_eq!(statuses(&proxy, 4).await, [200; 4]);
    assert_eq!(redis.calls("evalsha") - before, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn marks_that_are_old_or_from_the_future_do_not_count() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let mut operator = redis.connection();
    let (seconds, _): (u64, u64) = redis::cmd("TIME").query(&mut operator).unwrap();
    for (name, at) in [("gone", seconds - 11), ("never", seconds + 3600)] {
        let _: () = operator.zadd(MARKS, name, at * 1_000_000).unwrap();
    }
    let proxy = replica(&upstream, &redis, "").await;
    let dropped = async {
        while operator.zscore::<_, _, Option<f64>>(MARKS, "gone").unwrap().is_some() {
            tokio::task::yield_now().await;
        }
    };
    patiently("a heartbeat", dropped).await;
    assert_eq!(operator.zcard::<_, u32>(MARKS).unwrap(), 1);
    assert_eq!(proxy.metric("tollgate_limiter_replicas").await, 1.0);
}

/// Decisions go on, so nothing else would tell of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_that_is_forbidden_is_told_of_once() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let mut operator = redis.connection();
    let rights = ["SETUSER", "default", "resetkeys", "~ratelimit:{alice}:*"];
    let _: () = redis::cmd("ACL").arg(&rights).query(&mut operator).unwrap();
    let proxy = replica(&upstream, &redis, "").await;
    let complaint =
        |line: &serde_json::Value| says(line, "the processes that share the limits can't be counted");
    let told = proxy.logs.wait_for("the complaint", complaint).await;
    assert!(told["fields"]["fault"].as_str().unwrap().starts_with("not_permitted"), "{told}");
    let later = |line: &serde_json::Value| says(line, "the heartbeat did not reach Redis");
    proxy.logs.wait_for("the next beat", later).await;
    assert_eq!(proxy.logs.all().iter().filter(|line| complaint(line)).count(), 1);
    assert_eq!(statuses(&proxy, 5).await, [200, 200, 200, 200, 429]);
    assert_eq!(redis.calls("evalsha"), 5, "Redis decided");
}
