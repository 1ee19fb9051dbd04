//! The limit holds, and a refusal is honest, whoever asks how fast and where.

use std::{collections::BTreeSet, time::Duration};

use tollgate::limit::Verdict;

use super::{Fleet, HOUR, Tier, acquit, admitted, assert_all_decided};
use crate::{
    harness::{Redis, attack::Shot, oracle::Bound},
    script::{KINDS, NOW, Script, limit},
};

/// Limits, and what the oracle holds them to: requests in so many milliseconds.
struct Hammered {
    tier: Tier,
    bounds: &'static [(usize, u64)],
    count_refused: bool,
}

const fn hammered(tier: Tier, bounds: &'static [(usize, u64)]) -> Hammered {
    Hammered { tier, bounds, count_refused: false }
}

/// Windows that are really waited for, for how time passes is what is under test.
const HAMMERED: [Hammered; 6] = [
    hammered(("one", r#"{ requests = 1, per = "1s" }"#), &[(1, 1000)]),
    hammered(("two", r#"{ requests = 2, per = "1s" }"#), &[(2, 1000)]),
    hammered(("hundred", r#"{ requests = 100, per = "1s" }"#), &[(100, 1000)]),
    hammered(("more", r#"{ requests = 129, per = "2s" }"#), &[(129, 2000)]),
    hammered(
        ("both", r#"{ requests = 3, per = "500ms" }, { requests = 5, per = "2s" }"#),
        &[(3, 500), (5, 2000)],
    ),
    Hammered {
        tier: ("attempts", r#"{ requests = 2, per = "300ms", count_refused = true }"#),
        bounds: &[(2, 300)],
        count_refused: true,
    },
];

/// Every key at once, from several connections that never pause.
async fn hammer(fleet: Fleet) {
    let attacks = HAMMERED.map(|Hammered { tier: (id, _), bounds, count_refused }| {
        let attack = fleet.attack.clone();
        tokio::spawn(async move {
            let shots = attack.hammer(id, Duration::from_millis(2600), 3).await;
            let bound = |&(requests, millis): &(usize, u64)| Bound {
                count_refused,
                ..Bound::new(requests, Duration::from_millis(millis))
            };
            acquit(&bounds.iter().map(bound).collect::<Vec<_>>(), &shots);
            assert!(admitted(&shots) >= 1, "{id}");
        })
    });
    for attack in attacks {
        attack.await.unwrap();
    }
}

fn tiers() -> [Tier; 6] {
    HAMMERED.map(|hammered| hammered.tier)
}

#[tokio::test(flavor = "multi_thread")]
async fn hammered_memory_admits_no_more_and_refuses_none_too_many() {
    hammer(Fleet::in_memory(&tiers()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hammered_redis_admits_no_more_and_refuses_none_too_many() {
    hammer(Fleet::at_redis(1, &tiers()).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hammered_replicas_admit_no_more_and_refuse_none_too_many() {
    hammer(Fleet::at_redis(3, &tiers()).await).await;
}

/// Each admission tells of its own place: the last one of none.
fn assert_each_tells_of_its_own_decision(shots: &[Shot], most: u64) {
    let admitted: Vec<_> = shots.iter().filter(|shot| shot.is_admitted()).collect();
    let told: BTreeSet<_> = admitted.iter().map(|shot| shot.number("x-ratelimit-remaining")).collect();
    assert_eq!(admitted.len() as u64, most);
    assert_eq!(told, (0..most).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_on_a_fresh_key_gets_exactly_the_limit() {
    let tiers = [
        ("one", r#"{ requests = 1, per = "1h" }"#),
        ("two", r#"{ requests = 2, per = "1d" }"#),
        ("more", r#"{ requests = 129, per = "1h" }, { requests = 1000, per = "1d" }"#),
    ];
    for fleet in Fleet::everywhere(&tiers).await {
        for (id, most) in [("one", 1), ("two", 2), ("more", 129)] {
            let shots = fleet.attack.storm(id, most + 70, 12).await;
            acquit(&[Bound::new(most, HOUR)], &shots);
            assert_eq!(admitted(&shots), most);
            assert_each_tells_of_its_own_decision(&shots, most as u64);
            if let Some(redis) = &fleet.redis {
                assert_eq!(redis.recorded(id), most);
            }
        }
        assert_eq!(fleet.upstream.received().len(), 1 + 2 + 129, "a refusal costs the upstream nothing");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_on_a_nearly_full_key_gets_exactly_what_is_left() {
    let minute = Duration::from_secs(60);
    let tiers =
        [("minute", r#"{ requests = 1000, per = "60s" }"#), ("day", r#"{ requests = 100_000, per = "1d" }"#)];
    let fleet = Fleet::at_redis(3, &tiers).await;
    for (id, most, window) in [("minute", 1000, minute), ("day", 100_000, 24 * HOUR)] {
        let ages: Vec<_> = (0..most - 10).map(|n| window / 10 * n / most).collect();
        fleet.redis().plant(id, window, &ages);
        let shots = fleet.attack.storm(id, 60, 12).await;
        assert_all_decided(&shots);
        assert_eq!(admitted(&shots), 10);
        assert_each_tells_of_its_own_decision(&shots, 10);
        assert_eq!(fleet.redis().recorded(id), most as usize);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn proxies_whose_clocks_are_hours_apart_hold_one_limit() {
    let tiers = [("fast", r#"{ requests = 5, per = "1s" }"#), ("day", r#"{ requests = 20, per = "1d" }"#)];
    let fleet = Fleet::start(Some(Redis::start().await), &["+1h", "", "-1h"], &tiers).await;
    let shots = fleet.attack.hammer("fast", Duration::from_millis(2200), 6).await;
    acquit(&[Bound::new(5, Duration::from_secs(1))], &shots);
    let shots = fleet.attack.storm("day", 120, 12).await;
    assert_eq!(admitted(&shots), 20);
    let late_by = |(member, score): (String, f64)| {
        let (written, _) = member.split_once(':').unwrap();
        ((written.parse::<f64>().unwrap() - score) / 3.6e9).round() as i64
    };
    let entries = fleet.redis().dump().into_iter().flat_map(|(_, entries)| entries);
    let hours: BTreeSet<_> = entries.map(late_by).collect();
    assert!(hours.is_subset(&[-1, 0, 1].into()) && hours.len() > 1, "the clocks do differ: {hours:?}");
}

#[tokio::test]
async fn admissions_of_one_microsecond_all_count() {
    let redis = Redis::start().await;
    for (kind, requests) in KINDS.into_iter().flat_map(|kind| [1, 2, 100, 129, 1000].map(|n| (kind, n))) {
        let mut script = Script::new(&redis, kind);
        script.forget();
        let limits = [limit(requests, 60_000_000)];
        for left in (0..requests).rev() {
            let decision = script.decide(&limits, NOW);
            assert_eq!((decision.verdict, decision.statuses[0].remaining), (Verdict::Admit, left));
        }
        assert_ne!(script.decide(&limits, NOW).verdict, Verdict::Admit);
    }
}

#[tokio::test]
async fn the_window_slides_and_its_edge_is_exact() {
    let redis = Redis::start().await;
    let windows = [1, 2, 60, 86_400].map(|seconds| seconds * 1_000_000);
    for (kind, window) in KINDS.into_iter().flat_map(|kind| windows.map(|window| (kind, window))) {
        let mut script = Script::new(&redis, kind);
        script.forget();
        // The second limit makes the script count the first one's window within a longer log.
        for limits in [vec![limit(2, window)], vec![limit(2, window), limit(1000, 2 * window)]] {
            // Just before a multiple of the window, where a fixed one would begin anew.
            let first = NOW / window * window + 3 * window * limits.len() as u64 - 1;
            let mut admits = |at| script.decide(&limits, at).verdict == Verdict::Admit;
            assert!(admits(first) && admits(first + 1));
            assert!(!admits(first + 2) && !admits(first + window - 1000) && !admits(first + window - 1));
            assert!(admits(first + window), "the first has left");
            assert!(!admits(first + window), "the second has not");
            assert!(admits(first + window + 1));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_changes_nothing_in_redis() {
    let fleet =
        Fleet::at_redis(3, &[("alice", r#"{ requests = 3, per = "1h" }, { requests = 9, per = "1d" }"#)])
            .await;
    assert_eq!(admitted(&fleet.attack.series(0, "alice", 3).await), 3);
    let (before, expires_in) = (fleet.redis().dump(), fleet.redis().expires_in("alice"));
    for proxy in 0..3 {
        let refused = fleet.attack.fire(proxy, "alice").await;
        assert!(refused.is_refused());
        assert!(refused.header("ratelimit").contains(r#""1d";r=6;"#), "the day's limit is not charged");
    }
    assert_eq!(fleet.redis().dump(), before);
    assert!(fleet.redis().expires_in("alice") <= expires_in, "a refusal keeps nothing alive");
}
