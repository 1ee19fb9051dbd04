//! Nobody is kept out longer than was said.

use std::{num::NonZeroU32, time::Duration};

use proptest::prelude::*;
use tokio::{task::JoinSet, time::Instant};
use tollgate::limit::{Limit, Verdict, Window, denied::Denied, window::Logs};

use super::{Fleet, Tier};
use crate::harness::attack::Attack;

const MINUTE: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);

/// A refusal from the store and one from what the proxy remembers: waiting as long as the second says is enough.
async fn waits_as_told(attack: Attack, id: &str) {
    let refusals = attack.series(0, id, 2).await;
    assert!(refusals.iter().all(|shot| shot.is_refused()), "{id}");
    tokio::time::sleep(refusals[1].retry_after()).await;
    assert!(attack.fire(0, id).await.is_admitted(), "{id} waited for {:?}", refusals[1].retry_after());
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_as_long_as_it_is_told_is_admitted() {
    let tiers: [Tier; 2] = [
        ("one", r#"{ requests = 1, per = "1s" }"#),
        ("both", r#"{ requests = 9, per = "100ms" }, { requests = 2, per = "2s" }"#),
    ];
    for fleet in Fleet::everywhere(&tiers).await {
        let mut callers = JoinSet::new();
        for (id, most) in [("one", 1), ("both", 2)] {
            let attack = fleet.attack.clone();
            callers.spawn(async move {
                // A machine that stalls for longer than a window may let more pass before one is refused.
                while attack.series(0, id, most).await.iter().all(|shot| shot.is_admitted()) {}
                let refused = attack.fire(0, id).await;
                if refused.is_refused() {
                    tokio::time::sleep(refused.retry_after()).await;
                    assert!(attack.fire(0, id).await.is_admitted(), "{id}");
                }
            });
        }
        callers.join_all().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_the_end_of_a_long_window_is_admitted() {
    let tiers: [Tier; 6] = [
        ("one", r#"{ requests = 1, per = "60s" }"#),
        ("two", r#"{ requests = 2, per = "1h" }"#),
        ("listpack", r#"{ requests = 128, per = "60s" }"#),
        ("skiplist", r#"{ requests = 129, per = "1h" }"#),
        ("thousand", r#"{ requests = 1000, per = "1d" }"#),
        ("lowered", r#"{ requests = 50, per = "1h" }"#),
    ];
    let fleet = Fleet::at_redis(1, &tiers).await;
    let (hour, day) = (60 * MINUTE, 24 * 60 * MINUTE);
    let mut callers = JoinSet::new();
    for (id, most, window) in [
        ("one", 1, MINUTE),
        ("two", 2, hour),
        ("listpack", 128, MINUTE),
        ("skiplist", 129, hour),
        ("thousand", 1000, day),
        // Ten more than the limit: eleven have to leave, and all of them do so together.
        ("lowered", 60, hour),
    ] {
        let leaving = if id == "lowered" { 11 } else { 1 };
        let age = |n| if n < leaving { window - 3 * SECOND } else { window / 2 - SECOND * 10 };
        fleet.redis().plant(id, window, &(0..most).map(age).collect::<Vec<_>>());
        let attack = fleet.attack.clone();
        callers.spawn(async move { waits_as_told(attack, id).await });
    }
    callers.join_all().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_redis_clock_was_set_back_no_more_pass_and_nobody_waits_longer_than_a_window() {
    let limits = r#"{ requests = 3, per = "60s" }, { requests = 9, per = "1h" }"#;
    let fleet = Fleet::at_redis(3, &[("step", limits), ("leap", limits)]).await;
    for (id, back) in [("step", 10 * SECOND), ("leap", 60 * MINUTE)] {
        assert!(fleet.attack.fire(0, id).await.is_admitted());
        fleet.redis().set_clock_back(id, back);
        let second = fleet.attack.fire(0, id).await;
        assert!(second.is_admitted());
        assert!(second.number("x-ratelimit-reset") <= 60, "{second:?}");
        assert!(fleet.attack.fire(0, id).await.is_admitted());
        fleet.redis().set_clock_back(id, back);
        for proxy in 0..2 {
            let refused = fleet.attack.fire(proxy, id).await;
            assert!(refused.is_refused());
            assert!(refused.number("retry-after") <= 60, "{refused:?}");
            let of_the_hour = refused.header("ratelimit").rsplit_once(";t=").unwrap().1;
            assert!(of_the_hour.parse::<u64>().unwrap() <= 3600, "{refused:?}");
        }
        fleet.redis().age(id, MINUTE);
        // The third proxy remembers nothing yet.
        assert!(fleet.attack.fire(2, id).await.is_admitted());
    }
}

fn limits() -> impl Strategy<Value = Vec<Limit>> {
    let one = (1..6_u32, 1_000..9_000_u64).prop_map(|(requests, micros)| {
        let window = Window::new(Duration::from_micros(micros)).unwrap();
        Limit::new(NonZeroU32::new(requests).unwrap(), window)
    });
    prop::collection::vec(one, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Several proxies at one store, each with its own memory, on one clock. Questions and answers take time on their
    /// way.
    #[test]
    fn the_deny_cache_refuses_only_what_the_store_would_and_tells_a_true_wait(
        limits in limits(),
        questions in prop::collection::vec((0..2_500_u64, 0..400_u64, 0..400_u64, 0..3_usize), 1..150),
    ) {
        let (key, origin) = ("alice".parse().unwrap(), Instant::now());
        let at = |micros| origin + Duration::from_micros(micros);
        let (mut store, proxies, mut now) = (Logs::default(), [(); 3].map(|()| Denied::default()), 1_000_000);
        for (gap, there, back, proxy) in questions {
            now += gap;
            if let Some(recalled) = proxies[proxy].recall(&key, &limits, at(now)) {
                let Verdict::Refuse { retry_after, .. } = recalled.verdict else { panic!("a refusal") };
                let asks = |at| store.clone().decide(&limits, at).verdict;
                prop_assert_ne!(asks(now), Verdict::Admit);
                prop_assert_eq!(asks(now + retry_after.as_micros() as u64), Verdict::Admit);
                continue;
            }
            let (asked, decided) = (now, now + there);
            now = decided + back;
            let decision = store.decide(&limits, decided);
            proxies[proxy].remember(&key, &limits, at(asked)..at(now), &decision);
        }
    }
}
