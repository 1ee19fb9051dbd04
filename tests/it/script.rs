//! The scripts in a real Redis, with its clock in our hands, give the very answers of the arithmetic in Rust.

use std::{cell::RefCell, num::NonZeroU32, time::Duration};

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use redis::{Commands, Connection};
use tollgate::limit::{
    Decision, Limit, LogKind, Verdict, Window,
    redis::script::{arguments, decisions, source},
    window::Logs,
};

use crate::harness::Redis;

pub(crate) const KINDS: [LogKind; 2] = [LogKind::SortedSet, LogKind::List];

/// Real clocks have sixteen digits, which is where careless Lua loses the last two.
pub(crate) const NOW: u64 = 1_796_050_811_123_457;

const HOUR: u64 = 3_600_000_000;

pub(crate) fn limit(requests: u32, window_micros: u64) -> Limit {
    let window = Window::new(Duration::from_micros(window_micros)).unwrap();
    Limit::new(NonZeroU32::new(requests).unwrap(), window)
}

fn counting_refusals(limit: Limit) -> Limit {
    Limit { count_refused: true, ..limit }
}

pub(crate) struct Script {
    connection: Connection,
    script: redis::Script,
    requests: u32,
}

impl Script {
    pub(crate) fn new(redis: &Redis, kind: LogKind) -> Self {
        let clock = "call('TIME')";
        assert_eq!(source(kind).matches(clock).count(), 1, "the script reads the clock once");
        let script = redis::Script::new(&source(kind).replace(clock, "call('MGET', 'seconds', 'micros')"));
        Self { connection: redis.connection(), script, requests: 0 }
    }

    pub(crate) fn decide(&mut self, limits: &[Limit], now: u64) -> Decision {
        self.decide_together(limits, now, 1).remove(0)
    }

    fn decide_together(&mut self, limits: &[Limit], now: u64, requests: usize) -> Vec<Decision> {
        let members: Vec<_> = (0..requests)
            .map(|_| {
                self.requests += 1;
                format!("{now}:{:08x}", self.requests)
            })
            .collect();
        self.decide_as(&members, false, limits, now)
    }

    fn decide_as(&mut self, members: &[String], repeated: bool, limits: &[Limit], now: u64) -> Vec<Decision> {
        let clock = [("seconds", now / 1_000_000), ("micros", now % 1_000_000)];
        let _: () = self.connection.mset(&clock).unwrap();
        let mut call = self.script.key("admitted");
        call.key("attempted").arg(u8::from(repeated));
        for number in arguments(limits) {
            call.arg(number);
        }
        for member in members {
            call.arg(member);
        }
        let reply: Vec<i64> = call.invoke(&mut self.connection).unwrap();
        decisions(&reply, limits, members.len()).unwrap()
    }

    pub(crate) fn forget(&mut self) {
        let _: () = redis::cmd("FLUSHALL").query(&mut self.connection).unwrap();
    }

    fn entries(&mut self, log: &str) -> usize {
        self.connection.zcard(log).unwrap()
    }
}

fn some_limits() -> impl Strategy<Value = Vec<Limit>> {
    let one = (1..6_u32, 1_000..9_000_u64, any::<bool>(), any::<bool>());
    let one = one.prop_map(|(requests, window, count_refused, enforce)| Limit {
        count_refused,
        enforce,
        ..limit(requests, window)
    });
    prop::collection::vec(one, 1..4)
}

fn run<S: Strategy>(strategy: &S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let config = Config { failure_persistence: None, cases: 60, ..Config::default() };
    TestRunner::new(config).run(strategy, test).unwrap();
}

#[tokio::test]
async fn the_script_answers_as_the_arithmetic_does() {
    let redis = Redis::start().await;
    for kind in KINDS {
        let script = RefCell::new(Script::new(&redis, kind));
        let schedule = (some_limits(), some_limits(), prop::collection::vec(0..4_000_u64, 1..60));
        run(&schedule, |(before, after, gaps)| {
            let mut script = script.borrow_mut();
            script.forget();
            let (mut logs, mut now) = (Logs::default(), NOW);
            for (turn, gap) in gaps.iter().enumerate() {
                now += gap;
                // Half way through, the limits change.
                let limits = if turn < gaps.len() / 2 { &before } else { &after };
                prop_assert_eq!(
                    script.decide(limits, now),
                    logs.decide(limits, now),
                    "{:?} at turn {}",
                    kind,
                    turn
                );
            }
            Ok(())
        });
    }
}

#[tokio::test]
async fn requests_of_one_call_are_decided_as_if_they_came_one_by_one() {
    let redis = Redis::start().await;
    for kind in KINDS {
        let script = RefCell::new(Script::new(&redis, kind));
        let schedule = (some_limits(), prop::collection::vec((0..4_000_u64, 1..9_usize), 1..40));
        run(&schedule, |(limits, batches)| {
            // Such requests never go together.
            let limits: Vec<_> =
                limits.iter().map(|limit| Limit { count_refused: false, enforce: true, ..*limit }).collect();
            let mut script = script.borrow_mut();
            script.forget();
            let (mut logs, mut now) = (Logs::default(), NOW);
            for (gap, requests) in batches {
                now += gap;
                let one_by_one: Vec<_> = (0..requests).map(|_| logs.decide(&limits, now)).collect();
                prop_assert_eq!(script.decide_together(&limits, now, requests), one_by_one);
            }
            Ok(())
        });
    }
}

#[tokio::test]
async fn a_clock_that_jumps_admits_no_more_and_nobody_waits_longer_than_a_window() {
    let redis = Redis::start().await;
    let window = 10_000_000;
    for (kind, tolerated) in [(LogKind::SortedSet, 0), (LogKind::List, 1_000_000)] {
        let script = RefCell::new(Script::new(&redis, kind));
        let jumps = prop::collection::vec(-40_000_000_i64..6_000_000, 1..40);
        run(&(1..5_u32, jumps), |(requests, jumps)| {
            let mut script = script.borrow_mut();
            script.forget();
            let limits = [limit(requests, window)];
            let (mut clock, mut truly, mut admitted) = (NOW, NOW, Vec::new());
            for jump in jumps {
                // A forward step is time that passes, a backward one is a clock that was set back.
                clock = clock.saturating_add_signed(jump);
                truly += jump.max(0) as u64;
                match script.decide(&limits, clock).verdict {
                    Verdict::Admit => admitted.push(truly),
                    Verdict::Refuse { retry_after, .. } => {
                        prop_assert!(
                            retry_after <= Duration::from_micros(window + tolerated),
                            "{:?}",
                            retry_after
                        );
                    }
                }
                let inside = admitted.iter().filter(|at| **at + window > truly).count();
                prop_assert!(inside <= requests as usize);
            }
            Ok(())
        });
    }
}

#[tokio::test]
async fn a_repeated_request_counts_once_and_gets_the_same_verdict() {
    let redis = Redis::start().await;
    let mut script = Script::new(&redis, LogKind::SortedSet);
    let plain = limit(2, HOUR);
    for limits in [vec![plain], vec![plain, counting_refusals(plain)], vec![counting_refusals(plain)]] {
        script.forget();
        let mut decide = |member: &str, repeated: bool, now: u64| {
            script.decide_as(&[member.to_owned()], repeated, &limits, now).remove(0)
        };
        decide("first", false, NOW);
        let original = decide("second", false, NOW + 1);
        let repeated = decide("second", true, NOW + 1);
        assert_eq!(original, repeated);
        assert_eq!(original.verdict, Verdict::Admit);
        assert!(matches!(decide("third", false, NOW + 2).verdict, Verdict::Refuse { .. }));
        (0..5).for_each(|turn| drop(decide(&format!("more-{turn}"), false, NOW + 3)));
        let attempts = if limits.iter().any(|limit| limit.count_refused) { 3 } else { 0 };
        assert_eq!(script.entries("attempted"), attempts, "no more attempts are kept than the limit needs");
    }
    script.forget();
    let first_time = script.decide_as(&["lost".to_owned()], true, &[limit(1, HOUR)], NOW);
    assert_eq!(
        first_time[0].verdict,
        Verdict::Admit,
        "a repetition of what never arrived is the request itself"
    );
}

#[tokio::test]
async fn repeated_requests_of_one_call_count_once() {
    let redis = Redis::start().await;
    let mut script = Script::new(&redis, LogKind::SortedSet);
    let limits = [limit(5, HOUR)];
    script.decide_together(&limits, NOW, 2);
    let members: Vec<_> = (0..4).map(|n| format!("member-{n}")).collect();
    let original = script.decide_as(&members, false, &limits, NOW + 1);
    let repeated = script.decide_as(&members, true, &limits, NOW + 1);
    assert_eq!(original, repeated);
    assert_eq!(original.iter().filter(|decision| decision.verdict == Verdict::Admit).count(), 3);
    assert_eq!(script.entries("admitted"), 5);
}

#[tokio::test]
async fn a_log_goes_on_when_it_is_kept_otherwise() {
    let redis = Redis::start().await;
    let scripts = RefCell::new(KINDS.map(|kind| Script::new(&redis, kind)));
    let schedule = (some_limits(), prop::collection::vec((0..4_000_u64, 0..2_usize), 1..60));
    run(&schedule, |(limits, turns)| {
        let mut scripts = scripts.borrow_mut();
        scripts[0].forget();
        let (mut logs, mut now) = (Logs::default(), NOW);
        for (turn, (gap, kind)) in turns.into_iter().enumerate() {
            now += gap;
            prop_assert_eq!(scripts[kind].decide(&limits, now), logs.decide(&limits, now), "turn {}", turn);
            let script = &mut scripts[kind];
            for key in ["admitted", "attempted"] {
                let expires_in: i64 = script.connection.pttl(key).unwrap();
                prop_assert_ne!(expires_in, -1, "{} expires", key);
            }
        }
        Ok(())
    });
}
