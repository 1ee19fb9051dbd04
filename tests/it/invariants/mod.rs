//! What must hold of the limiter whatever happens, as its callers see it: through the real binary, with memory and with
//! Redis, with one proxy and with three.
//!
//! | | holds | test |
//! |---|---|---|
//! | I1 | no window holds more than the limit | `safety::hammered…` |
//! | I2 | a storm on a fresh key gets exactly the limit | `safety::a_storm…`, `limits::two_proxies…` |
//! | I3 | the proxies' clocks do not matter | `safety::proxies_whose_clocks_are_hours_apart…` |
//! | I4 | admissions in the same microsecond all count | `safety::admissions_of_one_microsecond…`, `safety::a_storm…` |
//! | I5 | a burst at a border gets the limit once | `safety::the_window_slides…`, `store::a_burst_at_a_border…` |
//! | I6 | a refusal changes nothing | `safety::a_refusal_changes_nothing_in_redis`; a request always costs 1 |
//! | I7 | if one limit refuses, none is charged | `safety::hammered…` (`both`), `store::all_limits_hold_at_once…` |
//! | I8 | a repeated request counts once | `script::a_repeated_request…` |
//! | I9 | refused only while the limit is used up | `safety::hammered…` |
//! | I10 | refusals do not prolong the wait | `safety::hammered…`, `store::refused_attempts_cost_nothing` |
//! | I11 | room at exactly first + W, not before | `safety::the_window_slides…`, `window::the_window_is_half_open` |
//! | I12 | who waits as told is admitted | `liveness::who_waits…` |
//! | I13 | the deny cache refuses only what the store would | `liveness::the_deny_cache…`, `safety::hammered…` |
//! | I14 | limits of 1 and 100 000, windows of 1 s and 1 d | `safety::…`; a limit of 0 is no configuration: `commands::…` |
//! | I15 | `Retry-After` is a whole number, from 1 to the window | `headers::a_refusal_tells…`, `liveness::who_waits…` |
//! | I16 | it counts down, and is the exact wait | `headers::a_refusal_tells…` |
//! | I17 | remaining is what is left | `headers::remaining…` |
//! | I18 | `RateLimit` and `RateLimit-Policy` are RFC 9651 | `headers::the_fields_of_the_draft…` |
//! | I19 | each field once, an upstream's others untouched | `streaming::…`, `attack::Shot::header` in every test here |
//! | I20 | the numbers are of the same decision | `safety::a_storm…` |
//! | I21 | a lowered limit holds at once, its wait is true | `change::a_lowered_limit…`, `store::a_changed_limit…` |
//! | I22 | a raised limit holds at once | `change::a_raised_limit…` |
//! | I23 | a longer or a shorter window holds at once | `change::a_longer_window…`, `change::a_shorter_window…` |
//! | | a limit counts on when its log is kept otherwise | `change::a_limit_that_is_kept_otherwise…`, `script::a_log_goes_on…` |
//! | I24 | replicas may differ while a change is rolled out | `change::replicas_under_different_limits…` |
//! | I25 | what is in Redis expires | `state::a_log_expires…`, `store::idle_keys_leave…` |
//! | I26 | refused traffic costs no memory | `state::refused_traffic…`, `window::no_more_is_kept…` |
//! | I27 | no credential reaches Redis or breaks anything | `state::strange_credentials…`, `secrets::…` |
//! | I28 | strangers cost Redis nothing | `state::strange_credentials…` |
//! | I29-I32, I35 | faults of Redis | `redis_away::…` |
//! | I36 | a Redis clock that is set back | `liveness::after_redis_clock_was_set_back…`, `script::a_clock_that_jumps…` |
//! | I37 | counting is exact again after an outage | `state::counting_goes_on…`, `redis_away::…` |
//! | I38 | a client that leaves costs at most its request | `state::clients_that_leave…` |
//! | I40 | one round trip an admission, none a cached refusal | `state::an_admission_is_one…` |

mod change;
mod headers;
mod liveness;
mod safety;
mod state;

use std::{sync::Arc, time::Duration};

use crate::{
    harness::{
        Proxy, ProxyBuilder, Redis, Upstream,
        attack::{Attack, Shot, observations},
        oracle::{Bound, judge},
    },
    reload::reload,
};

/// The name of a tier and of its key, and the limits as they stand in the file.
type Tier = (&'static str, &'static str);

const HOUR: Duration = Duration::from_secs(3600);

/// Proxies that share a store.
struct Fleet {
    upstream: Upstream,
    redis: Option<Redis>,
    proxies: Vec<Arc<Proxy>>,
    attack: Attack,
}

impl Fleet {
    async fn in_memory(tiers: &[Tier]) -> Self {
        Self::start(None, &[""], tiers).await
    }

    async fn at_redis(replicas: usize, tiers: &[Tier]) -> Self {
        Self::start(Some(Redis::start().await), &vec![""; replicas], tiers).await
    }

    async fn everywhere(tiers: &[Tier]) -> [Self; 3] {
        [Self::in_memory(tiers).await, Self::at_redis(1, tiers).await, Self::at_redis(3, tiers).await]
    }

    /// One proxy for each of these clocks.
    async fn start(redis: Option<Redis>, clocks: &[&str], tiers: &[Tier]) -> Self {
        let upstream = Upstream::ok().await;
        let mut proxies = Vec::new();
        for clock in clocks {
            let builder = builder(&upstream, redis.as_ref(), tiers);
            let builder = if clock.is_empty() { builder } else { builder.clock(clock) };
            let proxy = builder.start().await;
            if redis.is_some() {
                // What it tries out after its start is not to be counted.
                proxy.has_looked_at_redis().await;
            }
            proxies.push(Arc::new(proxy));
        }
        Self { attack: Attack::on(&proxies), upstream, redis, proxies }
    }

    fn redis(&self) -> &Redis {
        self.redis.as_ref().expect("this fleet was started with Redis")
    }

    /// Other limits from now on, for this proxy.
    async fn change(&self, proxy: usize, tiers: &[Tier]) {
        let proxy = &self.proxies[proxy];
        proxy.write_config(&builder(&self.upstream, self.redis.as_ref(), tiers));
        reload(proxy, "reloaded").await;
    }

    async fn change_all(&self, tiers: &[Tier]) {
        for proxy in 0..self.proxies.len() {
            self.change(proxy, tiers).await;
        }
    }
}

fn builder(upstream: &Upstream, redis: Option<&Redis>, tiers: &[Tier]) -> ProxyBuilder {
    let builder = ProxyBuilder::before(upstream);
    let builder = match redis {
        Some(redis) => builder.redis(&redis.url(), ""),
        None => builder,
    };
    tiers.iter().fold(builder, |builder, (name, limits)| builder.tier(name, limits))
}

/// Fails where something certainly went wrong.
fn acquit(bounds: &[Bound], shots: &[Shot]) {
    let found = judge(bounds, &observations(shots));
    assert!(found.is_empty(), "{bounds:?}: {found:#?}");
    assert_all_decided(shots);
}

/// Fails where a request was neither admitted nor refused.
fn assert_all_decided(shots: &[Shot]) {
    let strange = shots.iter().find(|shot| !matches!(shot.status, Some(200 | 429)));
    assert!(strange.is_none(), "every request was admitted or refused: {strange:?}");
}

fn admitted(shots: &[Shot]) -> usize {
    shots.iter().filter(|shot| shot.is_admitted()).count()
}

/// The wait that a first refusal tells is the time until `blocking` leaves the window, as exactly as can be seen from here.
fn assert_waits_for(refused: &Shot, blocking: &Shot, window: Duration) {
    let (refused_at, blocking_at) = (refused.observation, blocking.observation);
    let told = refused.retry_after();
    let least = window.saturating_sub(refused_at.received - blocking_at.sent);
    let most = window.saturating_sub(refused_at.sent - blocking_at.received) + Duration::from_millis(1);
    assert!((least..=most).contains(&told), "{told:?} lies between {least:?} and {most:?}");
}
