//! Judges a limiter from outside, by what its clients saw.
//!
//! When a request was decided is not known, but it was after its client sent it and before its client had the answer.
//! What follows from that alone is certain: a delay anywhere can hide a fault of the limiter and can never feign one.
//! So these judgements may be asserted on the busiest machine.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

/// What a client saw of one request, on one clock for all clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Observation {
    pub(crate) sent: Duration,
    pub(crate) received: Duration,
    pub(crate) seen: Seen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Admitted,
    Refused,
    /// No answer, or one that does not tell: it may have been counted.
    Unknown,
}

/// What was promised: so many requests in any window of this length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bound {
    pub(crate) requests: usize,
    pub(crate) window: Duration,
    pub(crate) count_refused: bool,
}

impl Bound {
    pub(crate) fn new(requests: usize, window: Duration) -> Self {
        Self { requests, window, count_refused: false }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// Certainly more than the bound were admitted in one window, the first of them sent then.
    OverAdmission { bound: usize, admitted: usize, from: Duration },
    /// This one was refused, though no bound can have been used up.
    WrongRefusal { request: Observation },
}

/// Every certain violation of the bounds, which all held for all of these requests, and for no others.
pub(crate) fn judge(bounds: &[Bound], observations: &[Observation]) -> Vec<Violation> {
    let too_many = bounds.iter().enumerate().filter_map(|(n, bound)| over_admission(n, bound, observations));
    too_many.chain(wrong_refusals(bounds, observations)).collect()
}

/// The worst window that is certain: the one with most admissions whose clients all had the answer less than a window
/// after the first of them had sent.
fn over_admission(number: usize, bound: &Bound, observations: &[Observation]) -> Option<Violation> {
    let mut admitted: Vec<_> = observations.iter().filter(|one| one.seen == Seen::Admitted).collect();
    admitted.sort_unstable_by_key(|one| Reverse(one.sent));
    // From the last to be sent to the first, so that the end of the window only moves back: what lies behind it once
    // lies behind it for good.
    let mut inside = BinaryHeap::new();
    let windows = admitted.into_iter().map(|first| {
        inside.push(first.received);
        while inside.peek().is_some_and(|latest| *latest >= first.sent + bound.window) {
            inside.pop();
        }
        (inside.len(), first.sent)
    });
    let (admitted, from) = windows.max_by_key(|(admitted, _)| *admitted)?;
    (admitted > bound.requests).then_some(Violation::OverAdmission { bound: number, admitted, from })
}

fn wrong_refusals(bounds: &[Bound], observations: &[Observation]) -> Vec<Violation> {
    let counted: Vec<_> = bounds.iter().map(|bound| Counted::by(bound, observations)).collect();
    let refused = observations.iter().filter(|one| one.seen == Seen::Refused);
    let is_wrong = |one: &&Observation| counted.iter().all(|counted| counted.had_room_for(one));
    refused.filter(is_wrong).map(|request| Violation::WrongRefusal { request: *request }).collect()
}

/// What a bound may have counted, each list in order.
struct Counted<'a> {
    bound: &'a Bound,
    sent: Vec<Duration>,
    received: Vec<Duration>,
}

impl<'a> Counted<'a> {
    fn by(bound: &'a Bound, observations: &[Observation]) -> Self {
        let counts = |one: &&Observation| bound.count_refused || one.seen != Seen::Refused;
        let counted: Vec<_> = observations.iter().filter(counts).collect();
        let (mut sent, mut received): (Vec<_>, Vec<_>) =
            counted.iter().map(|one| (one.sent, one.received)).unzip();
        sent.sort_unstable();
        received.sort_unstable();
        Self { bound, sent, received }
    }

    /// Whether fewer than the bound can have lain in the window when this request was decided. What was received
    /// before the window began was also sent before, so one count less the other is the number in between.
    fn had_room_for(&self, refused: &Observation) -> bool {
        let begun = self.sent.partition_point(|sent| *sent <= refused.received);
        let over = match refused.sent.checked_sub(self.bound.window) {
            Some(start) => self.received.partition_point(|received| *received <= start),
            None => 0,
        };
        let itself = usize::from(self.bound.count_refused);
        begun - over - itself < self.bound.requests
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const W: u64 = 1_000_000;

    fn at(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    fn bound(requests: usize) -> Bound {
        Bound::new(requests, at(W))
    }

    fn saw(sent: u64, received: u64, seen: Seen) -> Observation {
        Observation { sent: at(sent), received: at(received), seen }
    }

    use Seen::{Admitted, Refused, Unknown};

    #[test]
    fn one_too_many_is_found_and_exactly_the_bound_is_not() {
        let schedule = |last| [saw(0, 9, Admitted), saw(5, 20, Admitted), saw(W - 50, last, Admitted)];
        let found = judge(&[bound(2)], &schedule(W - 1));
        assert_eq!(found, [Violation::OverAdmission { bound: 0, admitted: 3, from: at(0) }]);
        assert_eq!(judge(&[bound(2)], &schedule(W)), [], "it may have been decided a window after the first");
        assert_eq!(judge(&[bound(3)], &schedule(W - 1)), []);
    }

    #[test]
    fn a_window_between_two_others_is_found() {
        let sent = [0, W / 2, W / 2 + 10, W + 10, W + 20];
        let schedule = sent.map(|sent| saw(sent, sent + 5, Admitted));
        let found = judge(&[bound(3)], &schedule);
        assert_eq!(found, [Violation::OverAdmission { bound: 0, admitted: 4, from: at(W / 2) }]);
    }

    #[test]
    fn a_refusal_with_room_is_found_and_one_that_may_be_right_is_not() {
        let refused_at = |sent| [saw(0, 10, Admitted), saw(sent, sent + 5, Refused)];
        assert_eq!(judge(&[bound(1)], &refused_at(W + 9)), []);
        let wrong = Violation::WrongRefusal { request: refused_at(W + 10)[1] };
        assert_eq!(judge(&[bound(1)], &refused_at(W + 10)), [wrong]);
        assert_eq!(judge(&[bound(2)], &refused_at(20)).len(), 1);
        let unknown = [saw(0, 10, Unknown), saw(20, 30, Refused)];
        assert_eq!(judge(&[bound(1)], &unknown), [], "what was not answered may have been counted");
        let overtaken = [saw(0, 50, Refused), saw(40, 60, Admitted)];
        assert_eq!(judge(&[bound(1)], &overtaken), [], "sent later, and perhaps decided earlier");
    }

    #[test]
    fn a_refusal_needs_one_full_bound_and_every_bound_holds() {
        let day = Bound::new(2, at(10 * W));
        let early = [saw(0, 10, Admitted), saw(3 * W, 3 * W + 10, Admitted)];
        let with = |last| [&early[..], &[last]].concat();
        assert_eq!(judge(&[bound(1), day], &with(saw(5 * W, 5 * W + 10, Refused))), []);
        let found = judge(&[bound(1), day], &with(saw(5 * W, 5 * W + 10, Admitted)));
        assert_eq!(found, [Violation::OverAdmission { bound: 1, admitted: 3, from: at(0) }]);
    }

    #[test]
    fn attempts_fill_a_bound_that_counts_them() {
        let attempts = Bound { count_refused: true, ..bound(1) };
        let schedule = [saw(0, 10, Admitted), saw(W - 9, W, Refused), saw(W + 100, W + 110, Refused)];
        assert_eq!(judge(&[attempts], &schedule), []);
        assert_eq!(judge(&[bound(1)], &schedule).len(), 1);
        let alone = [saw(0, 10, Refused)];
        assert_eq!(judge(&[attempts], &alone).len(), 1, "an attempt does not refuse itself");
    }

    /// The instants of the decisions, and how long before and after them the clients sent and received.
    fn traffic(longest_gap: u64, longest_delay: u64) -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
        let request = (0..longest_gap, 0..longest_delay, 0..longest_delay);
        prop::collection::vec(request, 1..200).prop_map(|requests| {
            let mut now = 10 * W;
            let one = |(gap, before, after)| {
                now += gap;
                (now, before, after)
            };
            requests.into_iter().map(one).collect()
        })
    }

    fn play(traffic: &[(u64, u64, u64)], mut admits: impl FnMut(u64) -> bool) -> Vec<Observation> {
        let one = |&(now, before, after): &(u64, u64, u64)| {
            saw(now - before, now + after, if admits(now) { Admitted } else { Refused })
        };
        traffic.iter().map(one).collect()
    }

    /// The limiter as it should be, with these numbers.
    fn exact(bounds: Vec<(usize, u64)>) -> impl FnMut(u64) -> bool {
        let mut log = VecDeque::new();
        move |now| {
            let used = |window| log.iter().filter(|at| **at + window > now).count();
            let admits = bounds.iter().all(|(requests, window)| used(*window) < *requests);
            log.extend(admits.then_some(now));
            admits
        }
    }

    fn fixed_window(requests: usize) -> impl FnMut(u64) -> bool {
        let (mut window, mut used) = (0, 0);
        move |now| {
            if now / W != window {
                (window, used) = (now / W, 0);
            }
            used += 1;
            used <= requests
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn an_exact_limiter_is_never_accused(
            requests in 1..20_usize, more in 1..30_usize, traffic in traffic(W / 4, 3 * W),
        ) {
            let seen = play(&traffic, exact(vec![(requests, W), (more, 3 * W)]));
            prop_assert_eq!(judge(&[bound(requests), Bound::new(more, at(3 * W))], &seen), []);
        }

        /// Sent close together, and answered soon, so that the fault can be seen at all.
        #[test]
        fn a_limiter_that_is_off_by_one_is_always_accused(requests in 1..20_usize, delays in traffic(W / 200, W / 8)) {
            prop_assume!(delays.len() > requests + 1);
            let lax = judge(&[bound(requests)], &play(&delays, exact(vec![(requests + 1, W)])));
            prop_assert!(matches!(lax[..], [Violation::OverAdmission { .. }, ..]), "{:?}", lax);
            let strict = judge(&[bound(requests + 1)], &play(&delays, exact(vec![(requests, W)])));
            prop_assert!(matches!(strict[..], [Violation::WrongRefusal { .. }, ..]), "{:?}", strict);
        }

        #[test]
        fn a_fixed_window_is_always_accused(requests in 1..20_usize, delays in traffic(W / 200, W / 8)) {
            prop_assume!(delays.len() >= 40);
            // Both bursts lie close to the border between two windows.
            let border = 20 * W;
            let near = |n: usize| if n < 20 { border - W / 8 + n as u64 } else { border + n as u64 };
            let bursts: Vec<_> =
                delays.iter().enumerate().map(|(n, &(_, before, after))| (near(n), before, after)).collect();
            let found = judge(&[bound(requests)], &play(&bursts, fixed_window(requests)));
            prop_assert!(matches!(found[..], [Violation::OverAdmission { .. }, ..]), "{:?}", found);
        }
    }
}
