//! What happens to requests while Redis does not decide, and that the limit holds again afterwards.

use reqwest::{Client, StatusCode};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{Proxy, ProxyBuilder, Redis, Upstream, patiently};

async fn status(proxy: &Proxy, client: &Client) -> StatusCode {
    proxy.chat(client, "alice").send().await.unwrap().status()
}

async fn statuses(proxy: &Proxy, client: &Client, requests: usize) -> Vec<u16> {
    let mut seen = Vec::new();
    for _ in 0..requests {
        seen.push(status(proxy, client).await.as_u16());
    }
    seen
}

/// One worker, so that what one connection to Redis does can be told apart.
async fn proxy(upstream: &Upstream, redis_url: &str, policy: &str) -> Proxy {
    let builder = ProxyBuilder::before(upstream).server("workers = 1");
    let policy = format!("on_store_failure = \"{policy}\"");
    builder.redis(redis_url, &policy).tier("alice", r#"{ requests = 3, per = "1h" }"#).start().await
}

/// Nobody listens there.
const NOWHERE: &str = "redis://127.0.0.1:1";

#[tokio::test(flavor = "multi_thread")]
async fn allow_lets_everything_pass_uncounted() {
    let upstream = Upstream::ok().await;
    let proxy = proxy(&upstream, NOWHERE, "allow").await;
    let client = proxy.client();
    let answer = proxy.chat(&client, "alice").send().await.unwrap();
    assert!(
        !answer.headers().contains_key("x-ratelimit-limit"),
        "nothing was counted, so nothing is claimed"
    );
    assert_eq!(statuses(&proxy, &client, 9).await, [200; 9]);
}

#[tokio::test(flavor = "multi_thread")]
async fn deny_answers_503_and_never_429() {
    let upstream = Upstream::ok().await;
    let proxy = proxy(&upstream, NOWHERE, "deny").await;
    let client = proxy.client();
    let answer = proxy.chat(&client, "alice").send().await.unwrap();
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(answer.headers()["retry-after"], "1");
    let body: serde_json::Value = answer.json().await.unwrap();
    assert_eq!(body["error"]["type"], "server_error");
    assert_eq!(statuses(&proxy, &client, 9).await, [503; 9]);
    assert!(upstream.received().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn local_counts_here() {
    let upstream = Upstream::ok().await;
    let proxy = proxy(&upstream, NOWHERE, "local").await;
    let client = proxy.client();
    assert_eq!(statuses(&proxy, &client, 5).await, [200, 200, 200, 429, 429]);
}

#[tokio::test(flavor = "multi_thread")]
async fn local_counts_only_this_replicas_share() {
    let upstream = Upstream::ok().await;
    let builder =
        ProxyBuilder::before(&upstream).redis(NOWHERE, "on_store_failure = \"local\"\nreplicas = 3");
    let proxy = builder.tier("alice", r#"{ requests = 4, per = "1h" }"#).start().await;
    let client = proxy.client();
    assert_eq!(statuses(&proxy, &client, 3).await, [200, 200, 429]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_told_once_and_counts_are_exact_again_after_it() {
    let (upstream, mut redis) = (Upstream::ok().await, Redis::start().await);
    let proxy = proxy(&upstream, &redis.url(), "deny").await;
    let client = proxy.client();
    assert_eq!(status(&proxy, &client).await, StatusCode::OK);
    redis.kill().await;
    assert_eq!(statuses(&proxy, &client, 20).await, [503; 20]);
    assert_eq!(proxy.metric("tollgate_limiter_store_up").await, 0.0);
    redis.start_again().await;
    let again = |line: &serde_json::Value| line["fields"]["message"] == "Redis decides again";
    proxy.logs.wait_for("the recovery", again).await;
    assert_eq!(statuses(&proxy, &client, 5).await, [200, 200, 200, 429, 429], "Redis came back empty");
    assert_eq!(proxy.metric("tollgate_limiter_store_up").await, 1.0);
    let told = |text: &str| {
        let says = |line: &&serde_json::Value| {
            line["fields"]["message"].as_str().is_some_and(|said| said.starts_with(text))
        };
        proxy.logs.all().iter().filter(says).count()
    };
    assert_eq!((told("Redis does not decide;"), told("Redis decides again")), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redis_that_hangs_is_given_up_and_taken_back() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let builder = ProxyBuilder::before(&upstream).server("workers = 1").section(&format!(
        "[limiter]\nstore = \"redis\"\non_store_failure = \"deny\"\n[limiter.redis]\nurl = \"{}\"\ntimeout = \"500ms\"",
        redis.url()
    ));
    let proxy = builder.tier("alice", r#"{ requests = 3, per = "1h" }"#).start().await;
    let client = proxy.client();
    patiently("the first decision", async {
        // On a busy machine even a healthy Redis can miss the deadline.
        while status(&proxy, &client).await != StatusCode::OK {}
    })
    .await;
    let pid = Pid::from_raw(redis.pid() as i32).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    assert_eq!(statuses(&proxy, &client, 8).await, [503; 8]);
    kill_process(pid, Signal::CONT).unwrap();
    let recovered = async {
        loop {
            match status(&proxy, &client).await {
                StatusCode::SERVICE_UNAVAILABLE => tokio::task::yield_now().await,
                other => return other,
            }
        }
    };
    patiently("the recovery", recovered).await;
    let of_alice = |(key, _): &&(String, _)| key.contains("{alice}");
    let recorded = redis.dump().iter().filter(of_alice).map(|(_, entries)| entries.len()).sum::<usize>();
    assert!(recorded <= 3, "{recorded} of 3 are recorded");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_connection_is_replaced_within_the_request() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let proxy = proxy(&upstream, &redis.url(), "deny").await;
    let client = proxy.client();
    assert_eq!(status(&proxy, &client).await, StatusCode::OK);
    let killed: i64 = redis::cmd("CLIENT")
        .arg(&["KILL", "TYPE", "normal", "SKIPME", "yes"])
        .query(&mut redis.connection())
        .unwrap();
    assert!(killed >= 1);
    assert_eq!(
        statuses(&proxy, &client, 3).await,
        [200, 200, 429],
        "no request failed, and none counted twice"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_type_at_one_key_is_that_callers_affair() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let builder = ProxyBuilder::before(&upstream)
        .redis(&redis.url(), "")
        .tier("bob", r#"{ requests = 9, per = "1h" }"#);
    let proxy = builder.tier("alice", r#"{ requests = 3, per = "1h" }"#).start().await;
    let client = proxy.client();
    let _: () = redis::cmd("SET")
        .arg("ratelimit:{alice}:1:admitted")
        .arg("x")
        .query(&mut redis.connection())
        .unwrap();
    assert_eq!(statuses(&proxy, &client, 8).await, [503; 8]);
    let bob = proxy.chat(&client, "bob").send().await.unwrap();
    assert_eq!(bob.status(), StatusCode::OK);
    assert_eq!(proxy.metric("tollgate_limiter_store_up").await, 1.0);
}
