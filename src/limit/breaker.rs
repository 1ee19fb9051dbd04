//! The breaker before a shared store: after a run of failures nobody waits for the store until it decides again.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

/// So many failures in a row open it.
const FAILURES: u32 = 5;

/// Shared by the workers, so that one finding helps all and a change of state is told once.
#[derive(Debug, Default)]
pub struct Breaker {
    failures: AtomicU32,
    open: AtomicBool,
    epoch: AtomicU64,
}

/// What a failure did to the breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It opened now: the caller has to see to it that it closes again.
    Opened,
    /// Nothing.
    None,
}

impl Breaker {
    /// Whether the store is not to be asked.
    pub fn is_open(&self) -> bool {
        self.open.load(Relaxed)
    }

    /// The store answered.
    pub fn succeeded(&self) {
        // Read first: a store by every request would make the workers fight for the cache line.
        if self.failures.load(Relaxed) != 0 {
            self.failures.store(0, Relaxed);
        }
    }

    /// The store failed.
    pub fn failed(&self) -> Change {
        let failures = self.failures.fetch_add(1, Relaxed) + 1;
        if failures >= FAILURES && !self.open.swap(true, Relaxed) { Change::Opened } else { Change::None }
    }

    /// The store decides again.
    pub fn close(&self) {
        self.failures.store(0, Relaxed);
        self.open.store(false, Relaxed);
    }

    /// Connections of an older epoch saw the store fail and are not used again.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Relaxed)
    }

    /// Begins an epoch.
    pub fn renew_epoch(&self) {
        self.epoch.fetch_add(1, Relaxed);
    }
}

/// The breakers of a store, one for each server that decides, so that a server's fall concerns its own keys only.
#[derive(Debug, Default)]
pub struct Breakers(Mutex<HashMap<Arc<str>, Arc<Breaker>>>);

impl Breakers {
    /// The breaker before the server of this name.
    pub fn before(&self, server: &Arc<str>) -> Arc<Breaker> {
        let mut breakers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        breakers.entry(server.clone()).or_default().clone()
    }

    /// Whether some server is not to be asked.
    pub fn any_is_open(&self) -> bool {
        let breakers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        breakers.values().any(|breaker| breaker.is_open())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_of_failures_opens_it_once() {
        let breaker = Breaker::default();
        let changes: Vec<_> = (0..8).map(|_| breaker.failed()).collect();
        assert_eq!(changes.iter().filter(|change| **change == Change::Opened).count(), 1);
        assert_eq!(changes[4], Change::Opened);
        breaker.close();
        assert!(!breaker.is_open());
    }

    #[test]
    fn a_success_ends_the_run() {
        let breaker = Breaker::default();
        for _ in 0..3 {
            (0..4).for_each(|_| assert_eq!(breaker.failed(), Change::None));
            breaker.succeeded();
        }
        assert!(!breaker.is_open());
    }
}
