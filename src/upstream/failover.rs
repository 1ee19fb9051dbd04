//! Failover: the way of one request from endpoint to endpoint, which is next, and whether there is a next.
//!
//! That an endpoint is out is a guess of ours, and a request never fails by a guess: where nothing better is left, the
//! one that is back first is tried.

use std::iter;

use tokio::time::Instant;

use super::{
    balance::{self, Load},
    endpoint::{Endpoint, Upstream},
    health::Standing,
    state::Sending,
};
use crate::config::RetryOn;

/// An attempt that is to be made.
pub(super) struct Attempt<'a> {
    pub(super) upstream: &'a Upstream,
    pub(super) endpoint: &'a Endpoint,
    pub(super) sending: Sending<'a>,
    /// The endpoint has had this request before.
    pub(super) again: bool,
}

/// The way of one request from endpoint to endpoint.
pub(super) struct Failover<'a> {
    began: Instant,
    /// Where the latest attempt was made, and how many were made there.
    upstream: &'a Upstream,
    made: u32,
    /// The ids of endpoints that have failed.
    failed: Vec<u64>,
    /// No other endpoint can have this request.
    settled: bool,
    /// It asks for a WebSocket, which not every fallback is to have.
    websocket: bool,
}

impl<'a> Failover<'a> {
    pub(super) fn new(upstream: &'a Upstream, websocket: bool, began: Instant) -> Self {
        Self { began, upstream, made: 0, failed: Vec::new(), settled: false, websocket }
    }

    pub(super) fn first(&mut self) -> Attempt<'a> {
        self.pick(self.began)
            .expect("an upstream has an endpoint, and before the first attempt each may be taken")
    }

    /// The first and only attempt, at the endpoint with this mark, however it fares; nothing, if it is there no more.
    pub(super) fn only(&mut self, mark: u32) -> Option<Attempt<'a>> {
        let (upstream, endpoint) = self.endpoints_left().find(|(_, endpoint)| endpoint.mark == mark)?;
        self.settled = true;
        let sending = endpoint.state.send(self.began, true)?;
        Some(Attempt { upstream, endpoint, sending, again: false })
    }

    /// Whether the latest attempt may have a successor.
    pub(super) fn may_go_on(&self) -> bool {
        if self.settled {
            return false;
        }
        self.upstream
            .retry
            .as_ref()
            .is_some_and(|retry| self.made < retry.attempts.get() || self.upstream.fallback.is_some())
    }

    /// Whether a failure of this kind, if it is one, calls for another attempt.
    pub(super) fn goes_on_after(&self, failure: Option<RetryOn>) -> bool {
        let retry = self.upstream.retry.as_ref().filter(|retry| self.began.elapsed() < retry.within);
        retry.is_some_and(|retry| failure.is_some_and(|kind| retry.on.contains(&kind)))
    }

    /// The attempt after one at the endpoint with this id.
    pub(super) fn next(&mut self, failed: u64) -> Option<Attempt<'a>> {
        self.failed.push(failed);
        self.pick(Instant::now())
    }

    fn pick(&mut self, now: Instant) -> Option<Attempt<'a>> {
        let attempt = self.best(now).or_else(|| self.first_to_be_back(now))?;
        if !std::ptr::eq(attempt.upstream, self.upstream) {
            (self.upstream, self.made) = (attempt.upstream, 0);
        }
        self.made += 1;
        Some(attempt)
    }

    /// The upstreams that are left, with attempts to make.
    fn left(&self) -> impl Iterator<Item = &'a Upstream> + use<'a> {
        let (present, made, websocket) = (self.upstream, self.made, self.websocket);
        let chain = iter::successors(Some(present), |upstream| upstream.fallback.as_deref());
        let has_attempts =
            move |upstream: &Upstream| !std::ptr::eq(upstream, present) || made < upstream.attempts();
        chain.filter(move |upstream| has_attempts(upstream) && (upstream.websocket || !websocket))
    }

    fn endpoints_left(&self) -> impl Iterator<Item = (&'a Upstream, &'a Endpoint)> + use<'a> {
        self.left().flat_map(|upstream| upstream.endpoints.iter().map(move |one| (upstream, one)))
    }

    /// An endpoint that takes requests: of the upstreams in their order, those first that have not had this one.
    fn best(&self, now: Instant) -> Option<Attempt<'a>> {
        self.left().find_map(|upstream| {
            self.choose(upstream, false, now).or_else(|| self.choose(upstream, true, now))
        })
    }

    fn choose(&self, upstream: &'a Upstream, again: bool, now: Instant) -> Option<Attempt<'a>> {
        let takes = |endpoint: &Endpoint| {
            self.failed.contains(&endpoint.id) == again
                && !matches!(endpoint.state.standing(now), Standing::Out(_))
        };
        let load = |(index, endpoint): (usize, &Endpoint)| {
            (index, Load { in_flight: endpoint.state.in_flight(), weight: endpoint.weight })
        };
        // Another worker may be quicker to send the one request that an endpoint is due.
        (0..upstream.endpoints.len()).find_map(|_| {
            let index = match &upstream.endpoints[..] {
                [only] => takes(only).then_some(0),
                several => {
                    let candidates = several.iter().enumerate().filter(|(_, endpoint)| takes(endpoint));
                    balance::choose(candidates.map(load), balance::random())
                }
            };
            let endpoint = &upstream.endpoints[index?];
            let sending = endpoint.state.send(now, false)?;
            Some(Attempt { upstream, endpoint, sending, again })
        })
    }

    /// Of the endpoints that have not had this request, the one whose time is over first.
    fn first_to_be_back(&self, now: Instant) -> Option<Attempt<'a>> {
        let until = |endpoint: &Endpoint| match endpoint.state.standing(now) {
            Standing::Available | Standing::Due => now,
            Standing::Out(until) => until,
        };
        let fresh = self.endpoints_left().filter(|(_, endpoint)| !self.failed.contains(&endpoint.id));
        let (upstream, endpoint) = fresh.min_by_key(|(_, endpoint)| until(endpoint))?;
        let sending = endpoint.state.send(now, true)?;
        Some(Attempt { upstream, endpoint, sending, again: false })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{config::Retry, upstream::attempts::Outcome};

    /// An upstream with as many endpoints, and what stands in for it.
    fn upstream(endpoints: usize, fallback: Option<Upstream>) -> Upstream {
        Upstream::of_many_for_test(endpoints, fallback.map(Arc::new))
    }

    /// Fails the attempt in the worst way, and takes the next.
    fn next<'a>(failover: &mut Failover<'a>, attempt: Attempt<'a>) -> Option<Attempt<'a>> {
        let id = attempt.endpoint.id;
        drop(attempt.sending.settle(Outcome::Connect, None));
        failover.next(id)
    }

    #[test]
    fn each_endpoint_has_its_turn_and_then_the_fallback() {
        let upstream = upstream(2, Some(upstream(1, None)));
        let mut failover = Failover::new(&upstream, false, Instant::now());
        let first = failover.first();
        let first_id = first.endpoint.id;
        let second = next(&mut failover, first).unwrap();
        assert_ne!(second.endpoint.id, first_id);
        assert!(std::ptr::eq(second.upstream, &raw const upstream));
        assert!(failover.may_go_on());
        let third = next(&mut failover, second).unwrap();
        assert!(std::ptr::eq(third.upstream, upstream.fallback.as_deref().unwrap()));
        assert!(next(&mut failover, third).is_none());
    }

    #[test]
    fn what_is_out_is_passed_over_until_nothing_else_is_left() {
        let upstream = upstream(2, Some(upstream(1, None)));
        let [one, two] = &upstream.endpoints[..] else { panic!("two endpoints") };
        let now = Instant::now();
        let fail = |endpoint: &Endpoint| {
            drop(endpoint.state.send(now, true).unwrap().settle(Outcome::Connect, None));
        };
        fail(one);
        for _ in 0..20 {
            assert_eq!(Failover::new(&upstream, false, now).first().endpoint.id, two.id);
        }
        fail(two);
        let fallback = upstream.fallback.as_deref().unwrap();
        assert!(std::ptr::eq(Failover::new(&upstream, false, now).first().upstream, fallback));
        fail(&fallback.endpoints[0]);
        assert_eq!(Failover::new(&upstream, false, now).first().endpoint.id, one.id, "it is back first");
    }

    #[test]
    fn an_endpoint_gets_a_request_again_only_where_there_is_no_fresh_one() {
        let upstream = Upstream { retry: Some(Retry::default()), ..upstream(1, None) };
        let mut failover = Failover::new(&upstream, false, Instant::now());
        let first = failover.first();
        let id = first.endpoint.id;
        drop(first.sending.settle(Outcome::ServerError, None));
        let second = failover.next(id).unwrap();
        assert!(second.again && second.endpoint.id == id);
        assert!(!failover.may_go_on());
    }

    #[test]
    fn the_less_busy_endpoint_is_taken() {
        let upstream = upstream(2, None);
        let now = Instant::now();
        let held: Vec<_> = (0..40).map(|_| Failover::new(&upstream, false, now).first()).collect();
        let first = held.iter().filter(|attempt| attempt.endpoint.id == upstream.endpoints[0].id).count();
        assert_eq!(first, 20, "they take turns while nothing ends");
    }
}
