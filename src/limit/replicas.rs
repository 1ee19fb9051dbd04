//! How many processes share the limits, for the share that each counts alone while the store is away.

use std::{
    collections::VecDeque,
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

/// The number, shared by the workers: one until another one is known.
#[derive(Clone, Debug)]
pub struct Replicas(Arc<AtomicU32>);

impl Replicas {
    /// A number to begin with.
    pub fn new(count: NonZeroU32) -> Self {
        Self(Arc::new(AtomicU32::new(count.get())))
    }

    /// The last that was heard.
    pub fn count(&self) -> NonZeroU32 {
        NonZeroU32::new(self.0.load(Relaxed)).unwrap_or(NonZeroU32::MIN)
    }

    /// Remembers a number; whether it is another one.
    pub fn learn(&self, count: NonZeroU32) -> bool {
        self.0.swap(count.get(), Relaxed) != count.get()
    }
}

/// The counts of the last beats. The highest holds: after an outage the first to beat sees itself alone, and a share that
/// is too small for a few seconds does less harm than one that is too large.
#[derive(Debug)]
pub struct Recent {
    beats: usize,
    counts: VecDeque<NonZeroU32>,
}

impl Recent {
    /// Looks back over so many beats.
    pub fn new(beats: usize) -> Self {
        Self { beats, counts: VecDeque::with_capacity(beats) }
    }

    /// The highest, with this one.
    pub fn highest_with(&mut self, count: NonZeroU32) -> NonZeroU32 {
        if self.counts.len() >= self.beats {
            self.counts.pop_front();
        }
        self.counts.push_back(count);
        self.counts.iter().copied().max().unwrap_or(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growth_holds_at_once_and_a_decline_when_all_had_time_to_beat() {
        let mut recent = Recent::new(3);
        let highest: Vec<_> =
            [1, 3, 1, 2, 2, 2].map(|count| recent.highest_with(NonZeroU32::new(count).unwrap()).get()).into();
        assert_eq!(highest, [1, 3, 3, 3, 2, 2]);
    }

    #[test]
    fn it_tells_whether_the_number_is_another_one() {
        let replicas = Replicas::new(NonZeroU32::MIN);
        let three = NonZeroU32::new(3).unwrap();
        assert_eq!((replicas.learn(three), replicas.learn(three)), (true, false));
        assert_eq!(replicas.count(), three);
    }
}
