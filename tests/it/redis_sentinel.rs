//! Sentinel and demoted servers: decisions follow the primary, and what a failover can lose is bounded by what was not
//! replicated.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use reqwest::Client;

use crate::harness::{PATIENCE, Proxy, ProxyBuilder, Redis, Sentinel, Upstream, patiently};

const LOOK: Duration = Duration::from_millis(20);

const LIMIT: usize = 1000;

/// A replica that holds what its primary holds.
async fn replica_of(primary: &Redis) -> Redis {
    let follow = format!("--replicaof 127.0.0.1 {} --repl-diskless-sync-delay 0", primary.port());
    let arguments = |_: &Path| follow.split(' ').map(str::to_owned).collect();
    let replica = Redis::start_with(Path::new("redis-server"), arguments).await;
    patiently("the replication", async {
        while !replica.ask::<String>("INFO replication").contains("master_link_status:up") {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    replica
}

async fn proxy(upstream: &Upstream, redis: &str) -> Proxy {
    let limits = format!("{{ requests = {LIMIT}, per = \"1h\" }}");
    let builder = ProxyBuilder::before(upstream).server("workers = 1").counting_in(redis);
    builder.tier("alice", &limits).start().await
}

async fn status(proxy: &Proxy, client: &Client) -> u16 {
    proxy.chat(client, "alice").send().await.unwrap().status().as_u16()
}

fn recorded(redis: &Redis) -> usize {
    redis.dump().iter().map(|(_, entries)| entries.len()).sum()
}

fn accepted_connections(redis: &Redis) -> u64 {
    let info: String = redis.ask("INFO stats");
    let line = info.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    line.unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_decisions_go_to_the_new_primary() {
    let lost = lost_by_a_failover_of(Redis::start().await).await;
    // What the old primary admits in the second or so until Sentinel itself has noticed that the new one is one.
    assert!(lost <= LIMIT / 10, "{lost} admissions were not replicated");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_that_must_have_a_replica_loses_next_to_nothing() {
    let settings = |_: &Path| {
        let words = ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "10"];
        words.map(str::to_owned).to_vec()
    };
    let primary = Redis::start_with(Path::new("redis-server"), settings).await;
    let lost = lost_by_a_failover_of(primary).await;
    assert!(lost <= LIMIT / 100, "{lost} admissions were not replicated");
}

/// Has a failover happen while requests come, and tells how many too many were admitted.
async fn lost_by_a_failover_of(primary: Redis) -> usize {
    let upstream = Upstream::ok().await;
    let replica = replica_of(&primary).await;
    let sentinels = [
        Sentinel::watching(&primary, 2).await,
        Sentinel::watching(&primary, 2).await,
        Sentinel::watching(&primary, 2).await,
    ];
    patiently("the Sentinels find each other and the replica", async {
        let ready = |sentinel: &Sentinel| {
            (sentinel.says("num-slaves"), sentinel.says("num-other-sentinels")) == (1, sentinels.len() - 1)
        };
        while !sentinels.iter().all(ready) {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    let urls: Vec<_> = sentinels.iter().map(|sentinel| format!("\"{}\"", sentinel.url())).collect();
    // Somebody who is away is passed over.
    let nodes = format!("\"redis://127.0.0.1:1\", {}", urls.join(", "));
    let setting = format!("sentinel = {{ master = \"mymaster\", nodes = [{nodes}] }}\ntimeout = \"2s\"");
    let proxy = proxy(&upstream, &setting).await;
    let client = proxy.client();

    let (mut admitted, mut unavailable) = (0, 0);
    while admitted < 100 {
        assert_eq!(status(&proxy, &client).await, 200);
        admitted += 1;
    }
    patiently("a Sentinel that agrees to a failover", async {
        while sentinels[0].ask::<String>(&["failover", "mymaster"]).is_err() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    let (began, mut served, mut longest) = (Instant::now(), Instant::now(), Duration::ZERO);
    loop {
        match status(&proxy, &client).await {
            200 => {
                admitted += 1;
                longest = longest.max(served.elapsed());
                served = Instant::now();
            }
            503 => unavailable += 1,
            429 if replica.calls("evalsha") > 0 => break,
            other => panic!("{other} after {admitted}, before the new primary decided"),
        }
        assert!(began.elapsed() < PATIENCE, "the limit was not reached");
        // Until the new primary decides, the limit must not be used up.
        if replica.calls("evalsha") == 0 {
            tokio::time::sleep(LOOK).await;
        }
    }
    let lost = admitted - LIMIT.min(admitted);
    eprintln!(
        "failover: {admitted} of {LIMIT} admitted ({lost} too many), {unavailable} answered 503, longest time without \
         service {longest:?}"
    );
    assert!(recorded(&replica) <= LIMIT);
    assert_eq!(replica.ask::<Vec<redis::Value>>("ROLE")[0], redis::Value::BulkString(b"master".to_vec()));
    lost
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demoted_server_is_met_a_few_times_and_not_in_a_hot_loop() {
    let (upstream, other, redis) = (Upstream::ok().await, Redis::start().await, Redis::start().await);
    let proxy = proxy(&upstream, &format!("url = \"{}\"\ntimeout = \"2s\"", redis.url())).await;
    let client = proxy.client();
    assert_eq!(status(&proxy, &client).await, 200);
    let before = accepted_connections(&redis);
    let _: () = redis.ask(&format!("REPLICAOF 127.0.0.1 {}", other.port()));
    let began = Instant::now();
    let mut asked = 0;
    while began.elapsed() < Duration::from_secs(2) {
        assert_eq!(status(&proxy, &client).await, 503, "nothing that was not counted passes");
        asked += 1;
    }
    // One of them is the test's own.
    let made = accepted_connections(&redis) - before - 1;
    eprintln!("{asked} requests within {:?} made {made} connections to a demoted server", began.elapsed());
    assert!(made <= 5 + 4 * (began.elapsed().as_secs() + 1) + 1, "{made} connections");
    let _: () = redis.ask("REPLICAOF NO ONE");
    patiently("decisions of the primary", async {
        while status(&proxy, &client).await != 200 {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
    assert_eq!(status(&proxy, &client).await, 200);
}
