//! Answers that Redis would not give.

use super::{LIMIT, Place};
use crate::harness::{Mishap, Redis, WeakLink};

async fn survives(reply: &[u8], kind: &str) {
    let redis = Redis::start().await;
    let link = WeakLink::to(&redis).await;
    for policy in ["allow", "deny", "local"] {
        let place = Place::new(&link.url(), policy, super::TIMEOUT).await;
        place.first_decision().await;
        let known = redis.admissions(policy);
        link.always(Mishap::Instead(reply.to_vec()));
        place.falls_back(kind).await;
        link.mend().await;
        place.is_exact_again(&redis, known).await;
        assert!(link.open() <= 2, "{} connections are left", link.open());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn something_that_is_not_redis() {
    survives(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "bad_reply").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_another_type() {
    survives(b"+OK\r\n", "bad_reply").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing() {
    survives(b"$-1\r\n", "bad_reply").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_too_short() {
    survives(b"*1\r\n:1\r\n", "bad_reply").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn loading() {
    survives(b"-LOADING Redis is loading the dataset in memory\r\n", "busy").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_without_its_primary() {
    survives(
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.\r\n",
        "read_only",
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_down() {
    survives(b"-CLUSTERDOWN The cluster is down\r\n", "cluster").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_a_command_as_old_servers_wrap_it() {
    survives(
        b"-ERR Error running script (call to f_6b1bf486c81ceb7edf3c093f4c48582e38c0e791): @user_script:47: \
          -OOM command not allowed when used memory > 'maxmemory'.\r\n",
        "cannot_write",
    )
    .await;
}

/// The rest never comes, so it is a matter of time and not of memory.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_enormous_length() {
    let redis = Redis::start().await;
    for reply in ["*1000000000\r\n:1\r\n", "$9000000000000000000\r\nx", "*1000000000000000000\r\n"] {
        let link = WeakLink::to(&redis).await;
        let place = Place::new(&link.url(), "deny", super::TIMEOUT).await;
        place.first_decision().await;
        let before = place.proxy.resident_bytes().await;
        link.always(Mishap::Instead(reply.as_bytes().to_vec()));
        place.falls_back("timeout").await;
        let grown = place.proxy.resident_bytes().await.saturating_sub(before);
        assert!(grown < 32 << 20, "{grown} bytes more for {reply:?}");
        link.mend().await;
        place.recovered().await;
        assert!(LIMIT.contains('3') && redis.admissions("deny") <= 3);
        let _: () = redis::cmd("FLUSHALL").query(&mut redis.connection()).unwrap();
    }
}
