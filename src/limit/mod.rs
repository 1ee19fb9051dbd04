//! The limiter: at most `requests` admissions in every window of a given length, over any number of replicas.
//!
//! A limit is a sliding-window log. Two stores keep the logs, this process' memory and Redis, under one contract: all
//! limits of a caller are checked and recorded in one atomic step, all or nothing, and the same step yields what the
//! answer's headers say. Nothing here knows HTTP.

pub mod breaker;
pub mod denied;
pub mod fault;
pub mod memory;
pub mod redis;
pub mod replicas;
pub mod window;

use std::{fmt, num::NonZeroU32, sync::Arc, time::Duration};

use self::{fault::FaultKind, memory::MemoryStore, redis::RedisStore, replicas::Replicas};
use crate::keys::KeyId;

/// One limit of a tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Admissions in any one window.
    pub requests: NonZeroU32,
    /// The length of the window.
    pub window: Window,
    /// Record refused attempts too: a caller that hammers stays out until it pauses.
    pub count_refused: bool,
    /// Refuse what is over it. A limit that is not enforced decides, counts and shows, and lets everything pass.
    pub enforce: bool,
}

impl Limit {
    /// An ordinary limit.
    pub fn new(requests: NonZeroU32, window: Window) -> Self {
        Self { requests, window, count_refused: false, enforce: true }
    }

    /// What a probe of the store asks for.
    fn probe() -> Self {
        Self::new(NonZeroU32::MIN, Window(Duration::from_millis(1)))
    }

    /// This process' part of the limit, where `replicas` processes each count alone. Rounded up, so that a small limit
    /// stays usable.
    fn share(self, replicas: NonZeroU32) -> Self {
        let share = self.requests.get().div_ceil(replicas.get());
        Self { requests: NonZeroU32::new(share).unwrap_or(NonZeroU32::MIN), ..self }
    }
}

/// How a log is kept in Redis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogKind {
    /// A sorted set. A request whose answer was lost can be repeated and counts once.
    SortedSet,
    /// A list of times, which costs a tenth of the memory. A request whose answer was lost can't be repeated.
    List,
}

impl LogKind {
    /// Past this number of entries the memory of a sorted set is worth more than its repetitions.
    const MOST_IN_A_SORTED_SET: u32 = 1000;

    /// What fits limits of this size.
    pub fn fit_for(limits: &[Limit]) -> Self {
        let most = limits.iter().map(|limit| limit.requests.get()).max().unwrap_or(0);
        if most > Self::MOST_IN_A_SORTED_SET { Self::List } else { Self::SortedSet }
    }
}

/// The length of a sliding window: from one millisecond to 366 days.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Window(Duration);

/// The duration can't be a window.
#[derive(Debug, thiserror::Error)]
#[error("a window is at least 1ms and at most 366d long")]
pub struct InvalidWindow;

impl Window {
    /// The duration, checked.
    pub fn new(length: Duration) -> Result<Self, InvalidWindow> {
        let allowed = Duration::from_millis(1)..=Duration::from_secs(366 * 86_400);
        if allowed.contains(&length) { Ok(Self(length)) } else { Err(InvalidWindow) }
    }

    /// The length.
    pub fn length(self) -> Duration {
        self.0
    }

    /// The length in microseconds, the unit of both stores.
    pub fn micros(self) -> u64 {
        self.0.as_micros() as u64
    }
}

/// Written in the largest unit that is exact, as configuration spells it: `250ms`, `30s`, `1m`, `1d`.
impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = self.0.as_millis();
        let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
        let (size, unit) =
            units.into_iter().find(|(size, _)| millis.is_multiple_of(*size)).unwrap_or((1, "ms"));
        write!(f, "{}{unit}", millis / size)
    }
}

/// What one limit says after a decision: the data of the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The limit's own number.
    pub limit: u32,
    /// Admissions left in the window that ends now.
    pub remaining: u32,
    /// Time until more is left than now. Zero where nothing is used.
    pub reset_after: Duration,
    /// The request was admitted only because this limit is not enforced.
    pub over: bool,
}

impl Status {
    /// Whether four fifths or more are used.
    pub fn is_nearly_used_up(&self) -> bool {
        let used = u64::from(self.limit - self.remaining.min(self.limit));
        used * 5 >= u64::from(self.limit) * 4
    }
}

/// The answer of a store: one status for each limit, in the order of the limits, and the verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// One for each limit, in order.
    pub statuses: Vec<Status>,
    /// Whether the request may pass.
    pub verdict: Verdict,
}

/// Whether a request may pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may, and it has been recorded.
    Admit,
    /// It may not, and it has cost nothing (but for limits that count refusals).
    Refuse {
        /// The limit that keeps the caller out longest, as an index.
        by: usize,
        /// When an attempt would be admitted, if nobody else takes the room.
        retry_after: Duration,
    },
}

/// Decides on requests: asks the store, and knows what to do when it does not answer. Each worker has one.
#[derive(Clone, Debug)]
pub enum Limiter {
    /// This process counts.
    Memory(Arc<MemoryStore>),
    /// Redis counts for all replicas.
    Redis(RedisStore, Fallback),
}

/// What to do with a request on which the store did not decide.
#[derive(Clone, Debug)]
pub enum Fallback {
    /// Let it pass uncounted.
    Allow,
    /// Turn it away, as unavailable and not as over the limit.
    Deny,
    /// Count here, against this process' share of each limit.
    Local(Arc<MemoryStore>, Replicas),
}

/// The limiter's word on one request.
#[derive(Clone, Debug)]
pub struct Ruling {
    /// What is to happen.
    pub outcome: Outcome,
    /// Why the store did not decide, where it did not.
    pub fault: Option<FaultKind>,
}

/// What is to happen with a request.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// A store decided.
    Decided(Decision),
    /// It passes without being counted: no limit, or no store and `allow`.
    Uncounted,
    /// It is turned away because no store decided.
    Unavailable,
}

impl Limiter {
    /// Rules on one request of `key`. If it may pass, it has been counted in every limit.
    pub async fn rule(&self, key: &KeyId, limits: &[Limit]) -> Ruling {
        if limits.is_empty() {
            return Ruling { outcome: Outcome::Uncounted, fault: None };
        }
        match self {
            Self::Memory(store) => {
                Ruling { outcome: Outcome::Decided(store.decide(key, limits, store.now())), fault: None }
            }
            Self::Redis(store, fallback) => match store.decide(key, limits).await {
                Ok(decision) => Ruling { outcome: Outcome::Decided(decision), fault: None },
                Err(fault) => Ruling { outcome: fallback.rule(key, limits), fault: Some(fault.kind()) },
            },
        }
    }
}

impl Ruling {
    /// Why the store did not decide and the policy that did in its place, where that is so.
    pub fn fallback(&self) -> Option<(FaultKind, &'static str)> {
        let policy = match self.outcome {
            Outcome::Uncounted => "allow",
            Outcome::Unavailable => "deny",
            Outcome::Decided(_) => "local",
        };
        self.fault.map(|fault| (fault, policy))
    }
}

impl Fallback {
    /// The labels of all policies.
    pub const LABELS: [&'static str; 3] = ["allow", "deny", "local"];

    fn rule(&self, key: &KeyId, limits: &[Limit]) -> Outcome {
        match self {
            Self::Allow => Outcome::Uncounted,
            Self::Deny => Outcome::Unavailable,
            Self::Local(store, replicas) => {
                let replicas = replicas.count();
                let shares: Vec<Limit> = limits.iter().map(|limit| limit.share(replicas)).collect();
                Outcome::Decided(store.decide(key, &shares, store.now()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_written_in_its_largest_exact_unit() {
        for (millis, text) in [
            (250, "250ms"),
            (1000, "1s"),
            (90_000, "90s"),
            (60_000, "1m"),
            (86_400_000, "1d"),
            (3_600_000, "1h"),
        ] {
            assert_eq!(Window::new(Duration::from_millis(millis)).unwrap().to_string(), text);
        }
        assert!(Window::new(Duration::from_micros(999)).is_err());
        assert!(Window::new(Duration::from_secs(367 * 86_400)).is_err());
    }

    #[test]
    fn a_share_is_rounded_up_and_never_nothing() {
        let limit = |requests| Limit { requests: NonZeroU32::new(requests).unwrap(), ..Limit::probe() };
        let share =
            |requests, replicas| limit(requests).share(NonZeroU32::new(replicas).unwrap()).requests.get();
        assert_eq!((share(100, 3), share(1, 3), share(9, 3)), (34, 1, 3));
    }
}
