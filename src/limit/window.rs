//! The arithmetic of the sliding window. Pure: the clock is an argument.
//!
//! A window is half-open, `(now - W, now]`: an admission at `t` counts until just before `t + W`. All plain limits of a
//! caller record the same admissions, so one log serves them all: each limit looks at the part that its window covers.
//! The attempts that `count_refused` limits look at are a second log.

use std::{collections::VecDeque, time::Duration};

use super::{Decision, Limit, Status, Verdict};

/// A point in time in microseconds on the store's own monotonic clock.
pub type Micros = u64;

/// Times of recorded requests, oldest first, never decreasing.
#[derive(Clone, Debug, Default)]
pub struct Log(VecDeque<Micros>);

impl Log {
    /// Forgets what no window of this length ending at `now` or later can hold.
    fn prune(&mut self, now: Micros, window: u64) {
        let stale = self.0.partition_point(|at| at.saturating_add(window) <= now);
        self.0.drain(..stale);
    }

    /// Forgets all but the newest `keep`.
    fn truncate(&mut self, keep: usize) {
        self.0.drain(..self.0.len().saturating_sub(keep));
    }

    fn first_inside(&self, limit: &Limit, now: Micros) -> usize {
        self.0.partition_point(|at| at.saturating_add(limit.window.micros()) <= now)
    }

    fn used(&self, limit: &Limit, now: Micros) -> usize {
        self.0.len() - self.first_inside(limit, now)
    }

    /// How long until one more has room; zero where it has room now.
    ///
    /// What must leave is the entry at rank `n - L`: not always the oldest, for a limit can have been lowered.
    fn wait(&self, limit: &Limit, now: Micros) -> Duration {
        if self.used(limit, now) < limit.allowed() {
            return Duration::ZERO;
        }
        self.until_gone(self.0.len() - limit.allowed(), limit, now)
    }

    fn until_gone(&self, rank: usize, limit: &Limit, now: Micros) -> Duration {
        let left = self.0.get(rank).map(|at| at.saturating_add(limit.window.micros()).saturating_sub(now));
        left.map_or(Duration::ZERO, Duration::from_micros)
    }

    fn status(&self, limit: &Limit, now: Micros, admitted: bool) -> Status {
        let used = self.used(limit, now);
        let remaining = limit.allowed().saturating_sub(used);
        let oldest_leaves = self.until_gone(self.first_inside(limit, now), limit, now);
        let wait = if admitted { Duration::ZERO } else { self.wait(limit, now) };
        Status {
            limit: limit.requests.get(),
            remaining: remaining as u32,
            reset_after: wait.max(oldest_leaves),
            over: admitted && !limit.enforce && used > limit.allowed(),
        }
    }
}

/// What is remembered of one caller.
#[derive(Clone, Debug, Default)]
pub struct Logs {
    admitted: Log,
    attempted: Log,
}

impl Logs {
    /// Decides on one request at `now` and records it: an admission if every limit has room, and the attempt itself
    /// where a limit counts those.
    pub fn decide(&mut self, limits: &[Limit], now: Micros) -> Decision {
        let latest = [&self.admitted, &self.attempted].into_iter().filter_map(|log| log.0.back()).max();
        let now = latest.map_or(now, |newest| now.max(*newest));
        self.admitted.prune(now, longest_window(limits, false));
        self.attempted.prune(now, longest_window(limits, true));
        let has_room = |limit: &Limit| self.log_of(limit).used(limit, now) < limit.allowed();
        let admitted = limits.iter().filter(|limit| limit.enforce).all(has_room);
        self.record(limits, now, admitted);
        let statuses = limits.iter().map(|limit| self.log_of(limit).status(limit, now, admitted)).collect();
        let verdict = if admitted { Verdict::Admit } else { self.refusal(limits, now) };
        Decision { statuses, verdict }
    }

    /// Whether everything recorded is older than `age`.
    pub fn is_idle(&self, now: Micros, age: u64) -> bool {
        let idle = |log: &Log| log.0.back().is_none_or(|newest| newest.saturating_add(age) <= now);
        idle(&self.admitted) && idle(&self.attempted)
    }

    fn log_of(&self, limit: &Limit) -> &Log {
        if limit.count_refused { &self.attempted } else { &self.admitted }
    }

    fn record(&mut self, limits: &[Limit], now: Micros, admitted: bool) {
        if admitted && limits.iter().any(|limit| !limit.count_refused) {
            self.admitted.0.push_back(now);
            if let most @ 1.. = most_admissions(limits) {
                self.admitted.truncate(most as usize);
            }
        }
        if let most @ 1.. = most_attempts(limits) {
            self.attempted.0.push_back(now);
            self.attempted.truncate(most as usize);
        }
    }

    /// The longest wait decides. It is judged after recording, for a refused attempt may itself be what fills a limit
    /// that counts it.
    fn refusal(&self, limits: &[Limit], now: Micros) -> Verdict {
        let waits = limits.iter().map(|limit| self.log_of(limit).wait(limit, now)).enumerate();
        let waits = waits.filter(|(by, _)| limits[*by].enforce);
        let (by, retry_after) = waits.max_by_key(|(_, wait)| *wait).unwrap_or_default();
        Verdict::Refuse { by, retry_after }
    }
}

/// The longest window in microseconds among the limits that count refusals, or among those that do not; 0: there are none.
pub fn longest_window(limits: &[Limit], count_refused: bool) -> u64 {
    let windows =
        limits.iter().filter(|limit| limit.count_refused == count_refused).map(|limit| limit.window.micros());
    windows.max().unwrap_or(0)
}

/// So many of the newest attempts are kept: older ones can't change any answer. One more than the largest number that a
/// counting limit allows tells a limit that is full from one that is exceeded. 0: there is no such limit.
pub fn most_attempts(limits: &[Limit]) -> u32 {
    most_needed(limits.iter().filter(|limit| limit.count_refused))
}

/// So many of the newest admissions are kept where a limit that is not enforced leaves their number open, likewise.
/// 0: all that a window holds.
pub fn most_admissions(limits: &[Limit]) -> u32 {
    let plain = || limits.iter().filter(|limit| !limit.count_refused);
    if plain().all(|limit| limit.enforce) { 0 } else { most_needed(plain()) }
}

fn most_needed<'a>(limits: impl Iterator<Item = &'a Limit>) -> u32 {
    limits.map(|limit| limit.requests.get().saturating_add(1)).max().unwrap_or(0)
}

impl Limit {
    fn allowed(&self) -> usize {
        self.requests.get() as usize
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use proptest::prelude::*;

    use super::*;
    use crate::limit::Window;

    fn limit(requests: u32, window_micros: u64, count_refused: bool) -> Limit {
        let window = Window::new(Duration::from_micros(window_micros)).unwrap();
        Limit { count_refused, ..Limit::new(NonZeroU32::new(requests).unwrap(), window) }
    }

    /// What the limiter promises, in the plainest words: it keeps everything for ever and counts from scratch.
    #[derive(Default)]
    struct Oracle {
        admitted: Vec<Micros>,
        attempted: Vec<Micros>,
    }

    impl Oracle {
        fn would_admit(&self, limits: &[Limit], now: Micros) -> bool {
            limits.iter().all(|limit| {
                let log = if limit.count_refused { &self.attempted } else { &self.admitted };
                let inside = log.iter().filter(|at| **at + limit.window.micros() > now).count();
                inside < limit.requests.get() as usize
            })
        }

        fn decide(&mut self, limits: &[Limit], now: Micros) -> bool {
            let admitted = self.would_admit(limits, now);
            self.attempted.push(now);
            if admitted {
                self.admitted.push(now);
            }
            admitted
        }
    }

    fn limits() -> impl Strategy<Value = Vec<Limit>> {
        let one = (1..6_u32, 1_000..9_000_u64, any::<bool>())
            .prop_map(|(n, window, count)| limit(n, window, count));
        prop::collection::vec(one, 1..4)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

        #[test]
        fn every_verdict_is_the_oracles(limits in limits(), gaps in prop::collection::vec(0..4_000_u64, 1..120)) {
            let (mut logs, mut oracle, mut now) = (Logs::default(), Oracle::default(), 1_000_000);
            for gap in gaps {
                now += gap;
                let decision = logs.decide(&limits, now);
                prop_assert_eq!(decision.verdict == Verdict::Admit, oracle.decide(&limits, now));
            }
        }

        #[test]
        fn a_refused_caller_that_waits_is_admitted_at_that_moment_and_not_before(
            limits in limits(), gaps in prop::collection::vec(0..2_000_u64, 1..60),
        ) {
            let (mut logs, mut oracle, mut now) = (Logs::default(), Oracle::default(), 1_000_000);
            for gap in gaps {
                now += gap;
                let decision = logs.decide(&limits, now);
                oracle.decide(&limits, now);
                let Verdict::Refuse { retry_after, .. } = decision.verdict else { continue };
                let wait = retry_after.as_micros() as u64;
                prop_assert!(wait >= 1);
                prop_assert!(!oracle.would_admit(&limits, now + wait - 1));
                prop_assert!(oracle.would_admit(&limits, now + wait));
            }
        }

        #[test]
        fn a_lowered_limit_holds_at_once_and_its_wait_is_true(
            before in 2..12_u32, after in 1..12_u32, gaps in prop::collection::vec(0..300_u64, 12),
        ) {
            let (high, low) = ([limit(before, 5_000, false)], [limit(after, 5_000, false)]);
            let (mut logs, mut oracle, mut now) = (Logs::default(), Oracle::default(), 1_000_000);
            for gap in gaps {
                now += gap;
                logs.decide(&high, now);
                oracle.decide(&high, now);
            }
            let Verdict::Refuse { retry_after, .. } = logs.decide(&low, now).verdict else { return Ok(()) };
            let wait = retry_after.as_micros() as u64;
            prop_assert!(!oracle.would_admit(&low, now + wait - 1));
            prop_assert!(oracle.would_admit(&low, now + wait));
        }

        #[test]
        fn no_more_is_kept_than_the_largest_limit(limits in limits(), gaps in prop::collection::vec(0..50_u64, 200)) {
            let (mut logs, mut now) = (Logs::default(), 1_000_000);
            let most = limits.iter().map(|limit| limit.requests.get() as usize + 1).max().unwrap();
            for gap in gaps {
                now += gap;
                logs.decide(&limits, now);
                prop_assert!(logs.admitted.0.len() <= most && logs.attempted.0.len() <= most);
            }
        }
    }

    #[test]
    fn the_window_is_half_open() {
        let limits = [limit(1, 1_000_000, false)];
        let mut logs = Logs::default();
        assert_eq!(logs.decide(&limits, 5_000_000).verdict, Verdict::Admit);
        let almost = logs.decide(&limits, 5_999_999).verdict;
        assert_eq!(almost, Verdict::Refuse { by: 0, retry_after: Duration::from_micros(1) });
        assert_eq!(logs.decide(&limits, 6_000_000).verdict, Verdict::Admit);
    }

    #[test]
    fn a_refusal_by_one_limit_costs_the_others_nothing() {
        let limits = [limit(1, 1_000_000, false), limit(10, 60_000_000, false)];
        let mut logs = Logs::default();
        assert_eq!(logs.decide(&limits, 0).statuses[1].remaining, 9);
        let refused = logs.decide(&limits, 10);
        assert!(matches!(refused.verdict, Verdict::Refuse { by: 0, .. }));
        assert_eq!(refused.statuses[1].remaining, 9);
        assert_eq!(refused.statuses[0].remaining, 0);
    }

    #[test]
    fn hammering_keeps_a_caller_out_where_refusals_count() {
        let limits = [limit(2, 1_000_000, true)];
        let mut logs = Logs::default();
        for at in [0, 1] {
            assert_eq!(logs.decide(&limits, at).verdict, Verdict::Admit);
        }
        for at in 1..20 {
            assert!(matches!(logs.decide(&limits, at * 400_000).verdict, Verdict::Refuse { .. }));
        }
        assert_eq!(logs.decide(&limits, 19 * 400_000 + 1_000_000).verdict, Verdict::Admit);
    }

    #[test]
    fn remaining_counts_down_and_reset_is_when_the_oldest_leaves() {
        let limits = [limit(3, 1_000_000, false)];
        let mut logs = Logs::default();
        let seen: Vec<_> = [0, 100_000, 200_000].map(|at| logs.decide(&limits, at).statuses[0]).into();
        assert_eq!(seen.iter().map(|s| s.remaining).collect::<Vec<_>>(), [2, 1, 0]);
        let resets: Vec<_> = seen.iter().map(|s| s.reset_after.as_micros()).collect();
        assert_eq!(resets, [1_000_000, 900_000, 800_000]);
    }

    #[test]
    fn a_clock_that_steps_back_admits_no_more() {
        let limits = [limit(2, 1_000_000, false)];
        let mut logs = Logs::default();
        logs.decide(&limits, 9_000_000);
        logs.decide(&limits, 9_000_000);
        assert!(matches!(logs.decide(&limits, 1).verdict, Verdict::Refuse { .. }));
    }
}
