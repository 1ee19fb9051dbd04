//! Limits that change while requests come hold at once, on every replica.

use std::time::Duration;

use super::{Fleet, HOUR, admitted, assert_waits_for};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread")]
async fn a_lowered_limit_holds_at_once_and_waits_for_the_entry_that_makes_room() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 10, per = "1h" }"#)]).await {
        let mut shots = Vec::new();
        for _ in 0..6 {
            shots.push(fleet.attack.fire(0, "alice").await);
            // So far apart that the wait for one is not the wait for another.
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        fleet.change_all(&[("alice", r#"{ requests = 4, per = "1h" }"#)]).await;
        let refused = fleet.attack.fire(0, "alice").await;
        assert!(refused.is_refused());
        assert_eq!(refused.number("x-ratelimit-limit"), 4);
        // Six are in the window, and three have to leave before there is room under four.
        assert_waits_for(&refused, &shots[2], HOUR);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_raised_limit_holds_at_once_on_every_replica() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 3, per = "1h" }"#)]).await {
        assert_eq!(admitted(&fleet.attack.storm("alice", 30, 6).await), 3);
        for proxy in 0..fleet.proxies.len() {
            assert!(fleet.attack.fire(proxy, "alice").await.is_refused(), "and remembered");
        }
        fleet.change_all(&[("alice", r#"{ requests = 6, per = "1h" }"#)]).await;
        for proxy in 0..3 {
            let shot = fleet.attack.fire(proxy % fleet.proxies.len(), "alice").await;
            assert_eq!((shot.is_admitted(), shot.number("x-ratelimit-remaining")), (true, 2 - proxy as u64));
        }
        assert_eq!(admitted(&fleet.attack.storm("alice", 12, 6).await), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_longer_window_counts_what_is_known_and_its_log_lives_on() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 3, per = "10s" }"#)]).await {
        let shots = fleet.attack.series(0, "alice", 3).await;
        assert_eq!(admitted(&shots), 3);
        fleet.change_all(&[("alice", r#"{ requests = 3, per = "1h" }"#)]).await;
        let refused = fleet.attack.fire(0, "alice").await;
        assert!(refused.is_refused());
        assert_waits_for(&refused, &shots[0], HOUR);
        if let Some(redis) = &fleet.redis {
            let expires_in = redis.expires_in("alice").unwrap();
            assert!(
                expires_in >= refused.retry_after(),
                "it refuses for an hour, and is gone in {expires_in:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shorter_window_forgets_at_once_what_it_does_not_cover() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 2, per = "1h" }"#)]).await {
        assert_eq!(admitted(&fleet.attack.series(0, "alice", 3).await), 2);
        fleet.change_all(&[("alice", r#"{ requests = 2, per = "1s" }"#)]).await;
        tokio::time::sleep(SECOND).await;
        for proxy in [0, fleet.proxies.len() - 1] {
            assert!(fleet.attack.fire(proxy, "alice").await.is_admitted());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_under_different_limits_answer_and_hold_the_laxer_one() {
    let fleet = Fleet::at_redis(3, &[("alice", r#"{ requests = 30, per = "1h" }"#)]).await;
    let storm = {
        let attack = fleet.attack.clone();
        tokio::spawn(async move { attack.storm("alice", 300, 9).await })
    };
    let other = r#"{ requests = 20, per = "1h" }, { requests = 25, per = "1d", count_refused = true }"#;
    fleet.change(1, &[("alice", other)]).await;
    fleet.change(2, &[("alice", other)]).await;
    let mut shots = storm.await.unwrap();
    shots.extend(fleet.attack.storm("alice", 60, 9).await);
    for shot in &shots {
        assert!(shot.is_admitted() || shot.is_refused(), "{shot:?}");
        assert!(shot.number("x-ratelimit-remaining") < 30);
    }
    assert!((20..=30).contains(&admitted(&shots)), "{} were admitted", admitted(&shots));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_is_kept_otherwise_in_redis_keeps_its_count() {
    let (small, large) = (r#"{ requests = 40, per = "1h" }"#, r#"{ requests = 100_000, per = "1h" }"#);
    let fleet = Fleet::at_redis(3, &[("alice", small)]).await;
    assert_eq!(admitted(&fleet.attack.storm("alice", 60, 6).await), 40);
    // So large a limit is counted in a list and a small one in a sorted set, and one follows the other.
    fleet.change_all(&[("alice", large)]).await;
    let shot = fleet.attack.fire(0, "alice").await;
    assert_eq!((shot.is_admitted(), shot.number("x-ratelimit-remaining")), (true, 99_959));
    fleet.change_all(&[("alice", small)]).await;
    let shots = fleet.attack.storm("alice", 60, 6).await;
    assert_eq!(admitted(&shots), 0, "41 are in the window");
}
