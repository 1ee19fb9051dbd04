//! The store in this process: exact for one replica, and the fallback where Redis does not answer.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use super::{
    Decision, Limit,
    window::{Logs, Micros},
};
use crate::keys::KeyId;

/// Callers of different shards never wait for each other.
const SHARDS: usize = 64;

/// After so many decisions a shard drops the logs that hold nothing any more.
const DECISIONS_BETWEEN_SWEEPS: u32 = 4096;

/// Sliding-window logs by key id. Only configured ids get here, so the number of entries is bounded by the configuration.
#[derive(Debug)]
pub struct MemoryStore {
    started: Instant,
    hasher: RandomState,
    shards: Box<[Mutex<Shard>]>,
}

#[derive(Debug, Default)]
struct Shard {
    callers: HashMap<KeyId, Caller>,
    decisions: u32,
}

#[derive(Debug, Default)]
struct Caller {
    logs: Logs,
    /// The longest window in microseconds that was in force at the last decision.
    longest_window: u64,
}

impl MemoryStore {
    /// An empty store.
    pub fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { started: Instant::now(), hasher: RandomState::new(), shards }
    }

    /// The time on the clock that [`MemoryStore::decide`] expects. Monotonic, so a step of the wall clock changes no limit.
    pub fn now(&self) -> Micros {
        self.started.elapsed().as_micros() as Micros
    }

    /// Decides on one request of `key` and records it.
    pub fn decide(&self, key: &KeyId, limits: &[Limit], now: Micros) -> Decision {
        let mut shard = self.shard(key);
        shard.sweep_now_and_then(now);
        if let Some(caller) = shard.callers.get_mut(key) {
            return caller.decide(limits, now);
        }
        shard.callers.entry(key.clone()).or_default().decide(limits, now)
    }

    fn shard(&self, key: &KeyId) -> MutexGuard<'_, Shard> {
        let index = self.hasher.hash_one(key) as usize % SHARDS;
        // A panic between two steps of a decision can lose at most that decision, so the log stays usable.
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

impl Shard {
    fn sweep_now_and_then(&mut self, now: Micros) {
        self.decisions += 1;
        if self.decisions >= DECISIONS_BETWEEN_SWEEPS {
            self.decisions = 0;
            self.callers.retain(|_, caller| !caller.logs.is_idle(now, caller.longest_window));
        }
    }
}

impl Caller {
    fn decide(&mut self, limits: &[Limit], now: Micros) -> Decision {
        self.longest_window = limits.iter().map(|limit| limit.window.micros()).max().unwrap_or(0);
        self.logs.decide(limits, now)
    }
}

#[cfg(test)]
mod tests {
    use std::{num::NonZeroU32, time::Duration};

    use super::*;
    use crate::limit::{Verdict, Window};

    fn limits(requests: u32) -> [Limit; 1] {
        let window = Window::new(Duration::from_secs(1)).unwrap();
        [Limit::new(NonZeroU32::new(requests).unwrap(), window)]
    }

    #[test]
    fn threads_together_get_exactly_the_limit() {
        let store = MemoryStore::new();
        let admitted = std::sync::atomic::AtomicUsize::new(0);
        let key: KeyId = "alice".parse().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        if store.decide(&key, &limits(100), 7).verdict == Verdict::Admit {
                            admitted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 100);
    }

    #[test]
    fn idle_callers_are_forgotten() {
        let store = MemoryStore::new();
        for n in 0..1000 {
            store.decide(&format!("idle-{n}").parse().unwrap(), &limits(5), 0);
        }
        let callers = || store.shards.iter().map(|shard| shard.lock().unwrap().callers.len()).sum::<usize>();
        assert_eq!(callers(), 1000);
        // One busy caller in each shard makes every shard sweep.
        let names = (0..).map(|n| format!("busy-{n}").parse::<KeyId>().unwrap());
        let mut busy: HashMap<usize, KeyId> = HashMap::new();
        for name in names {
            busy.entry(store.hasher.hash_one(&name) as usize % SHARDS).or_insert(name);
            if busy.len() == SHARDS {
                break;
            }
        }
        for key in busy.values() {
            (0..DECISIONS_BETWEEN_SWEEPS).for_each(|_| drop(store.decide(key, &limits(5), 10_000_000)));
        }
        assert_eq!(callers(), SHARDS);
    }
}
