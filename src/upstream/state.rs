//! What the workers of a process know together of each endpoint: how many requests it has, and how it fares.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{
            AtomicBool, AtomicU32,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::Duration,
};

use tokio::time::Instant;

use super::{
    attempts::Outcome,
    health::{Change, Failure, Health, Sent, Standing},
};
use crate::{
    config,
    metrics::{Metrics, Tally},
};

/// The state of one endpoint.
#[derive(Debug)]
pub(super) struct EndpointState {
    identity: Identity,
    /// `upstream/endpoint`, for what is shared with other processes.
    label: String,
    in_flight: AtomicU32,
    /// Nothing but successes is known, so nobody needs to look closer.
    clean: AtomicBool,
    health: Mutex<Health>,
    outcomes: [Tally; Outcome::ALL.len()],
}

/// What an endpoint is recognized by when the configuration is read again.
#[derive(Debug, PartialEq)]
struct Identity {
    upstream: Arc<str>,
    endpoint: config::Endpoint,
    has_others: bool,
}

impl EndpointState {
    fn new(identity: Identity, metrics: &Metrics) -> Self {
        let Identity { upstream, endpoint, .. } = &identity;
        Self {
            label: format!("{upstream}/{}", endpoint.name),
            in_flight: AtomicU32::new(0),
            clean: AtomicBool::new(true),
            health: Mutex::default(),
            outcomes: Outcome::ALL.map(|outcome| metrics.attempts(upstream, &endpoint.name, outcome.label())),
            identity,
        }
    }

    pub(super) fn upstream(&self) -> &Arc<str> {
        &self.identity.upstream
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.identity.endpoint.name
    }

    pub(super) fn label(&self) -> &str {
        &self.label
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.in_flight.load(Relaxed)
    }

    pub(super) fn standing(&self, now: Instant) -> Standing {
        if self.clean.load(Acquire) { Standing::Available } else { self.health().standing(now) }
    }

    /// Takes note of a request. None, if somebody else was quicker to take what made the endpoint look good.
    pub(super) fn send(self: &Arc<Self>, now: Instant, whatever_it_is: bool) -> Option<Sending<'_>> {
        let sent = if self.clean.load(Acquire) {
            Sent { at: now, probe: false }
        } else {
            let mut health = self.health();
            if matches!(health.standing(now), Standing::Out(_)) && !whatever_it_is {
                return None;
            }
            health.send(now)
        };
        // Where there is no choice, nobody asks how busy it is.
        let in_flight = self.identity.has_others.then(|| InFlight::new(self.clone()));
        Some(Sending { state: self, sent, in_flight, settled: false })
    }

    /// Has the provider left alone for so long. `heard`: by another process.
    fn cool(&self, pause: Duration, heard: bool, now: Instant) {
        self.learn(|health| health.cool(pause, heard, now));
    }

    fn learn(&self, what: impl FnOnce(&mut Health) -> Option<Change>) {
        let change = {
            let mut health = self.health();
            let change = what(&mut health);
            self.clean.store(health.is_clean(), Release);
            change
        };
        change.into_iter().for_each(|change| self.tell(change));
    }

    fn tell(&self, change: Change) {
        let (upstream, endpoint) = (&self.identity.upstream, self.name());
        match change {
            Change::Ejected(length) => {
                tracing::warn!(%upstream, %endpoint, ?length, "an endpoint fails and is left out");
            }
            Change::Recovered => tracing::info!(%upstream, %endpoint, "an endpoint answers again"),
            Change::Cooling(pause) => {
                tracing::warn!(%upstream, %endpoint, ?pause, "an endpoint is over its provider's limit and is left out");
            }
        }
    }

    fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request on its way to an endpoint. Dropped before its outcome is told, it was given up.
#[derive(Debug)]
pub(super) struct Sending<'a> {
    state: &'a EndpointState,
    sent: Sent,
    in_flight: Option<InFlight>,
    settled: bool,
}

impl Sending<'_> {
    /// Takes note of what became of it, and of the pause that the provider wants. What is left counts as in flight for
    /// as long as it is kept.
    pub(super) fn settle(mut self, outcome: Outcome, pause: Option<Duration>) -> Option<InFlight> {
        self.settled = true;
        self.count(outcome);
        if self.state.identity.has_others {
            self.judge(outcome, pause);
        }
        self.in_flight.take()
    }

    fn count(&self, outcome: Outcome) {
        self.state.outcomes[outcome as usize].inc();
    }

    fn judge(&self, outcome: Outcome, pause: Option<Duration>) {
        let (state, sent, now) = (self.state, self.sent, Instant::now());
        if let Some(pause) = pause {
            state.cool(pause, false, now);
        }
        match outcome {
            // One load, as long as all goes well.
            Outcome::Answered | Outcome::TooManyRequests if state.clean.load(Acquire) => {}
            Outcome::Answered | Outcome::TooManyRequests => state.learn(|health| health.succeeded(sent)),
            Outcome::Connect => state.learn(|health| health.failed(sent, Failure::Unreachable, now)),
            Outcome::ServerError | Outcome::Timeout | Outcome::Broken => {
                state.learn(|health| health.failed(sent, Failure::Faulty, now));
            }
            Outcome::Client | Outcome::Abandoned => self.end_probe(),
        }
    }

    fn end_probe(&self) {
        if self.sent.probe {
            self.state.health().ended(self.sent);
        }
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.count(Outcome::Abandoned);
            self.end_probe();
        }
    }
}

/// Counts as a request of the endpoint until it is dropped.
#[derive(Debug)]
pub(super) struct InFlight(Arc<EndpointState>);

impl InFlight {
    fn new(state: Arc<EndpointState>) -> Self {
        state.in_flight.fetch_add(1, Relaxed);
        Self(state)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Relaxed);
    }
}

/// The states of all endpoints. They outlive a reload that leaves their endpoint as it is.
#[derive(Clone, Debug)]
pub struct EndpointStates(Arc<Registry>);

#[derive(Debug)]
struct Registry {
    metrics: Arc<Metrics>,
    known: Mutex<Vec<Weak<EndpointState>>>,
}

impl EndpointStates {
    /// None yet. Their attempts are counted in `metrics`.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self(Arc::new(Registry { metrics, known: Mutex::default() }))
    }

    /// Whether each endpoint takes requests now, with the names of its upstream and its own.
    pub fn available(&self, now: Instant) -> Vec<(Arc<str>, Arc<str>, bool)> {
        let available = |state: &EndpointState| !matches!(state.standing(now), Standing::Out(_));
        let row = |state: Arc<EndpointState>| {
            (state.identity.upstream.clone(), state.name().clone(), available(&state))
        };
        self.live().into_iter().map(row).collect()
    }

    /// Whether any endpoint has others beside it, so that it matters how it fares.
    pub fn has_choice(&self) -> bool {
        self.live().iter().any(|state| state.identity.has_others)
    }

    /// The pauses that providers asked this process for, by the label of their endpoint: how much of them is left.
    pub fn own_cooldowns(&self) -> Vec<(String, Duration)> {
        let now = Instant::now();
        let own = |state: &Arc<EndpointState>| {
            (!state.clean.load(Acquire)).then(|| state.health().own_cooldown(now)).flatten()
        };
        let states = self.live();
        states.iter().filter_map(|state| Some((state.label.clone(), own(state)?))).collect()
    }

    /// Leaves an endpoint alone for so long, as its provider has asked of another process.
    pub fn heard_of_cooldown(&self, label: &str, left: Duration) {
        let now = Instant::now();
        let states = self.live();
        let concerned = states.iter().filter(|state| state.identity.has_others && state.label == label);
        concerned.for_each(|state| state.cool(left, true, now));
    }

    /// The state of a configured endpoint, the present one where there is one. `has_others`: requests can go elsewhere.
    pub(super) fn of(
        &self,
        upstream: &Arc<str>,
        endpoint: &config::Endpoint,
        has_others: bool,
    ) -> Arc<EndpointState> {
        let identity = Identity { upstream: upstream.clone(), endpoint: endpoint.clone(), has_others };
        if let Some(known) = self.live().into_iter().find(|state| state.identity == identity) {
            return known;
        }
        let state = Arc::new(EndpointState::new(identity, &self.0.metrics));
        self.known().push(Arc::downgrade(&state));
        state
    }

    fn live(&self) -> Vec<Arc<EndpointState>> {
        let mut known = self.known();
        known.retain(|state| state.strong_count() > 0);
        known.iter().filter_map(Weak::upgrade).collect()
    }

    fn known(&self) -> MutexGuard<'_, Vec<Weak<EndpointState>>> {
        self.0.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn states() -> EndpointStates {
        EndpointStates::new(Arc::new(Metrics::new(false, &Default::default())))
    }

    fn endpoint(weight: u32) -> config::Endpoint {
        config::Endpoint {
            name: "one".into(),
            url: "http://one".parse().unwrap(),
            credential: None,
            weight: NonZeroU32::new(weight).unwrap(),
        }
    }

    #[test]
    fn a_state_lasts_as_long_as_somebody_has_it_and_its_endpoint_stays_the_same() {
        let (states, name) = (states(), Arc::from("up"));
        let first = states.of(&name, &endpoint(1), true);
        assert!(Arc::ptr_eq(&first, &states.of(&name, &endpoint(1), true)));
        assert!(!Arc::ptr_eq(&first, &states.of(&name, &endpoint(2), true)));
        assert_eq!(states.available(Instant::now()).len(), 1, "the changed one is gone again");
        drop(first);
        assert!(states.available(Instant::now()).is_empty());
    }

    #[test]
    fn a_request_counts_until_its_answer_has_passed() {
        let (states, now) = (states(), Instant::now());
        let state = states.of(&"up".into(), &endpoint(1), true);
        let abandoned = state.send(now, false).unwrap();
        let rest = state.send(now, false).unwrap().settle(Outcome::Answered, None);
        assert_eq!(state.in_flight(), 2);
        drop(abandoned);
        assert_eq!(state.in_flight(), 1);
        drop(rest);
        assert_eq!(state.in_flight(), 0);
    }

    #[test]
    fn a_probe_that_is_abandoned_makes_room_for_the_next() {
        let (states, start) = (states(), Instant::now());
        let state = states.of(&"up".into(), &endpoint(1), true);
        drop(state.send(start, false).unwrap().settle(Outcome::Connect, None));
        assert!(state.send(start, false).is_none());
        assert!(state.send(start, true).is_some(), "for there may be nothing better");
        let later = start + Duration::from_secs(2);
        let probe = state.send(later, false).unwrap();
        assert!(state.send(later, false).is_none());
        drop(probe);
        assert!(state.send(later, false).is_some());
    }

    #[test]
    fn nothing_is_learnt_where_there_is_no_choice() {
        let (states, now) = (states(), Instant::now());
        let state = states.of(&"up".into(), &endpoint(1), false);
        drop(state.send(now, false).unwrap().settle(Outcome::Connect, None));
        assert_eq!(state.standing(now), Standing::Available);
        assert!(!states.has_choice());
    }

    #[test]
    fn a_pause_is_told_by_its_first_hearer_alone() {
        let [ours, theirs] = [states(), states()];
        let [ours_one, theirs_one] =
            [&ours, &theirs].map(|states| states.of(&"up".into(), &endpoint(1), true));
        let sending = ours_one.send(Instant::now(), false).unwrap();
        drop(sending.settle(Outcome::TooManyRequests, Some(Duration::from_secs(20))));
        let told = ours.own_cooldowns();
        assert_eq!((told.len(), &*told[0].0), (1, "up/one"));
        theirs.heard_of_cooldown(&told[0].0, told[0].1);
        assert!(matches!(theirs_one.standing(Instant::now()), Standing::Out(_)));
        assert!(theirs.own_cooldowns().is_empty());
    }
}
