//! One request and its answer, as the operator gets to see them: what is known grows with the stages, and however it
//! ends, one log line and one count come of it.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use hyper::{HeaderMap, Method, StatusCode, header::HeaderValue, http::request::Parts};
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    auth::Principal,
    cut::{Cut, Reason},
    dialect::Dialect,
    error::{PANICKED, broken_answer},
    headers::{REQUEST_ID, X_REQUEST_ID, retry_count},
    limit::{Outcome, Ruling, Status, Verdict, fault::FaultKind},
    metrics::{Metrics, Name, RequestLabels},
    policy::Tier,
    route::{Destination, Route},
    upstream::{AnswerError, Attempts},
};

/// The outcome of a request whose client did not wait for its answer.
const CLIENT_GONE: &str = "client_gone";

/// The outcome of a request that only asked whether somebody is there.
pub const PROBE: &str = "probe";

/// A longer id of a request is replaced by one of our own.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The record of one request. Dropped before its end is told, it says that the client went away, unless a [`Cut`] knows
/// better.
#[derive(Debug)]
pub struct Exchange {
    /// Kept from the client or made, and sent both ways.
    pub request_id: HeaderValue,
    /// The dialect of answers made here.
    pub dialect: Dialect,
    /// Who calls, once that is known.
    pub principal: Option<Principal>,
    /// What the limits say, once they were asked.
    pub statuses: Vec<Status>,
    /// Where the upstream gave it one.
    upstream_request_id: Option<HeaderValue>,
    /// Where it was sent.
    pub attempts: Attempts,
    tier: Option<Arc<str>>,
    route: Option<Arc<str>>,
    method: Method,
    path: String,
    /// The client's address.
    pub client: IpAddr,
    started: Instant,
    decision: &'static str,
    limiter_fault: Option<&'static str>,
    status: Option<StatusCode>,
    outcome: &'static str,
    reason: Option<String>,
    first_byte: Option<Duration>,
    sent_bytes: u64,
    received_bytes: Option<u64>,
    ended: bool,
    cut: Cut,
    metrics: Arc<Metrics>,
}

/// How a tunnel ended.
#[derive(Debug)]
pub enum Closing {
    /// The client closed first.
    ByClient,
    /// The upstream closed first.
    ByUpstream,
    /// The client's connection broke.
    ClientGone(io::Error),
    /// The upstream's connection broke.
    UpstreamBroke(io::Error),
    /// Nobody said anything for too long.
    Idle,
}

impl Exchange {
    /// The record of a request that has just begun, without its query, which may hold secrets.
    pub fn begin(metrics: Arc<Metrics>, client: IpAddr, cut: Cut, request: &Parts) -> Self {
        metrics.in_flight.inc();
        let path = request.uri.path();
        Self {
            request_id: request_id(&request.headers),
            dialect: Dialect::of_path(path),
            principal: None,
            statuses: Vec::new(),
            upstream_request_id: None,
            attempts: Attempts::default(),
            tier: None,
            route: None,
            method: request.method.clone(),
            path: path.to_owned(),
            client,
            started: Instant::now(),
            decision: "none",
            limiter_fault: None,
            status: None,
            outcome: CLIENT_GONE,
            reason: None,
            first_byte: None,
            sent_bytes: 0,
            received_bytes: None,
            ended: false,
            cut,
            metrics,
        }
    }

    /// Notes who calls, and which try of a call that is.
    pub fn authenticated(&mut self, principal: &Principal, tier: &Tier, headers: &HeaderMap) {
        if let Some(retry) = retry_count(headers) {
            self.metrics.client_tried(retry);
        }
        self.principal = Some(principal.clone());
        self.tier = Some(tier.name.clone());
    }

    /// Notes where the request goes.
    pub fn routed(&mut self, route: &Route) {
        self.route = Some(route.upstream.name.clone());
        // The path without its prefix tells more than the one that was sent.
        self.dialect = route.upstream.dialect.unwrap_or_else(|| Dialect::of_path(&route.path));
    }

    /// Notes that the limiter is not asked.
    pub fn uncounted(&mut self) {
        self.decision = "uncounted";
    }

    /// Notes where the request can go, before it is known which way. Errors have the dialect that all ways agree on.
    pub fn could_go(&mut self, destination: &Destination) {
        let mut dialects = destination.routes().map(|route| route.upstream.dialect);
        let first = dialects.next().flatten();
        if let Some(first) = first.filter(|first| dialects.all(|dialect| dialect == Some(*first))) {
            self.dialect = first;
        }
    }

    /// Notes the limiter's word on a caller of this tier, and how long it took.
    pub fn ruled(&mut self, tier: &Tier, ruling: Ruling, took: Duration) {
        self.metrics.limiter_took(took);
        if let Some((fault, policy)) = ruling.fallback() {
            self.metrics.limiter_fell_back(fault.label(), policy);
        }
        self.limiter_fault = ruling.fault.map(FaultKind::label);
        self.decision = match &ruling.outcome {
            Outcome::Decided(decision) => match decision.verdict {
                Verdict::Admit => "admitted",
                Verdict::Refuse { .. } => "refused",
            },
            Outcome::Uncounted => "uncounted",
            Outcome::Unavailable => "unavailable",
        };
        if let Outcome::Decided(decision) = ruling.outcome {
            self.statuses = decision.statuses;
            if decision.verdict == Verdict::Admit {
                self.warn_of_limits(tier);
            }
        }
    }

    /// Counts what an operator wants to know before callers are refused.
    fn warn_of_limits(&self, tier: &Tier) {
        for (status, name) in self.statuses.iter().zip(tier.field.names()) {
            if status.over {
                self.metrics.over_unenforced_limit(&tier.name, name);
            }
            if status.is_nearly_used_up() {
                self.metrics.near_limit(&tier.name, name);
            }
        }
    }

    /// Notes what the upstream calls the request, also where its clients do not get to know.
    pub fn named_by_upstream(&mut self, headers: &HeaderMap) {
        self.upstream_request_id =
            [X_REQUEST_ID, REQUEST_ID].iter().find_map(|name| headers.get(name)).cloned();
    }

    /// Notes the head of the answer.
    pub fn answered(&mut self, status: StatusCode, outcome: &'static str, reason: Option<String>) {
        let after = self.started.elapsed();
        (self.status, self.outcome, self.reason) = (Some(status), outcome, reason);
        self.first_byte = Some(after);
        if let Some(route) = &self.route {
            self.metrics.first_byte(route, after);
        }
    }

    /// Notes that a piece of the answer passed.
    pub fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes as u64;
    }

    /// Notes how much has passed through a tunnel so far: to the client, and from it.
    pub fn tunnelled(&mut self, sent: u64, received: u64) {
        (self.sent_bytes, self.received_bytes) = (sent, Some(received));
    }

    /// A tunnel has ended.
    pub fn closed(mut self, closing: &Closing) {
        let (outcome, ending, reason) = match closing {
            Closing::ByClient => (self.outcome, "complete", "the client closed"),
            Closing::ByUpstream => (self.outcome, "complete", "the upstream closed"),
            Closing::ClientGone(error) => (CLIENT_GONE, "client gone", &*error.to_string()),
            Closing::UpstreamBroke(error) => ("upstream_broke", "broken", &*error.to_string()),
            Closing::Idle => (self.outcome, "idle", "both sides were silent for too long"),
        };
        (self.outcome, self.reason) = (outcome, Some(reason.to_owned()));
        self.end(ending);
    }

    /// The answer is complete, if anybody was left to read it.
    pub fn complete(mut self) {
        self.end(if self.outcome == CLIENT_GONE { "client gone" } else { "complete" });
    }

    /// The answer broke off before it reached the client.
    pub fn broke(mut self, error: &AnswerError) {
        self.outcome = broken_answer(error).outcome;
        self.reason = Some(error.to_string());
        self.end(match error {
            AnswerError::Stopped => "cut",
            _ if self.outcome == CLIENT_GONE => "client gone",
            _ => "broken",
        });
    }

    fn end(&mut self, ending: &'static str) {
        self.ended = true;
        let key = self.principal.as_ref().filter(|_| self.metrics.key_labels);
        let labels = RequestLabels {
            route: Name(self.route.take()),
            tier: Name(self.tier.take()),
            key: Name(key.map(|principal| principal.key.name())),
            outcome: self.outcome,
            status: self.status.map_or(0, |status| status.as_u16()),
        };
        // Whoever sees the line finds the metrics changed.
        self.metrics.request_ended(&labels);
        self.metrics.in_flight.dec();
        if self.outcome == PROBE {
            // They come every few seconds, and nobody wants to know.
            let (method, path) = (&self.method, &self.path);
            tracing::debug!(target: "tollgate::access", client = %self.client, %method, path, "probe");
        } else {
            self.log(&labels, ending);
        }
    }

    /// Says who ends the request, where that is not its client.
    pub fn cut(&self) -> &Cut {
        &self.cut
    }

    /// The path of the request, as the client sent it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether the client asked for a head alone.
    pub fn wants_no_body(&self) -> bool {
        self.method == Method::HEAD
    }

    fn key(&self) -> Option<&str> {
        self.principal.as_ref().map(|principal| principal.key.as_str())
    }

    fn log(&self, labels: &RequestLabels, ending: &'static str) {
        let millis = |time: Duration| time.as_micros() as f64 / 1000.0;
        let remaining = self.statuses.iter().map(|status| status.remaining).min();
        tracing::info!(
            target: "tollgate::access",
            request_id = self.request_id.to_str().unwrap_or_default(),
            client = %self.client,
            key = self.key(),
            tier = labels.tier.0.as_deref(),
            route = labels.route.0.as_deref(),
            fallback = self.attempts.fallback.as_deref(),
            endpoint = self.attempts.endpoint.as_deref(),
            attempts = self.attempts.count,
            method = %self.method,
            path = self.path,
            upstream_request_id = self.upstream_request_id.as_ref().and_then(|id| id.to_str().ok()),
            status = self.status.map(|status| status.as_u16()),
            outcome = self.outcome,
            decision = self.decision,
            limiter_fault = self.limiter_fault,
            remaining,
            first_byte_ms = self.first_byte.map(millis),
            duration_ms = millis(self.started.elapsed()),
            bytes = self.sent_bytes,
            received_bytes = self.received_bytes,
            ending,
            reason = self.reason.as_deref(),
            "request"
        );
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let (outcome, ending) = match self.cut.reason() {
            None if std::thread::panicking() => (PANICKED, "broken"),
            None => (CLIENT_GONE, "client gone"),
            Some(Reason::Unread) => ("client_stalled", "cut"),
            Some(Reason::Stopping) => ("stopped", "cut"),
        };
        self.outcome = outcome;
        self.end(ending);
    }
}

/// Logs and counts a request that is none: hyper refused it before there was anything to judge.
pub fn refused_unread(metrics: &Metrics, client: IpAddr, status: StatusCode, reason: &hyper::Error) {
    const MALFORMED: &str = "malformed";
    let (nobody, nowhere) = (Name::default(), Name::default());
    let status = status.as_u16();
    metrics.request_ended(&RequestLabels {
        route: nowhere,
        tier: nobody.clone(),
        key: nobody,
        outcome: MALFORMED,
        status,
    });
    tracing::info!(target: "tollgate::access", %client, status, outcome = MALFORMED, %reason, "request");
}

/// The client's own id if it is a plain one, else a new one.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let is_plain = |value: &&HeaderValue| {
        value.len() <= MAX_REQUEST_ID_BYTES
            && !value.is_empty()
            && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    match headers.get(X_REQUEST_ID).filter(is_plain) {
        Some(kept) => kept.clone(),
        None => HeaderValue::try_from(Uuid::new_v4().simple().to_string())
            .expect("hexadecimal digits are visible ASCII"),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::metrics::KnownLabels;

    #[test]
    fn who_panics_is_not_taken_for_a_client_that_went_away() {
        let metrics = Arc::new(Metrics::new(false, &KnownLabels::default()));
        let begin = || {
            let client = std::net::Ipv4Addr::LOCALHOST.into();
            let (request, ()) = hyper::Request::new(()).into_parts();
            Exchange::begin(metrics.clone(), client, Cut::default(), &request)
        };
        drop(begin());
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _exchange = begin();
            panic!("a bug");
        }));
        assert!(panicked.is_err());
        for outcome in [CLIENT_GONE, PANICKED] {
            let text = metrics.exposition();
            let counted =
                text.lines().filter(|line| line.contains(&format!("outcome=\"{outcome}\""))).count();
            assert_eq!(counted, 1, "{text}");
        }
    }
}
