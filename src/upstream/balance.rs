//! Which of several endpoints gets a request: the better one of two that are drawn. Pure.
//!
//! Choosing the least busy of all sends every request of every worker to the same one; of two drawn at random, no crowd
//! forms (M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).

use std::{hash::BuildHasher, num::NonZeroU32};

/// How busy an endpoint is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) in_flight: u32,
    pub(super) weight: NonZeroU32,
}

impl Load {
    /// Fewer requests in flight for its weight.
    fn is_below(self, other: Self) -> bool {
        let [ours, theirs] = [self, other].map(|load| u64::from(load.in_flight));
        ours * u64::from(other.weight.get()) < theirs * u64::from(self.weight.get())
    }
}

/// The index of the one to take: two different ones are drawn, by their weights, and the less busy one wins; of two that
/// are as busy, the first. None of none.
pub(super) fn choose(loads: impl Iterator<Item = (usize, Load)> + Clone, random: u64) -> Option<usize> {
    let (first, second) = (random >> 32, random & u64::from(u32::MAX));
    let (index, load) = draw(loads.clone(), first)?;
    match draw(loads.filter(|(other, _)| *other != index), second) {
        Some((other, lighter)) if lighter.is_below(load) => Some(other),
        _ => Some(index),
    }
}

/// One of them, by their weights. `random` is below 2³².
fn draw(loads: impl Iterator<Item = (usize, Load)> + Clone, random: u64) -> Option<(usize, Load)> {
    let total: u64 = loads.clone().map(|(_, load)| u64::from(load.weight.get())).sum();
    let mut left = (random * total) >> 32;
    loads.into_iter().find(|(_, load)| {
        let weight = u64::from(load.weight.get());
        let is_it = left < weight;
        left = left.saturating_sub(weight);
        is_it
    })
}

/// A number that differs each time. The standard library's hash maps are seeded as cheaply.
pub(super) fn random() -> u64 {
    std::hash::RandomState::new().hash_one(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads<'a>(of: &'a [(u32, u32)]) -> impl Iterator<Item = (usize, Load)> + Clone + 'a {
        let load = |(in_flight, weight): &(u32, u32)| Load {
            in_flight: *in_flight,
            weight: NonZeroU32::new(*weight).unwrap(),
        };
        of.iter().map(load).enumerate()
    }

    /// How often each was chosen, over draws that are spread evenly.
    fn shares(of: &[(u32, u32)]) -> Vec<u32> {
        let mut counts = vec![0; of.len()];
        for first in 0..100_u64 {
            for second in 0..100_u64 {
                let random = (((first << 32) / 100) << 32) | ((second << 32) / 100);
                counts[choose(loads(of), random).unwrap()] += 1;
            }
        }
        counts
    }

    #[test]
    fn there_is_nothing_to_choose_from_none_or_one() {
        for random in [0, u64::MAX, u64::MAX >> 1] {
            assert_eq!(choose(loads(&[]), random), None);
            assert_eq!(choose(loads(&[(7, 1)]), random), Some(0));
        }
    }

    #[test]
    fn of_two_the_less_busy_one_always_wins() {
        assert_eq!(shares(&[(1, 1), (0, 1)]), [0, 10_000]);
        assert_eq!(shares(&[(5, 1), (14, 3)]), [0, 10_000]);
        assert_eq!(shares(&[(5, 1), (16, 3)]), [10_000, 0]);
    }

    #[test]
    fn the_busiest_of_many_gets_nothing_and_no_other_gets_all() {
        let counts = shares(&[(9, 1), (0, 1), (1, 1), (1, 1)]);
        assert_eq!(counts[0], 0, "{counts:?}");
        assert!(counts[1..].iter().all(|count| *count > 1000), "{counts:?}");
    }

    #[test]
    fn among_idle_ones_the_weight_decides() {
        assert_eq!(shares(&[(0, 1), (0, 3)]), [2500, 7500]);
        assert_eq!(shares(&[(0, 1), (0, 1), (0, 2)]), [2500, 2500, 5000]);
    }

    #[test]
    fn the_numbers_differ() {
        let numbers: std::collections::HashSet<_> = (0..100).map(|_| random()).collect();
        assert!(numbers.len() > 90);
    }
}
