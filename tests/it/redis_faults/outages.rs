//! A redis-server that is not there, dies, hangs or comes back empty.

use rustix::process::Signal;

use super::{Place, Places, TIMEOUT};
use crate::harness::{Redis, patiently};

/// `Place::new` returns when the listener is open.
#[tokio::test(flavor = "multi_thread")]
async fn away_from_the_start() {
    let mut redis = Redis::start().await;
    redis.kill().await;
    let mut places = Vec::new();
    for policy in ["allow", "deny", "local"] {
        places.push(Place::new(&redis.url(), policy, "20s").await);
    }
    let places = Places(places);
    places.fall_back("disconnected").await;
    redis.start_again().await;
    places.are_exact_again(&redis, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_and_back_with_nothing_in_it() {
    let mut redis = Redis::start().await;
    let places = Places::before(&redis).await;
    redis.kill().await;
    places.fall_back("disconnected").await;
    redis.start_again().await;
    places.are_exact_again(&redis, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_and_continued() {
    let redis = Redis::start().await;
    for policy in ["allow", "deny", "local"] {
        let place = Place::new(&redis.url(), policy, TIMEOUT).await;
        place.first_decision().await;
        redis.signal(Signal::STOP);
        place.falls_back("timeout").await;
        redis.signal(Signal::CONT);
        place.recovered().await;
        // It does what it was asked while it was stopped, each once.
        let refused = async { while place.status().await != 429 {} };
        patiently("the limit", refused).await;
        assert_eq!(redis.admissions(policy), 3);
        let few = async { while redis.clients() > 2 {} };
        patiently("an end of the connections that were made meanwhile", few).await;
    }
}

/// Refused and counted requests hold nothing once they are answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_outage_leaves_nothing_open() {
    let mut redis = Redis::start().await;
    let place = Place::new(&redis.url(), "deny", "20s").await;
    assert_eq!(place.status().await, 200);
    let open_files =
        || async { std::fs::read_dir(format!("/proc/{}/fd", place.proxy.pid().await)).unwrap().count() };
    let before = open_files().await;
    redis.kill().await;
    assert_eq!(place.statuses(300).await, [503; 300]);
    assert!(open_files().await <= before + 2, "{} and not {before} files are open", open_files().await);
    assert_eq!(place.metric("tollgate_in_flight_requests").await, 0.0);
}
