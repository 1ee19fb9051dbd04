//! Redis Cluster: every key is decided on by the server that holds it, wherever that is at the moment, and the fall of
//! one server is the affair of its own keys.

use std::{
    collections::HashMap,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use reqwest::StatusCode;
use tollgate::limit::{
    Limit, Verdict, Window,
    fault::FaultKind,
    redis::{Deployment, RedisStore, topology::Topology},
};

use crate::harness::{Cluster, ProxyBuilder, Upstream, patiently};

const HOUR: Duration = Duration::from_secs(3600);

fn limit(requests: u32) -> Limit {
    let requests = NonZeroU32::new(requests).unwrap();
    Limit { requests, window: Window::new(HOUR).unwrap(), count_refused: false, enforce: true }
}

/// Looks at both logs of a caller, where the other looks at one.
fn with_attempts(limit: Limit) -> [Limit; 2] {
    let requests = NonZeroU32::new(100_000).unwrap();
    [limit, Limit { requests, count_refused: true, ..limit }]
}

fn store(cluster: &Cluster) -> RedisStore {
    let nodes = cluster.nodes.iter().map(|node| node.url().parse().unwrap()).collect();
    let deployment = Arc::new(Deployment::new(Topology::Cluster(nodes), None));
    RedisStore::new(&deployment, Duration::from_secs(20), None)
}

/// The id of a caller whose keys this node holds.
fn caller_at(cluster: &Cluster, node: usize) -> String {
    let ids = (0..).map(|n| format!("caller-{n}"));
    let mut there = ids.filter(|id| cluster.holder(cluster.slot(id)) == node);
    there.next().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_caller_is_held_to_its_limit_by_the_server_of_its_keys() {
    let (upstream, cluster) = (Upstream::ok().await, Cluster::start(3).await);
    let callers: Vec<_> = (0..3).map(|node| caller_at(&cluster, node)).collect();
    let mut builder =
        ProxyBuilder::before(&upstream).counting_in(&format!("{}\ntimeout = \"20s\"", cluster.setting()));
    for id in &callers {
        let limits = r#"{ requests = 3, per = "1h" }, { requests = 9, per = "1h", count_refused = true }"#;
        builder = builder.tier(id, limits);
    }
    let proxy = builder.start().await;
    let client = proxy.client();
    for id in &callers {
        let mut seen = Vec::new();
        for _ in 0..5 {
            seen.push(proxy.chat(&client, id).send().await.unwrap().status().as_u16());
        }
        assert_eq!(seen, [200, 200, 200, 429, 429], "{id}");
        assert_eq!(cluster.recorded(id), 3 + 5, "{id}");
    }
    for node in &cluster.nodes {
        assert_eq!(node.dump().len(), 2, "each server has the two logs of one caller");
    }
    let _: () = cluster.nodes[0].ask("SCRIPT FLUSH");
    let again = proxy.chat(&client, &callers[0]).send().await.unwrap();
    assert_eq!(again.status(), StatusCode::TOO_MANY_REQUESTS, "a flushed script is sent again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn slots_that_move_under_load_lose_and_double_nothing() {
    const CALLERS: usize = 24;
    const LIMIT: u32 = 60;
    let cluster = Cluster::start(3).await;
    let ids: Vec<_> = (0..CALLERS).map(|n| format!("caller-{n}")).collect();
    let moving = Arc::new(AtomicBool::new(true));
    // Three replicas, each with a map of its own.
    let replicas: Vec<_> = (0..3)
        .map(|_| {
            let (store, ids, moving) = (store(&cluster), ids.clone(), moving.clone());
            tokio::spawn(async move {
                let mut admitted = HashMap::new();
                let mut asked = 0_u32;
                while moving.load(Relaxed) || asked < LIMIT * 2 {
                    for id in &ids {
                        // The limit grows while slots move, so that there is room all the time.
                        let most = if moving.load(Relaxed) { LIMIT.min(1 + asked) } else { LIMIT };
                        let key = id.parse().unwrap();
                        let decision = store.decide(&key, &[limit(most)]).await;
                        let decision = decision.unwrap_or_else(|fault| panic!("{id}: {fault}"));
                        if decision.verdict == Verdict::Admit {
                            *admitted.entry(id.clone()).or_insert(0) += 1;
                        }
                    }
                    asked += 1;
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                admitted
            })
        })
        .collect();
    let mut moves = 0;
    for round in 1..=2 {
        for id in &ids {
            let slot = cluster.slot(id);
            let from = cluster.holder(slot);
            cluster.move_slot(slot, from, (from + round) % 3).await;
            moves += 1;
        }
    }
    moving.store(false, Relaxed);
    let mut admitted: HashMap<String, u32> = HashMap::new();
    for replica in replicas {
        for (id, count) in patiently("the load", replica).await.unwrap() {
            *admitted.entry(id).or_insert(0) += count;
        }
    }
    for id in &ids {
        assert_eq!((admitted[id], cluster.recorded(id)), (LIMIT, LIMIT as usize), "{id}");
    }
    eprintln!(
        "{moves} slots were moved under load, and each of {CALLERS} callers was admitted {LIMIT} times"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_slot_that_moves_makes_callers_with_two_logs_wait_and_counts_on() {
    const LIMIT: u32 = 200;
    let cluster = Cluster::start(3).await;
    let moving = Arc::new(AtomicBool::new(true));
    let load = {
        let (store, moving) = (store(&cluster), moving.clone());
        tokio::spawn(async move {
            let (mut admitted, mut unserved) = (0, 0);
            let key = "alice".parse().unwrap();
            while admitted < LIMIT || moving.load(Relaxed) {
                // One more than was admitted while the slot moves, so that there is always room.
                let most = if moving.load(Relaxed) { admitted + 1 } else { LIMIT };
                match store.decide(&key, &with_attempts(limit(most))).await {
                    Ok(decision) => admitted += u32::from(decision.verdict == Verdict::Admit),
                    Err(fault) => {
                        assert_eq!(fault.kind(), FaultKind::Cluster, "{fault}");
                        unserved += 1;
                    }
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            (admitted, unserved)
        })
    };
    let slot = cluster.slot("alice");
    for _ in 0..6 {
        let from = cluster.holder(slot);
        cluster.move_slot(slot, from, (from + 1) % 3).await;
    }
    moving.store(false, Relaxed);
    let (admitted, unserved) = patiently("the load", load).await.unwrap();
    eprintln!(
        "{admitted} decided and {unserved} not, while a slot with two logs of a caller moved six times"
    );
    let of_admissions =
        |node: &crate::harness::Redis| node.dump().into_iter().find(|(key, _)| key.contains(":admitted"));
    let recorded: usize =
        cluster.nodes.iter().filter_map(of_admissions).map(|(_, entries)| entries.len()).sum();
    assert_eq!((admitted, recorded), (LIMIT, LIMIT as usize));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_concerns_its_own_keys_only() {
    let (upstream, mut cluster) = (Upstream::ok().await, Cluster::start(3).await);
    let [lost, kept, other] = [0, 1, 2].map(|node| caller_at(&cluster, node));
    let mut builder =
        ProxyBuilder::before(&upstream).counting_in(&format!("{}\ntimeout = \"2s\"", cluster.setting()));
    for id in [&lost, &kept, &other] {
        builder = builder.tier(id, r#"{ requests = 1000, per = "1h" }"#);
    }
    let proxy = builder.start().await;
    let client = proxy.client();
    let status = async |id: &str| proxy.chat(&client, id).send().await.unwrap().status().as_u16();
    for id in [&lost, &kept, &other] {
        assert_eq!(status(id).await, 200, "{id}");
    }
    cluster.nodes[0].kill().await;
    let mut slowest = Duration::ZERO;
    for _ in 0..30 {
        assert_eq!(status(&lost).await, 503);
        for id in [&kept, &other] {
            let asked = std::time::Instant::now();
            assert_eq!(status(id).await, 200, "{id} is held by another server");
            slowest = slowest.max(asked.elapsed());
        }
    }
    eprintln!("with one server of three down, the slowest request of the other callers took {slowest:?}");
    assert_eq!(proxy.metric("tollgate_limiter_store_up").await, 0.0);
    cluster.nodes[0].start_again().await;
    patiently("the return of the server", async {
        while status(&lost).await != 200 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert_eq!(proxy.metric("tollgate_limiter_store_up").await, 1.0);
}
