//! One contract, two stores: what holds of the memory store holds of Redis, and the script in a real Redis gives the
//! very answers of the arithmetic in Rust.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use redis::{Commands, Connection};
use tollgate::{
    keys::KeyId,
    limit::{
        Decision, Limit, Status, Verdict, Window,
        breaker::Breaker,
        memory::MemoryStore,
        redis::{RedisStore, SCRIPT, arguments},
        window::Logs,
    },
};

use crate::harness::Redis;

const HOUR: Duration = Duration::from_secs(3600);

fn limit(requests: u32, window: Duration) -> Limit {
    Limit {
        requests: NonZeroU32::new(requests).unwrap(),
        window: Window::new(window).unwrap(),
        count_refused: false,
    }
}

fn counting_refusals(limit: Limit) -> Limit {
    Limit { count_refused: true, ..limit }
}

fn id(text: &str) -> KeyId {
    text.parse().unwrap()
}

/// A store whose time can be made to pass.
enum Store {
    Memory { store: MemoryStore, passed: std::cell::Cell<Duration> },
    Redis { store: std::cell::RefCell<RedisStore>, redis: Redis },
}

/// A store that remembers nothing of what another one saw.
fn fresh(redis: &Redis) -> RedisStore {
    RedisStore::new(&redis.url(), Duration::from_secs(20), Arc::new(Breaker::default())).unwrap()
}

impl Store {
    async fn both() -> [Self; 2] {
        let redis = Redis::start().await;
        let store = fresh(&redis).into();
        [
            Self::Memory { store: MemoryStore::new(), passed: Duration::ZERO.into() },
            Self::Redis { store, redis },
        ]
    }

    async fn decide(&self, key: &str, limits: &[Limit]) -> Decision {
        match self {
            Self::Memory { store, passed } => {
                store.decide(&id(key), limits, store.now() + passed.get().as_micros() as u64)
            }
            Self::Redis { store, .. } => {
                let store = store.borrow().clone();
                store.decide(&id(key), limits).await.unwrap()
            }
        }
    }

    async fn is_admitted(&self, key: &str, limits: &[Limit]) -> bool {
        self.decide(key, limits).await.verdict == Verdict::Admit
    }

    /// Lets time pass: in Redis, everything recorded gets so much older, and the proxy forgets what it remembers.
    fn pass(&self, time: Duration) {
        match self {
            Self::Memory { passed, .. } => passed.set(passed.get() + time),
            Self::Redis { redis, store } => {
                store.replace(fresh(redis));
                let mut connection = redis.connection();
                for (key, entries) in redis.dump() {
                    for (member, score) in entries {
                        let older = score - time.as_micros() as f64;
                        let _: () = connection.zadd(&key, member, older).unwrap();
                    }
                }
            }
        }
    }
}

fn wait(decision: &Decision) -> Duration {
    match decision.verdict {
        Verdict::Refuse { retry_after, .. } => retry_after,
        Verdict::Admit => panic!("it was admitted"),
    }
}

/// The real time that a test takes makes waits a little shorter, never longer.
fn about(actual: Duration, expected: Duration) {
    let tolerance = Duration::from_secs(60);
    assert!(actual <= expected && actual + tolerance > expected, "{actual:?} is not about {expected:?}");
}

#[tokio::test]
async fn exactly_the_limit_is_admitted_and_remaining_counts_down() {
    for store in Store::both().await {
        for requests in [1, 2, 100, 129, 1000] {
            let (key, limits) = (format!("key-{requests}"), [limit(requests, HOUR)]);
            for left in (0..requests).rev() {
                let decision = store.decide(&key, &limits).await;
                assert_eq!(decision.verdict, Verdict::Admit);
                assert_eq!((decision.statuses[0].limit, decision.statuses[0].remaining), (requests, left));
            }
            let refused = store.decide(&key, &limits).await;
            about(wait(&refused), HOUR);
            assert_eq!(refused.statuses[0].remaining, 0);
        }
    }
}

#[tokio::test]
async fn an_entry_leaves_after_its_window_and_not_before() {
    for store in Store::both().await {
        let limits = [limit(2, HOUR)];
        assert!(store.is_admitted("a", &limits).await);
        store.pass(HOUR / 2);
        assert!(store.is_admitted("a", &limits).await);
        about(wait(&store.decide("a", &limits).await), HOUR / 2);
        store.pass(HOUR / 2 - Duration::from_secs(60));
        assert!(!store.is_admitted("a", &limits).await);
        store.pass(Duration::from_secs(60));
        assert!(store.is_admitted("a", &limits).await);
        assert!(!store.is_admitted("a", &limits).await, "only one had left");
    }
}

#[tokio::test]
async fn a_burst_at_a_border_admits_no_more_than_the_limit() {
    for store in Store::both().await {
        let limits = [limit(10, HOUR)];
        let mut admitted = 0;
        for _ in 0..30 {
            admitted += u32::from(store.is_admitted("a", &limits).await);
            store.pass(Duration::from_secs(100));
        }
        assert_eq!(admitted, 10);
    }
}

#[tokio::test]
async fn refused_attempts_cost_nothing() {
    for store in Store::both().await {
        let limits = [limit(3, HOUR)];
        for _ in 0..3 {
            assert!(store.is_admitted("a", &limits).await);
        }
        for _ in 0..50 {
            store.pass(Duration::from_secs(30));
            assert!(!store.is_admitted("a", &limits).await);
        }
        store.pass(HOUR - Duration::from_secs(50 * 30));
        for _ in 0..3 {
            assert!(store.is_admitted("a", &limits).await);
        }
    }
}

#[tokio::test]
async fn all_limits_hold_at_once_and_a_refusal_charges_none() {
    for store in Store::both().await {
        let limits = [limit(2, HOUR), limit(3, 24 * HOUR)];
        assert!(store.is_admitted("a", &limits).await);
        assert!(store.is_admitted("a", &limits).await);
        let refused = store.decide("a", &limits).await;
        assert!(matches!(refused.verdict, Verdict::Refuse { by: 0, .. }));
        assert_eq!(refused.statuses[1].remaining, 1, "the day's limit was not charged");
        store.pass(HOUR);
        assert!(store.is_admitted("a", &limits).await);
        let refused = store.decide("a", &limits).await;
        assert!(matches!(refused.verdict, Verdict::Refuse { by: 1, .. }));
        about(wait(&refused), 23 * HOUR);
        assert_eq!(refused.statuses[0].remaining, 1);
    }
}

#[tokio::test]
async fn hammering_keeps_a_caller_out_where_refusals_count() {
    for store in Store::both().await {
        let limits = [counting_refusals(limit(2, HOUR))];
        assert!(store.is_admitted("a", &limits).await);
        assert!(store.is_admitted("a", &limits).await);
        for _ in 0..10 {
            store.pass(HOUR / 3);
            assert!(!store.is_admitted("a", &limits).await);
        }
        store.pass(HOUR);
        assert!(store.is_admitted("a", &limits).await);
    }
}

#[tokio::test]
async fn a_changed_limit_holds_at_once() {
    for store in Store::both().await {
        for _ in 0..6 {
            assert!(store.is_admitted("a", &[limit(10, HOUR)]).await);
            store.pass(HOUR / 10);
        }
        let lowered = store.decide("a", &[limit(4, HOUR)]).await;
        // Six lie in the window, and three have to leave before there is room under four.
        about(wait(&lowered), HOUR - HOUR / 10 * 4);
        assert_eq!(lowered.statuses[0].remaining, 0);
        assert!(store.is_admitted("a", &[limit(7, HOUR)]).await);
        assert!(!store.is_admitted("a", &[limit(7, HOUR)]).await);
        assert!(store.is_admitted("a", &[limit(2, HOUR / 12)]).await, "a shorter window forgets sooner");
    }
}

#[tokio::test]
async fn callers_do_not_share() {
    for store in Store::both().await {
        let limits = [limit(1, HOUR)];
        for key in ["a", "b", "a.b", "a-b"] {
            assert!(store.is_admitted(key, &limits).await, "{key}");
        }
    }
}

#[tokio::test]
async fn what_is_in_redis_has_the_promised_form() {
    let [_, store] = Store::both().await;
    let Store::Redis { redis, .. } = &store else { unreachable!("the second is Redis") };
    let limits = [limit(5, Duration::from_secs(60)), limit(9, Duration::from_secs(10))];
    for _ in 0..8 {
        store.decide("alice", &limits).await;
    }
    let dump = redis.dump();
    let [(key, entries)] = &dump[..] else { panic!("one key: {dump:?}") };
    assert_eq!(key, "ratelimit:{alice}:1:admitted");
    assert_eq!(entries.len(), 5, "refusals are not recorded");
    for (member, score) in entries {
        let (micros, unique) = member.split_once(':').unwrap();
        assert!((micros.parse::<f64>().unwrap() - score).abs() < 6e7, "{member} at {score}");
        assert!(unique.len() == 8 && unique.chars().all(|c| c.is_ascii_hexdigit()), "{member}");
    }
    let expires_in: i64 = redis.connection().pttl(key).unwrap();
    assert!((1..=61_000).contains(&expires_in), "window + 1 s, not {expires_in}");
}

#[tokio::test]
async fn idle_keys_leave_redis_by_themselves() {
    let [_, store] = Store::both().await;
    let Store::Redis { redis, .. } = &store else { unreachable!("the second is Redis") };
    let limits = [limit(5, Duration::from_millis(1)), counting_refusals(limit(5, Duration::from_millis(1)))];
    store.decide("alice", &limits).await;
    assert_eq!(redis.dump().len(), 2);
    let gone = async {
        while !redis.dump().is_empty() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    crate::harness::patiently("the expiry of idle keys", gone).await;
}

#[tokio::test]
async fn an_admission_costs_one_round_trip() {
    let [_, store] = Store::both().await;
    let Store::Redis { redis, .. } = &store else { unreachable!("the second is Redis") };
    store.decide("alice", &[limit(500, HOUR)]).await;
    let before = redis.calls("evalsha");
    for _ in 0..100 {
        store.decide("alice", &[limit(500, HOUR)]).await;
    }
    assert_eq!(redis.calls("evalsha") - before, 100);
    assert_eq!(redis.calls("eval"), 1, "the script was sent whole once");
    let _: () = redis::cmd("SCRIPT").arg("FLUSH").query(&mut redis.connection()).unwrap();
    let after_flush = store.decide("alice", &[limit(500, HOUR)]).await;
    assert_eq!(
        after_flush.statuses[0].remaining,
        500 - 102,
        "a flushed script is sent again, and nothing is lost"
    );
    assert_eq!(redis.calls("eval"), 2);
}

#[tokio::test]
async fn a_flood_of_refusals_costs_redis_one_call() {
    let [_, store] = Store::both().await;
    let Store::Redis { redis, .. } = &store else { unreachable!("the second is Redis") };
    let limits = [limit(1, HOUR)];
    assert!(store.is_admitted("alice", &limits).await);
    let first = wait(&store.decide("alice", &limits).await);
    let before = redis.calls("evalsha");
    let mut shortest = first;
    for _ in 0..200 {
        let next = wait(&store.decide("alice", &limits).await);
        assert!(next <= shortest, "the wait counts down");
        shortest = next;
    }
    assert_eq!(redis.calls("evalsha"), before);
    assert!(store.is_admitted("bob", &limits).await, "others are not concerned");
    assert!(store.is_admitted("alice", &[limit(2, HOUR)]).await, "a raised limit holds at once");
}

/// The script with its clock in our hands.
struct Script {
    connection: Connection,
    script: redis::Script,
    requests: u32,
}

impl Script {
    fn new(redis: &Redis) -> Self {
        let clock = "call('TIME')";
        assert_eq!(SCRIPT.matches(clock).count(), 1, "the script reads the clock once");
        let script = redis::Script::new(&SCRIPT.replace(clock, "call('MGET', 'seconds', 'micros')"));
        Self { connection: redis.connection(), script, requests: 0 }
    }

    fn decide(&mut self, limits: &[Limit], now: u64) -> Decision {
        self.requests += 1;
        let member = format!("{now}:{:08x}", self.requests);
        self.decide_as(&member, false, limits, now)
    }

    fn decide_as(&mut self, member: &str, repeated: bool, limits: &[Limit], now: u64) -> Decision {
        let clock = [("seconds", now / 1_000_000), ("micros", now % 1_000_000)];
        let _: () = self.connection.mset(&clock).unwrap();
        let mut call = self.script.key("admitted");
        call.key("attempted").arg(member).arg(u8::from(repeated));
        for number in arguments(limits) {
            call.arg(number);
        }
        let reply: Vec<i64> = call.invoke(&mut self.connection).unwrap();
        let micros = |n: i64| Duration::from_micros(u64::try_from(n).unwrap());
        let of_limits: Vec<_> = reply[1..].chunks_exact(3).zip(limits).collect();
        let statuses = of_limits.iter().map(|(numbers, limit)| Status {
            limit: limit.requests.get(),
            remaining: u32::try_from(numbers[0]).unwrap(),
            reset_after: micros(numbers[1]),
        });
        let waits = of_limits.iter().map(|(numbers, _)| micros(numbers[2])).enumerate();
        let (by, retry_after) = waits.max_by_key(|(_, wait)| *wait).unwrap();
        let verdict = if reply[0] == 1 { Verdict::Admit } else { Verdict::Refuse { by, retry_after } };
        Decision { statuses: statuses.collect(), verdict }
    }

    fn forget(&mut self) {
        let _: () = redis::cmd("FLUSHALL").query(&mut self.connection).unwrap();
    }

    fn entries(&mut self, log: &str) -> usize {
        self.connection.zcard(log).unwrap()
    }
}

fn some_limits() -> impl Strategy<Value = Vec<Limit>> {
    let one = (1..6_u32, 1_000..9_000_u64, any::<bool>()).prop_map(|(requests, window, count_refused)| {
        Limit { count_refused, ..limit(requests, Duration::from_micros(window)) }
    });
    prop::collection::vec(one, 1..4)
}

fn run<S: Strategy>(strategy: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { failure_persistence: None, cases: 60, ..Config::default() };
    TestRunner::new(config).run(strategy, test).unwrap();
}

/// Real clocks have sixteen digits, which is where careless Lua loses the last two.
const NOW: u64 = 1_796_050_811_123_457;

#[tokio::test]
async fn the_script_answers_as_the_arithmetic_does() {
    let redis = Redis::start().await;
    let script = std::cell::RefCell::new(Script::new(&redis));
    let schedule = (some_limits(), some_limits(), prop::collection::vec(0..4_000_u64, 1..60));
    run(&schedule, |(before, after, gaps)| {
        let mut script = script.borrow_mut();
        script.forget();
        let (mut logs, mut now) = (Logs::default(), NOW);
        for (turn, gap) in gaps.iter().enumerate() {
            now += gap;
            // Half way through, the limits change.
            let limits = if turn < gaps.len() / 2 { &before } else { &after };
            prop_assert_eq!(script.decide(limits, now), logs.decide(limits, now), "turn {} at {}", turn, now);
        }
        Ok(())
    });
}

#[tokio::test]
async fn a_clock_that_jumps_admits_no_more_and_nobody_waits_longer_than_a_window() {
    let redis = Redis::start().await;
    let script = std::cell::RefCell::new(Script::new(&redis));
    let window = 10_000_000;
    let jumps = prop::collection::vec(-40_000_000_i64..6_000_000, 1..40);
    run(&(1..5_u32, jumps), |(requests, jumps)| {
        let mut script = script.borrow_mut();
        script.forget();
        let limits = [limit(requests, Duration::from_micros(window))];
        let (mut clock, mut truly, mut admitted) = (NOW, NOW, Vec::new());
        for jump in jumps {
            // A forward step is time that passes, a backward one is a clock that was set back.
            clock = clock.saturating_add_signed(jump);
            truly += jump.max(0) as u64;
            match script.decide(&limits, clock).verdict {
                Verdict::Admit => admitted.push(truly),
                Verdict::Refuse { retry_after, .. } => {
                    prop_assert!(retry_after <= Duration::from_micros(window), "{:?}", retry_after);
                }
            }
            let inside = admitted.iter().filter(|at| **at + window > truly).count();
            prop_assert!(inside <= requests as usize);
        }
        Ok(())
    });
}

#[tokio::test]
async fn a_repeated_request_counts_once_and_gets_the_same_verdict() {
    let redis = Redis::start().await;
    let mut script = Script::new(&redis);
    for limits in [
        vec![limit(2, HOUR)],
        vec![limit(2, HOUR), counting_refusals(limit(2, HOUR))],
        vec![counting_refusals(limit(2, HOUR))],
    ] {
        script.forget();
        script.decide_as("first", false, &limits, NOW);
        let original = script.decide_as("second", false, &limits, NOW + 1);
        let repeated = script.decide_as("second", true, &limits, NOW + 1);
        assert_eq!(original, repeated);
        assert_eq!(original.verdict, Verdict::Admit);
        assert!(matches!(script.decide_as("third", false, &limits, NOW + 2).verdict, Verdict::Refuse { .. }));
        let attempts = if limits.iter().any(|limit| limit.count_refused) { 2 } else { 0 };
        assert_eq!(script.entries("attempted"), attempts, "no more attempts are kept than the limit needs");
    }
    script.forget();
    let first_time = script.decide_as("lost", true, &[limit(1, HOUR)], NOW);
    assert_eq!(
        first_time.verdict,
        Verdict::Admit,
        "a repetition of what never arrived is the request itself"
    );
}
