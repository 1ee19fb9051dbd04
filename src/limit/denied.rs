//! Refusals that need not be asked for again.
//!
//! A log that records only admissions can't make room earlier than it said: whoever asks, wherever, until then the
//! answer is the same. So a refusal is remembered until its own retry time, counted from the moment the question was
//! sent, which is never later than the store's decision. What it tells of the wait is counted from the moment the answer
//! came, which is never earlier: who waits so long is not early. This is exact, and a flood of refusals costs the store
//! nothing.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::time::Instant;

use super::{Decision, Limit, Status, Verdict};
use crate::keys::KeyId;

/// More callers than this are not remembered at a time.
const CALLERS: usize = 100_000;

/// The refusals that one worker remembers.
#[derive(Debug, Default)]
pub struct Denied(Mutex<HashMap<KeyId, Refusal>>);

#[derive(Debug)]
struct Refusal {
    /// Under other limits the answer could be another one.
    limits: Vec<Limit>,
    answered: Instant,
    until: Instant,
    decision: Decision,
}

impl Denied {
    /// The refusal that a store would give `key` now, if it is known.
    pub fn recall(&self, key: &KeyId, limits: &[Limit], now: Instant) -> Option<Decision> {
        let mut refusals = self.refusals();
        let refusal = refusals.get(key)?;
        if refusal.until <= now || refusal.limits != limits {
            refusals.remove(key);
            return None;
        }
        Some(refusal.at(now))
    }

    /// Remembers what the store decided at some moment of `asking`, from when it was asked to when the answer came.
    pub fn remember(&self, key: &KeyId, limits: &[Limit], asking: Range<Instant>, decision: &Decision) {
        let Verdict::Refuse { retry_after, .. } = decision.verdict else { return };
        // Where attempts count, every one has to reach the store.
        if limits.iter().any(|limit| limit.count_refused) {
            return;
        }
        let Range { start: asked, end: answered } = asking;
        let until = asked + retry_after;
        let mut refusals = self.refusals();
        if refusals.len() >= CALLERS {
            refusals.retain(|_, refusal| refusal.until > asked);
        }
        if refusals.len() < CALLERS {
            let refusal = Refusal { limits: limits.to_vec(), answered, until, decision: decision.clone() };
            refusals.insert(key.clone(), refusal);
        }
    }

    fn refusals(&self) -> MutexGuard<'_, HashMap<KeyId, Refusal>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Refusal {
    fn at(&self, now: Instant) -> Decision {
        let passed = now.saturating_duration_since(self.answered);
        let later =
            |status: &Status| Status { reset_after: status.reset_after.saturating_sub(passed), ..*status };
        let verdict = match self.decision.verdict {
            Verdict::Refuse { by, retry_after } => {
                Verdict::Refuse { by, retry_after: retry_after.saturating_sub(passed) }
            }
            Verdict::Admit => Verdict::Admit,
        };
        Decision { statuses: self.decision.statuses.iter().map(later).collect(), verdict }
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, time::Duration};

    use super::*;
    use crate::limit::Window;

    fn limits(requests: u32, count_refused: bool) -> [Limit; 1] {
        let requests = NonZeroU32::new(requests).unwrap();
        [Limit { count_refused, ..Limit::new(requests, Window::new(Duration::from_secs(60)).unwrap()) }]
    }

    fn refusal(retry_after: Duration) -> Decision {
        let status = Status { limit: 5, remaining: 0, reset_after: retry_after, over: false };
        Decision { statuses: vec![status], verdict: Verdict::Refuse { by: 0, retry_after } }
    }

    #[test]
    fn a_refusal_is_recalled_until_its_time_and_its_wait_shrinks() {
        let (denied, key, asked) = (Denied::default(), "a".parse().unwrap(), Instant::now());
        denied.remember(&key, &limits(5, false), asked..asked, &refusal(Duration::from_secs(10)));
        let later = denied.recall(&key, &limits(5, false), asked + Duration::from_secs(4)).unwrap();
        assert_eq!(later, refusal(Duration::from_secs(6)));
        assert!(denied.recall(&key, &limits(5, false), asked + Duration::from_secs(10)).is_none());
        assert!(denied.refusals().is_empty());
    }

    #[test]
    fn the_wait_is_told_from_the_answer_and_kept_from_the_question() {
        let (denied, key, asked) = (Denied::default(), "a".parse().unwrap(), Instant::now());
        let answered = asked + Duration::from_secs(3);
        denied.remember(&key, &limits(5, false), asked..answered, &refusal(Duration::from_secs(10)));
        let last = denied.recall(&key, &limits(5, false), asked + Duration::from_secs(9)).unwrap();
        assert_eq!(last, refusal(Duration::from_secs(4)), "it may have been decided just before the answer");
        let over = denied.recall(&key, &limits(5, false), asked + Duration::from_secs(10));
        assert_eq!(over, None, "it may have been decided just after the question");
    }

    #[test]
    fn other_limits_and_other_callers_have_to_ask() {
        let (denied, key, asked) = (Denied::default(), "a".parse().unwrap(), Instant::now());
        denied.remember(&key, &limits(5, false), asked..asked, &refusal(Duration::from_secs(10)));
        assert!(denied.recall(&"b".parse().unwrap(), &limits(5, false), asked).is_none());
        assert!(denied.recall(&key, &limits(6, false), asked).is_none());
    }

    #[test]
    fn admissions_and_counted_refusals_are_not_remembered() {
        let (denied, key, asked) = (Denied::default(), "a".parse().unwrap(), Instant::now());
        let admission = Decision { statuses: vec![], verdict: Verdict::Admit };
        denied.remember(&key, &limits(5, false), asked..asked, &admission);
        denied.remember(&key, &limits(5, true), asked..asked, &refusal(Duration::from_secs(10)));
        assert!(denied.refusals().is_empty());
    }

    #[test]
    fn the_memory_is_bounded() {
        let (denied, asked) = (Denied::default(), Instant::now());
        let remember = |n: usize, wait| {
            denied.remember(
                &format!("k{n}").parse().unwrap(),
                &limits(5, false),
                asked..asked,
                &refusal(wait),
            );
        };
        (0..CALLERS + 10).for_each(|n| remember(n, Duration::from_secs(10)));
        assert_eq!(denied.refusals().len(), CALLERS);
        let later = asked + Duration::from_secs(11);
        denied.remember(
            &"late".parse().unwrap(),
            &limits(5, false),
            later..later,
            &refusal(Duration::from_secs(1)),
        );
        assert_eq!(denied.refusals().len(), 1, "what is over makes room");
    }
}
