//! What Prometheus gets to see. Labels come from the configuration and from fixed lists, never from a request.

use std::{fmt, sync::Arc, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};

/// All metrics, shared by the workers.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    /// Whether keys are named in [`RequestLabels`].
    pub key_labels: bool,
    requests: Family<RequestLabels, Counter>,
    first_byte: Family<RouteLabels, Histogram>,
    limiter_seconds: Histogram,
    limiter_faults: Family<FaultLabels, Counter>,
    client_tries: [Tally; CLIENT_RETRIES.len()],
    near_limit: Family<LimitLabels, Counter>,
    over_unenforced_limit: Family<LimitLabels, Counter>,
    limiter_fallbacks: Family<PolicyLabels, Counter>,
    /// Requests whose answer has not ended.
    pub in_flight: Gauge,
    /// Open client connections.
    pub connections: Gauge,
    connections_refused: Family<ReasonLabels, Counter>,
    connections_expired: Family<ReasonLabels, Counter>,
    /// Whether the limiter's store decides: 1 or 0.
    pub store_up: Gauge,
    /// How many processes share the limits, as far as is known.
    pub replicas: Gauge,
    upstream_attempts: Family<AttemptLabels, Counter>,
    endpoints_available: Family<EndpointLabels, Gauge>,
}

/// How `client_tries` names the first try of a call and its retries. No SDK makes more by itself than the last one tells
/// apart.
const CLIENT_RETRIES: [&str; 4] = ["0", "1", "2", "3+"];

/// Labels that are known before anything happens. Their series stand at zero from the start, for an alert on a series that
/// comes with the first fault misses that fault.
#[derive(Clone, Debug, Default)]
pub struct KnownLabels {
    /// Kinds of fault of the limiter's store.
    pub faults: Vec<&'static str>,
    /// Policies that stand in for it.
    pub policies: Vec<&'static str>,
    /// Reasons why a connection does not come about.
    pub refusals: Vec<&'static str>,
    /// Reasons why one is ended.
    pub expiries: Vec<&'static str>,
}

/// How a request is counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    /// The upstream's name; none where no route was found.
    pub route: Name,
    /// The tier's name; none for strangers.
    pub tier: Name,
    /// The key's id, where that is switched on.
    pub key: Name,
    /// What happened.
    pub outcome: &'static str,
    /// The status of the answer; 0 where there was none.
    pub status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RouteLabels {
    route: Name,
}

/// A name from the configuration, which every request that it concerns shares; empty where there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Name(pub Option<Arc<str>>);

impl EncodeLabelValue for Name {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> fmt::Result {
        self.0.as_deref().unwrap_or_default().encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TryLabels {
    retry: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabels {
    tier: String,
    limit: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FaultLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PolicyLabels {
    policy: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AttemptLabels {
    upstream: Name,
    endpoint: Name,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabels {
    upstream: Name,
    endpoint: Name,
}

/// One series of a counter, for those who count often.
#[derive(Clone, Debug)]
pub struct Tally(Counter);

impl Tally {
    /// Counts one more.
    pub fn inc(&self) {
        self.0.inc();
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

impl Metrics {
    /// Metrics at zero.
    pub fn new(key_labels: bool, known: &KnownLabels) -> Self {
        let mut registry = Registry::with_prefix("tollgate");
        let first_byte = Family::<RouteLabels, Histogram>::new_with_constructor(|| {
            Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0])
        });
        let limiter_seconds =
            Histogram::new([0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25]);
        let tries = Family::<TryLabels, Counter>::default();
        let metrics = Self {
            key_labels,
            client_tries: CLIENT_RETRIES
                .map(|retry| Tally(tries.get_or_create(&TryLabels { retry }).clone())),
            requests: Family::default(),
            first_byte,
            limiter_seconds,
            limiter_faults: Family::default(),
            near_limit: Family::default(),
            over_unenforced_limit: Family::default(),
            limiter_fallbacks: Family::default(),
            in_flight: Gauge::default(),
            connections: Gauge::default(),
            connections_refused: Family::default(),
            connections_expired: Family::default(),
            store_up: Gauge::default(),
            replicas: Gauge::default(),
            upstream_attempts: Family::default(),
            endpoints_available: Family::default(),
            registry: Registry::default(),
        };
        metrics.register(&mut registry);
        registry.register(
            "client_tries",
            "Requests of known callers by which retry they are, as their SDKs say",
            tries,
        );
        metrics.register_upstreams(&mut registry);
        metrics.store_up.set(1);
        metrics.begin_at_zero(known);
        Self { registry, ..metrics }
    }

    fn begin_at_zero(&self, known: &KnownLabels) {
        for &kind in &known.faults {
            drop(self.limiter_faults.get_or_create(&FaultLabels { kind }));
        }
        for &policy in &known.policies {
            drop(self.limiter_fallbacks.get_or_create(&PolicyLabels { policy }));
        }
        for &reason in &known.refusals {
            drop(self.connections_refused.get_or_create(&ReasonLabels { reason }));
        }
        for &reason in &known.expiries {
            drop(self.connections_expired.get_or_create(&ReasonLabels { reason }));
        }
    }

    fn register(&self, registry: &mut Registry) {
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The running version", version);
        registry.register(
            "requests",
            "Requests by route, tier and what happened to them",
            self.requests.clone(),
        );
        registry.register(
            "in_flight_requests",
            "Requests whose answer has not ended",
            self.in_flight.clone(),
        );
        registry.register_with_unit(
            "time_to_first_byte",
            "From a request's head to its answer's head",
            Unit::Seconds,
            self.first_byte.clone(),
        );
        registry.register_with_unit(
            "limiter_decision",
            "How long the limiter took",
            Unit::Seconds,
            self.limiter_seconds.clone(),
        );
        registry.register(
            "limiter_faults",
            "Requests on which the store did not decide",
            self.limiter_faults.clone(),
        );
        registry.register(
            "near_limit",
            "Admitted requests after which 80 % of a limit or more are used",
            self.near_limit.clone(),
        );
        registry.register(
            "over_unenforced_limit",
            "Requests admitted only because the limit is not enforced",
            self.over_unenforced_limit.clone(),
        );
        registry.register(
            "limiter_fallbacks",
            "Requests that a policy decided on in the store's place",
            self.limiter_fallbacks.clone(),
        );
        registry.register(
            "limiter_replicas",
            "Processes that share the limits, as far as is known",
            self.replicas.clone(),
        );
        registry.register("limiter_store_up", "Whether the limiter's store decides", self.store_up.clone());
        registry.register("connections", "Open client connections", self.connections.clone());
        registry.register(
            "connections_refused",
            "Client connections that did not come about",
            self.connections_refused.clone(),
        );
        registry.register(
            "connections_expired",
            "Client connections that were ended because their client took too long",
            self.connections_expired.clone(),
        );
    }

    fn register_upstreams(&self, registry: &mut Registry) {
        registry.register(
            "upstream_attempts",
            "Attempts to have a request answered, by endpoint and what became of them",
            self.upstream_attempts.clone(),
        );
        registry.register(
            "upstream_endpoint_available",
            "Whether an endpoint is not left out: 1 or 0",
            self.endpoints_available.clone(),
        );
    }

    /// Counts a request that has ended.
    pub fn request_ended(&self, labels: &RequestLabels) {
        self.requests.get_or_create(labels).inc();
    }

    /// Counts a request that is the first try of a call (0) or one of its retries.
    pub fn client_tried(&self, retry: u32) {
        let nth = usize::try_from(retry).unwrap_or(usize::MAX);
        self.client_tries[nth.min(CLIENT_RETRIES.len() - 1)].inc();
    }

    /// Notes when the head of an answer was there.
    pub fn first_byte(&self, route: &Arc<str>, after: Duration) {
        self.first_byte
            .get_or_create(&RouteLabels { route: Name(Some(route.clone())) })
            .observe(after.as_secs_f64());
    }

    /// Notes how long the limiter took.
    pub fn limiter_took(&self, time: Duration) {
        self.limiter_seconds.observe(time.as_secs_f64());
    }

    /// Counts a request on which the store did not decide, by why it did not and by what did.
    pub fn limiter_fell_back(&self, kind: &'static str, policy: &'static str) {
        self.limiter_faults.get_or_create(&FaultLabels { kind }).inc();
        self.limiter_fallbacks.get_or_create(&PolicyLabels { policy }).inc();
    }

    /// Counts an admitted request after which four fifths of a limit or more are used.
    pub fn near_limit(&self, tier: &str, limit: &str) {
        self.near_limit.get_or_create(&LimitLabels { tier: tier.to_owned(), limit: limit.to_owned() }).inc();
    }

    /// Counts a request that was admitted only because the limit is not enforced.
    pub fn over_unenforced_limit(&self, tier: &str, limit: &str) {
        let labels = LimitLabels { tier: tier.to_owned(), limit: limit.to_owned() };
        self.over_unenforced_limit.get_or_create(&labels).inc();
    }

    /// The series that counts attempts at an endpoint with this outcome. It stands at zero from now on.
    pub fn attempts(&self, upstream: &Arc<str>, endpoint: &Arc<str>, outcome: &'static str) -> Tally {
        let [upstream, endpoint] = [upstream, endpoint].map(|name| Name(Some(name.clone())));
        let labels = AttemptLabels { upstream, endpoint, outcome };
        Tally(self.upstream_attempts.get_or_create(&labels).clone())
    }

    /// Notes which endpoints there are, and whether each is available, by the names of its upstream and its own.
    pub fn endpoints(&self, endpoints: Vec<(Arc<str>, Arc<str>, bool)>) {
        self.endpoints_available.clear();
        for (upstream, endpoint, available) in endpoints {
            let labels = EndpointLabels { upstream: Name(Some(upstream)), endpoint: Name(Some(endpoint)) };
            self.endpoints_available.get_or_create(&labels).set(available.into());
        }
    }

    /// Counts a connection that did not come about.
    pub fn connection_refused(&self, reason: &'static str) {
        self.connections_refused.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Counts a connection that was ended because its client took too long.
    pub fn connection_expired(&self, reason: &'static str) {
        self.connections_expired.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// The exposition in OpenMetrics' text format.
    pub fn exposition(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a string can't fail");
        text
    }
}

/// A gauge that counts this as long as it lives.
#[derive(Debug)]
pub struct Counted(Gauge);

impl Counted {
    /// One more, until dropped.
    pub fn new(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}
