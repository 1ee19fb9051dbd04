//! Requests of one caller that arrive while the store is being asked about that caller already. They wait, and go
//! together in the next call, which admits as many of them as there is room for, first come first served.
//!
//! This is as exact as one call for each, costs nothing where nobody waits, and makes a hot key cheaper the hotter it is.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

use crate::{
    keys::KeyId,
    limit::{Decision, Limit, fault::Fault},
};

/// More do not go in one call, for a script keeps everybody else waiting.
const MOST_TOGETHER: usize = 128;

type Answer = Result<Decision, Fault>;

/// The callers about whom the store is being asked, and who waits for the next call.
#[derive(Debug, Default)]
pub(super) struct Queues(Mutex<HashMap<KeyId, Queue>>);

#[derive(Debug)]
struct Queue {
    limits: Vec<Limit>,
    waiting: Vec<oneshot::Sender<Answer>>,
}

/// What a request does that has just come.
pub(super) enum Place {
    /// Nobody asks for this caller: it asks for itself, and sees to those who came meanwhile afterwards.
    First,
    /// It waits to be asked for.
    Waiting(oneshot::Receiver<Answer>),
    /// It asks for itself and for nobody else.
    Alone,
}

impl Queues {
    pub(super) fn enter(&self, key: &KeyId, limits: &[Limit]) -> Place {
        // Where more is recorded than what has room, requests of one call could not be told apart.
        if limits.iter().any(|limit| limit.count_refused || !limit.enforce) {
            return Place::Alone;
        }
        let mut queues = self.queues();
        match queues.get_mut(key) {
            None => {
                queues.insert(key.clone(), Queue { limits: limits.to_vec(), waiting: Vec::new() });
                Place::First
            }
            Some(queue) if queue.limits == limits => {
                let (answer, receiver) = oneshot::channel();
                queue.waiting.push(answer);
                Place::Waiting(receiver)
            }
            // The limits have just been changed.
            Some(_) => Place::Alone,
        }
    }

    /// Those who wait for the next call, without those who have left. Where nobody waits, the queue ends.
    pub(super) fn next(&self, key: &KeyId) -> Option<(Vec<Limit>, Vec<oneshot::Sender<Answer>>)> {
        let mut queues = self.queues();
        let queue = queues.get_mut(key)?;
        queue.waiting.retain(|answer| !answer.is_closed());
        if queue.waiting.is_empty() {
            queues.remove(key);
            return None;
        }
        let together = queue.waiting.len().min(MOST_TOGETHER);
        Some((queue.limits.clone(), queue.waiting.drain(..together).collect()))
    }

    /// Whether anybody waits. Where nobody does, the queue ends.
    pub(super) fn has_waiting(&self, key: &KeyId) -> bool {
        let mut queues = self.queues();
        let waits = queues.get(key).is_some_and(|queue| !queue.waiting.is_empty());
        if !waits {
            queues.remove(key);
        }
        waits
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<KeyId, Queue>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn limits(requests: u32) -> [Limit; 1] {
        [Limit { requests: NonZeroU32::new(requests).unwrap(), ..Limit::probe() }]
    }

    #[test]
    fn who_comes_during_a_call_waits_for_the_next() {
        let (queues, key) = (Queues::default(), "a".parse().unwrap());
        assert!(matches!(queues.enter(&key, &limits(5)), Place::First));
        let Place::Waiting(_first) = queues.enter(&key, &limits(5)) else { panic!("it has to wait") };
        let Place::Waiting(gone) = queues.enter(&key, &limits(5)) else { panic!("it has to wait") };
        drop(gone);
        let (_, waiting) = queues.next(&key).unwrap();
        assert_eq!(waiting.len(), 1, "who has left is not asked for");
        assert!(queues.next(&key).is_none());
        assert!(matches!(queues.enter(&key, &limits(5)), Place::First), "the queue has ended");
    }

    #[test]
    fn other_callers_and_other_limits_do_not_wait() {
        let (queues, key) = (Queues::default(), "a".parse().unwrap());
        assert!(matches!(queues.enter(&key, &limits(5)), Place::First));
        assert!(matches!(queues.enter(&"b".parse().unwrap(), &limits(5)), Place::First));
        assert!(matches!(queues.enter(&key, &limits(6)), Place::Alone));
        let counting = Limit { count_refused: true, ..Limit::probe() };
        let shadow = Limit { enforce: false, ..Limit::probe() };
        for limit in [counting, shadow] {
            assert!(matches!(queues.enter(&"c".parse().unwrap(), &[limit]), Place::Alone));
        }
    }

    #[test]
    fn a_call_is_not_for_everybody_at_once() {
        let (queues, key) = (Queues::default(), "a".parse().unwrap());
        queues.enter(&key, &limits(5));
        let places: Vec<_> = (0..MOST_TOGETHER + 3).map(|_| queues.enter(&key, &limits(5))).collect();
        assert_eq!(queues.next(&key).unwrap().1.len(), MOST_TOGETHER);
        assert_eq!(queues.next(&key).unwrap().1.len(), 3);
        drop(places);
    }
}
