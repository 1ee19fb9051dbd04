//! One contract for every store: memory, sorted sets in Redis, lists in Redis.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use redis::Commands;
use tollgate::{
    keys::KeyId,
    limit::{
        Decision, Limit, LogKind, Verdict, Window,
        memory::MemoryStore,
        redis::{Deployment, RedisStore, topology::Topology},
    },
};

use crate::harness::Redis;

const HOUR: Duration = Duration::from_secs(3600);

fn limit(requests: u32, window: Duration) -> Limit {
    Limit::new(NonZeroU32::new(requests).unwrap(), Window::new(window).unwrap())
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
    Redis { store: std::cell::RefCell<RedisStore>, redis: Redis, log: LogKind },
}

/// A store that remembers nothing of what another one saw.
fn fresh(redis: &Redis, log: LogKind) -> RedisStore {
    let topology = Topology::Single(redis.url().parse().unwrap());
    RedisStore::new(&Arc::new(Deployment::new(topology, None)), Duration::from_secs(20), Some(log))
}

impl Store {
    async fn each() -> [Self; 3] {
        let memory = Self::Memory { store: MemoryStore::new(), passed: Duration::ZERO.into() };
        [memory, Self::redis(LogKind::SortedSet).await, Self::redis(LogKind::List).await]
    }

    async fn redis(log: LogKind) -> Self {
        let redis = Redis::start().await;
        Self::Redis { store: fresh(&redis, log).into(), redis, log }
    }

    fn server(&self) -> &Redis {
        match self {
            Self::Memory { .. } => panic!("memory has no server"),
            Self::Redis { redis, .. } => redis,
        }
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
            Self::Redis { redis, store, log } => {
                store.replace(fresh(redis, *log));
                redis.dump().into_iter().for_each(|(key, entries)| age(redis, &key, entries, time, *log));
            }
        }
    }
}

fn age(redis: &Redis, key: &str, entries: Vec<(String, f64)>, by: Duration, log: LogKind) {
    let mut connection = redis.connection();
    let by = by.as_micros() as f64;
    match log {
        LogKind::SortedSet => {
            for (member, score) in entries {
                let _: () = connection.zadd(key, member, score - by).unwrap();
            }
        }
        LogKind::List => {
            for (index, (_, time)) in entries.iter().enumerate() {
                let _: () = connection.lset(key, index as isize, format!("{:.0}", time - by)).unwrap();
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
    for store in Store::each().await {
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
    for store in Store::each().await {
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
    for store in Store::each().await {
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
    for store in Store::each().await {
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
    for store in Store::each().await {
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
    for store in Store::each().await {
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
    for store in Store::each().await {
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
    for store in Store::each().await {
        let limits = [limit(1, HOUR)];
        for key in ["a", "b", "a.b", "a-b"] {
            assert!(store.is_admitted(key, &limits).await, "{key}");
        }
    }
}

#[tokio::test]
async fn what_is_in_redis_has_the_promised_form() {
    let store = Store::redis(LogKind::SortedSet).await;
    let redis = store.server();
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
    for log in [LogKind::SortedSet, LogKind::List] {
        let store = Store::redis(log).await;
        let redis = store.server();
        let one = limit(5, Duration::from_millis(1));
        store.decide("alice", &[one, counting_refusals(one)]).await;
        assert_eq!(redis.dump().len(), 2);
        let gone = async {
            while !redis.dump().is_empty() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        crate::harness::patiently("the expiry of idle keys", gone).await;
    }
}

#[tokio::test]
async fn an_admission_costs_one_round_trip() {
    let store = Store::redis(LogKind::SortedSet).await;
    let redis = store.server();
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
    let store = Store::redis(LogKind::SortedSet).await;
    let redis = store.server();
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

#[tokio::test]
async fn a_limit_that_is_not_enforced_counts_and_shows_and_refuses_nothing() {
    for store in Store::each().await {
        let shadow = Limit { enforce: false, ..limit(2, HOUR) };
        let limits = [limit(4, HOUR), shadow];
        let mut seen = Vec::new();
        for _ in 0..4 {
            let decision = store.decide("a", &limits).await;
            assert_eq!(decision.verdict, Verdict::Admit);
            seen.push((decision.statuses[1].remaining, decision.statuses[1].over));
        }
        assert_eq!(seen, [(1, false), (0, false), (0, true), (0, true)]);
        let refused = store.decide("a", &limits).await;
        assert!(matches!(refused.verdict, Verdict::Refuse { by: 0, .. }), "only the enforced limit refuses");
        assert!(!refused.statuses[1].over, "what was refused anyway is not the shadow's doing");
    }
}

#[tokio::test]
async fn a_limit_that_is_not_enforced_keeps_no_more_than_it_needs() {
    for log in [LogKind::SortedSet, LogKind::List] {
        let store = Store::redis(log).await;
        let limits = [Limit { enforce: false, ..limit(3, HOUR) }];
        for _ in 0..20 {
            assert!(store.is_admitted("a", &limits).await);
        }
        assert_eq!(store.server().dump()[0].1.len(), 4);
    }
}

#[tokio::test]
async fn requests_of_a_hot_key_go_together_and_get_exactly_the_limit() {
    for log in [LogKind::SortedSet, LogKind::List] {
        let store = Store::redis(log).await;
        let limits = [limit(100, HOUR)];
        let decisions = futures_of(&store, &limits, 500).await;
        let mut remaining: Vec<_> = decisions
            .iter()
            .filter(|decision| decision.verdict == Verdict::Admit)
            .map(|decision| decision.statuses[0].remaining)
            .collect();
        assert!(remaining.is_sorted_by(|a, b| a > b), "first come, first served");
        remaining.reverse();
        assert_eq!(remaining, (0..100).collect::<Vec<_>>());
        assert!(store.server().calls("evalsha") < 50, "they went together");
        assert_eq!(store.server().dump()[0].1.len(), 100);
    }
}

async fn futures_of(store: &Store, limits: &[Limit], requests: usize) -> Vec<Decision> {
    let Store::Redis { store, .. } = store else { panic!("memory has no queue") };
    let store = store.borrow().clone();
    let asked: Vec<_> = (0..requests)
        .map(|_| {
            let (store, limits) = (store.clone(), limits.to_vec());
            tokio::spawn(async move { store.decide(&id("hot"), &limits).await.unwrap() })
        })
        .collect();
    let mut decisions = Vec::new();
    for decision in asked {
        decisions.push(decision.await.unwrap());
    }
    decisions
}
