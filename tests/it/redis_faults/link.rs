//! A network that loses, delays and swallows.

use std::time::Duration;

use super::{Place, REQUESTS, TIMEOUT};
use crate::harness::{Gate, Mishap, Plain, Redis, WeakLink, patiently};

/// The decision is made and its answer lost: the request asks again under its own name, and counts once.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_counts_once() {
    let redis = Redis::start().await;
    let link = WeakLink::to(&redis).await;
    let place = Place::new(&link.url(), "deny", "20s").await;
    place.proxy.has_looked_at_redis().await;
    assert_eq!(place.status().await, 200);
    for (mishap, counted) in [(Mishap::LoseAnswer, 2), (Mishap::CutAnswer(5), 3)] {
        link.next(mishap.clone());
        let answer = place.proxy.chat(&place.client, "deny").send().await.unwrap();
        assert_eq!(answer.status(), 200, "{mishap:?}");
        assert_eq!(answer.headers()["x-ratelimit-remaining"], (3 - counted).to_string());
        assert_eq!(redis.admissions("deny"), counted, "{mishap:?}");
    }
    assert_eq!(place.status().await, 429);
    assert_eq!(
        (link.connections(), link.open()),
        (4, 1),
        "one for the look at Redis, and one for each that was lost"
    );
    assert_eq!(place.metric("tollgate_limiter_faults_total").await, 0.0);
}

/// The answer to the repetition is lost too: the policy decides, and still nothing counts twice.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_lost_twice_counts_once_and_is_the_policys_affair() {
    let redis = Redis::start().await;
    for (policy, expected) in [("allow", 200), ("deny", 503), ("local", 200)] {
        let link = WeakLink::to(&redis).await;
        let place = Place::new(&link.url(), policy, "20s").await;
        assert_eq!(place.status().await, 200);
        link.next(Mishap::LoseAnswer);
        link.next(Mishap::LoseAnswer);
        assert_eq!(place.status().await, expected, "{policy}");
        assert_eq!(redis.admissions(policy), 2, "{policy}");
        assert_eq!(place.faults("disconnected").await, 1.0);
        assert_eq!(
            place.statuses(2).await,
            [200, 429],
            "the connection is made anew, and the limit is exact"
        );
    }
}

/// A list has no names to know a repetition by, so nothing is repeated, and what was recorded stays recorded once.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_out_of_a_list_that_is_lost_is_not_asked_for_again() {
    let redis = Redis::start().await;
    for (policy, expected) in [("allow", 200), ("deny", 503), ("local", 200)] {
        let link = WeakLink::to(&redis).await;
        let place = Place::with(&link.url(), policy, "timeout = \"20s\"\nlog = \"list\"").await;
        assert_eq!(place.status().await, 200);
        for mishap in [Mishap::LoseAnswer, Mishap::Instead(b"*nonsense\r\n".to_vec())] {
            link.next(mishap);
            assert_eq!(place.status().await, expected, "{policy}");
        }
        // The first one was counted before its answer was lost, and the second one never arrived.
        assert_eq!(place.statuses(2).await, [200, 429], "{policy}");
        assert_eq!(place.metric("tollgate_limiter_faults_total").await, 2.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_listens_and_what_was_connected_is_reset() {
    let redis = Redis::start().await;
    for policy in ["allow", "deny", "local"] {
        let link = WeakLink::to(&redis).await;
        let place = Place::new(&link.url(), policy, "20s").await;
        assert_eq!(place.status().await, 200);
        link.close().await;
        place.falls_back("disconnected").await;
        link.mend().await;
        place.is_exact_again(&redis, 1).await;
        assert!(link.open() <= 2, "{} connections are left", link.open());
    }
}

/// Packets vanish, also for what is connected already, and no kernel says so. What was connected stays dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_black_hole() {
    let redis = Redis::start().await;
    for policy in ["allow", "deny", "local"] {
        let link = WeakLink::to(&redis).await;
        let place = Place::new(&link.url(), policy, TIMEOUT).await;
        place.first_decision().await;
        let known = redis.admissions(policy);
        link.black_hole().await;
        place.falls_back("timeout").await;
        let after = link.connections();
        patiently("further attempts to connect", async {
            while link.connections() < after + 3 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        assert!(link.open() <= 4, "{} connections pile up", link.open());
        link.mend().await;
        place.is_exact_again(&redis, known).await;
        let few = async {
            while link.open() > 2 {
                tokio::task::yield_now().await;
            }
        };
        patiently("an end of the dead connections", few).await;
    }
}

/// All wait for the same silence, each no longer than its own deadline, and nothing of them is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_at_a_black_hole() {
    let redis = Redis::start().await;
    let link = WeakLink::to(&redis).await;
    let place = Place::new(&link.url(), "deny", TIMEOUT).await;
    place.first_decision().await;
    let known = redis.admissions("deny");
    link.black_hole().await;
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let request = place.proxy.chat(&place.client, "deny");
        crowd.spawn(async { request.send().await.unwrap().status().as_u16() });
    }
    assert_eq!(patiently("all answers", crowd.join_all()).await, [503; 200]);
    assert_eq!(place.metric("tollgate_in_flight_requests").await, 0.0);
    assert!(link.open() <= 4, "{} connections pile up", link.open());
    // One question was asked for many, so it takes a few more until Redis is given up.
    place.falls_back("timeout").await;
    link.mend().await;
    place.is_exact_again(&redis, known).await;
}

/// A caller that comes now and then, while others keep the breaker closed, has to get off a dead connection too.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_connection_is_left_though_others_are_well() {
    let redis = Redis::start().await;
    let link = WeakLink::to(&redis).await;
    let place = Place::new(&link.url(), "deny", TIMEOUT).await;
    place.first_decision().await;
    // What is connected now stays dead, and what connects later is sound.
    link.black_hole().await;
    link.mend().await;
    let answered = async { while place.status().await == 503 {} };
    patiently("a decision by another connection", answered).await;
    assert_eq!(place.told("Redis does not decide"), 0, "it was not given up for that");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_redis_is_not_waited_for_and_its_late_answers_are_nobodys() {
    let redis = Redis::start().await;
    for policy in ["allow", "deny", "local"] {
        let link = WeakLink::to(&redis).await;
        let place = Place::new(&link.url(), policy, "500ms").await;
        place.first_decision().await;
        let known = redis.admissions(policy);
        link.slow(Duration::from_secs(2));
        assert_eq!(place.statuses(REQUESTS).await, place.answers_without_redis());
        assert!(place.faults("timeout").await >= 5.0);
        link.mend().await;
        place.recovered().await;
        // What timed out may have been decided on, once.
        let recorded = redis.admissions(policy);
        assert!((known..=3).contains(&recorded), "{recorded} are recorded");
        let mut admitted = 0;
        for _ in 0..5 {
            admitted += usize::from(place.status().await == 200);
        }
        assert!(admitted <= 3 - recorded || policy != "deny", "{admitted} more on top of {recorded}");
        assert_eq!(redis.admissions(policy), 3);
        let few = async {
            while link.open() > 2 {
                tokio::task::yield_now().await;
            }
        };
        patiently("an end of the slow connections", few).await;
    }
}

/// A client that leaves while Redis decides costs one admission at most, and the next caller gets its own answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_its_decision_counts_once() {
    let redis = Redis::start().await;
    let link = WeakLink::to(&redis).await;
    let place = Place::new(&link.url(), "deny", "20s").await;
    place.proxy.has_looked_at_redis().await;
    assert_eq!(place.status().await, 200);
    let gate = Gate::default();
    link.next(Mishap::HoldAnswer(gate.clone()));
    let mut client = Plain::connect(&place.proxy).await;
    client.request("GET /v1/gone", "deny", "").await;
    link.held(1).await;
    drop(client);
    let gone = place.proxy.logged("/v1/gone").await;
    assert_eq!((&gone["outcome"], &gone["decision"]), (&"client_gone".into(), &"none".into()));
    gate.open();
    let answer = place.proxy.chat(&place.client, "deny").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.headers()["x-ratelimit-remaining"], "0", "the one that left has been counted");
    assert_eq!(place.status().await, 429);
    assert_eq!(redis.admissions("deny"), 3);
    assert_eq!(link.connections(), 2, "and after the look at Redis the connection is still the first");
}
