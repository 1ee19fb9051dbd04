//! The hub: the life of one request. The only file that knows the order of the stages.

use std::{
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};

use arc_swap::ArcSwap;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode, body::Incoming, header::EXPECT, http::request::Parts,
};
use jiff::Timestamp;
use tokio::time::Instant;

use crate::{
    answer,
    auth::{self, Principal},
    body::Body,
    config::Bounds,
    cors::Grant,
    cut::Cut,
    error::Error,
    exchange::{self, Exchange},
    forward, headers,
    hygiene::{self, HeadBounds, Protocol},
    keys::KeyId,
    limit::{Limiter, Outcome, Verdict},
    media::Media,
    metrics::Metrics,
    model::{self, Scanner},
    policy::{Policy, Tier},
    route::{Choice, Destination, Route},
    tunnel::Tunnel,
    upload::Upload,
    upload_session,
    upstream::{AnswerBody, Connections, EndpointStates, Switched},
};

/// An early answer waits for so much of the body, so that its client reads it instead of a reset.
const DRAIN: (u64, Duration) = (32 * 1024 * 1024, Duration::from_secs(5));

/// Strangers may send less before they are cut off.
const DRAIN_OF_STRANGERS: (u64, Duration) = (256 * 1024, Duration::from_secs(1));

/// What all workers share.
#[derive(Debug)]
pub struct Shared {
    /// The snapshot that requests are judged by.
    pub policy: ArcSwap<Policy>,
    /// What Prometheus sees.
    pub metrics: Arc<Metrics>,
    /// What a client may cost.
    pub bounds: Bounds,
    /// How the endpoints of upstreams fare, whichever policy names them.
    pub endpoints: EndpointStates,
    /// Where clients find this, without a slash at its end; nothing: where they say.
    pub public_url: Option<String>,
}

/// One worker's proxy: what it has for itself, and what it shares.
#[derive(Debug)]
pub struct Proxy {
    /// Shared by the workers.
    pub shared: Arc<Shared>,
    /// This worker's limiter.
    pub limiter: Limiter,
    /// This worker's connections to upstreams.
    pub connections: Connections,
}

/// What is known of the connection that a request came by.
#[derive(Clone, Debug)]
pub struct ConnInfo {
    /// The client's address.
    pub client: IpAddr,
    /// Says who ended it, where that was not the client.
    pub cut: Cut,
}

/// What becomes of a request that is not refused.
enum Handled {
    /// It has an upstream's answer, whose reader hears of so long a silence, where that is wanted.
    Answered { answer: Response<AnswerBody>, keepalive: Option<Duration> },
    /// Its upstream has switched to WebSocket on this connection.
    Switched(Response<()>, Box<Switched>),
    /// A browser asked whether a page may call, and it may.
    Preflight,
    /// Somebody asked whether we are there.
    Probe,
}

impl Proxy {
    /// Answers one request. Whatever happens, it is answered, logged and counted once. With the answer comes the tunnel
    /// that the connection is to become after it, if the answer says so.
    pub async fn serve(
        &self,
        conn: ConnInfo,
        request: Request<Incoming>,
    ) -> (Response<Body>, Option<Box<Tunnel>>) {
        let (head, incoming) = request.into_parts();
        let policy = self.shared.policy.load_full();
        let mut exchange = Exchange::begin(self.shared.metrics.clone(), conn.client, conn.cut, &head);
        let upload = Upload::new(incoming, self.shared.bounds.body_timeout);
        let grant = policy.cors.as_ref().map(|cors| cors.grant(&head));
        let waits_for_continue = head.headers.contains_key(EXPECT);
        let handled = {
            // Pinned here, for passed on by value it would weigh twice in every request's task.
            let stages = pin!(self.handle(&policy, &mut exchange, head, grant.as_ref(), &upload));
            unless_it_panics(stages).await
        };
        let (mut answer, tunnel) = match handled {
            Ok(Handled::Answered { answer, keepalive }) => {
                (answer::pass_on(answer, keepalive, &policy, exchange), None)
            }
            Ok(Handled::Switched(head, connection)) => {
                let (answer, tunnel) = answer::switch(head, *connection, &policy, exchange);
                (answer, Some(tunnel))
            }
            Ok(Handled::Preflight) => (answer::to_preflight(exchange), None),
            Ok(Handled::Probe) => (answer::to_probe(exchange), None),
            Err(error) => {
                if !waits_for_continue || upload.has_begun() {
                    let is_known = exchange.principal.is_some();
                    let (most, within) = if is_known { DRAIN } else { DRAIN_OF_STRANGERS };
                    upload.drain(most, within).await;
                }
                (answer::refuse(&error, &policy, exchange), None)
            }
        };
        if let Some(grant) = grant {
            grant.mark(answer.headers_mut());
        }
        (answer, tunnel)
    }

    /// Logs and counts a request whose head was none, so that no stage saw it. It was answered with its status.
    pub fn refused_unread(&self, client: IpAddr, error: &hyper::Error) {
        let status = if error.is_parse_too_large() {
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
        } else {
            StatusCode::BAD_REQUEST
        };
        exchange::refused_unread(&self.shared.metrics, client, status, error);
    }

    /// One request, in order. Each stage may refuse; `error.rs` turns the refusal into an answer.
    async fn handle(
        &self,
        policy: &Policy,
        exchange: &mut Exchange,
        mut head: Parts,
        grant: Option<&Grant>,
        upload: &Upload,
    ) -> Result<Handled, Error> {
        let protocol = hygiene::inspect(&head, self.head_bounds())?;

        // Browsers ask without a key whether they may send one, and who only asks whether we are there has none.
        if let Some(preflight) = grant.filter(|grant| grant.is_preflight()) {
            preflight.permit()?;
            return Ok(Handled::Preflight);
        }
        if policy.probes.include(&head.method, head.uri.path()) {
            return Ok(Handled::Probe);
        }
        let principal = auth::authenticate(&policy.keys, &head, Timestamp::now())?;
        exchange.authenticated(&principal, policy.tier(&principal), &head.headers);

        // What the head says costs nothing to ask for, so what it refuses must not use up the caller's limit.
        let is_empty = upload.is_empty();
        let destination = destination(policy, exchange, &head, is_empty)?;
        check_protocol(protocol, &destination)?;
        let media = media(&head, &principal);
        upload.hold_to(destination.most_bytes(media))?;

        let goes_on_uploading = principal.uploads_to.is_some();
        if goes_on_uploading || costs_nothing(policy, &destination, &head.method, is_empty) {
            exchange.uncounted();
        } else {
            self.admit(exchange, &principal.key, policy.tier(&principal)).await?;
        }

        // A client that waits for `100 Continue` gets it here at the earliest, where its body is first asked for.
        let route = match destination {
            Destination::Settled(route) => route,
            Destination::ByModel(choice) => self.choose(choice, exchange, &head, media, upload).await?,
        };

        if let Some(grant) = grant {
            grant.settle(&mut head.headers);
        }
        let upload_origin = upload_session::origin(&head, self.public_url(policy));
        forward::outgoing(&mut head, &route, &policy.keys, &exchange.request_id, exchange.client, is_empty);
        if protocol == Protocol::WebSocket {
            headers::switch_to_websocket(&mut head.headers);
        }
        let (upstream, attempts) = (&route.upstream, &mut exchange.attempts);
        let mut answer =
            self.connections.send(upstream, principal.uploads_to, head, upload, attempts).await?;
        exchange.named_by_upstream(answer.headers());
        forward::incoming(answer.headers_mut(), &route.upstream);
        if let Some(connection) = answer.body_mut().take_switched() {
            return Ok(Handled::Switched(answer.map(drop), connection));
        }
        if let Some(origin) = upload_origin {
            let mark = exchange.attempts.mark;
            lead_upload_back(answer.headers_mut(), &origin, (&route, mark), policy, &principal);
        }
        Ok(Handled::Answered { answer, keepalive: route.upstream.keepalive })
    }

    fn head_bounds(&self) -> HeadBounds {
        let Bounds { max_headers, max_header_size, .. } = self.shared.bounds;
        HeadBounds { fields: max_headers, bytes: max_header_size as usize }
    }

    /// Where the routes depend on the host, clients must stay at theirs.
    fn public_url(&self, policy: &Policy) -> Option<&str> {
        self.shared.public_url.as_deref().filter(|_| !policy.routes.asks_for_host())
    }

    async fn admit(&self, exchange: &mut Exchange, key: &KeyId, tier: &Tier) -> Result<(), Error> {
        let asked = Instant::now();
        let ruling = self.limiter.rule(key, &tier.limits).await;
        let admitted = match &ruling.outcome {
            Outcome::Uncounted => Ok(()),
            Outcome::Unavailable => Err(Error::StoreUnavailable),
            Outcome::Decided(decision) => match decision.verdict {
                Verdict::Admit => Ok(()),
                Verdict::Refuse { by, retry_after } => {
                    Err(Error::Refused { limit: tier.limits[by], by, retry_after })
                }
            },
        };
        exchange.ruled(tier, ruling, asked.elapsed());
        admitted
    }

    /// The route that the model in the body leads to. As much of the body is read as it takes to find that.
    async fn choose(
        &self,
        choice: Choice,
        exchange: &mut Exchange,
        head: &Parts,
        media: Media<'_>,
        upload: &Upload,
    ) -> Result<Route, Error> {
        let model = match Scanner::of_body(&head.headers) {
            Some(mut scanner) => {
                upload.look_ahead(self.shared.bounds.model_lookahead, |piece| scanner.feed(piece)).await?
            }
            None => None,
        };
        let route = choice.choose(model.as_deref())?;
        exchange.routed(&route);
        upload.hold_to(route.most_bytes(media))?;
        Ok(route)
    }
}

/// What kind of a body follows. The rest of an upload is a file, of which clients say nothing more.
fn media<'a>(head: &'a Parts, principal: &Principal) -> Media<'a> {
    match principal.uploads_to {
        Some(_) => Media::File,
        None => Media::of(&head.headers),
    }
}

/// Where the head alone leads. Its URL may name the model, which then need not be looked for in the body; and there is
/// none where there is no body.
fn destination(
    policy: &Policy,
    exchange: &mut Exchange,
    head: &Parts,
    body_is_empty: bool,
) -> Result<Destination, Error> {
    let mut destination = policy.routes.resolve(headers::host(head), head.uri.path())?;
    if let Destination::ByModel(choice) = &destination {
        exchange.could_go(&destination);
        let model = model::in_url(&head.method, &head.uri);
        if model.is_some() || body_is_empty {
            destination = Destination::Settled(choice.clone().choose(model.as_deref())?);
        }
    }
    if let Destination::Settled(route) = &destination {
        exchange.routed(route);
    }
    Ok(destination)
}

/// Whether no limit is asked, wherever the request goes.
fn costs_nothing(policy: &Policy, destination: &Destination, method: &Method, body_is_empty: bool) -> bool {
    destination.routes().all(|route| policy.uncounted.include(method, &route.path, body_is_empty))
}

/// A handshake has no body in which a model could stand, so its one route is known here.
fn check_protocol(protocol: Protocol, destination: &Destination) -> Result<(), Error> {
    let may_go = protocol == Protocol::Http || destination.routes().all(|route| route.upstream.websocket);
    if may_go { Ok(()) } else { Err(Error::WebSocketOff) }
}

/// A bug in a stage ends the request that met it, and no other on its connection. The state behind the stages is whole at
/// every await, and their locks are taken again after a panic.
async fn unless_it_panics<T>(
    mut stages: Pin<&mut impl Future<Output = Result<T, Error>>>,
) -> Result<T, Error> {
    std::future::poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| stages.as_mut().poll(cx)));
        polled.unwrap_or(Poll::Ready(Err(Error::Panicked)))
    })
    .await
}

/// The URL of an upload that begins becomes one that leads here and opens this upload without the key, at the endpoint
/// of the route that began it.
fn lead_upload_back(
    answer: &mut HeaderMap,
    origin: &str,
    (route, mark): (&Route, u32),
    policy: &Policy,
    principal: &Principal,
) {
    let now = Timestamp::now();
    if let Some(key) = policy.keys.named(principal.key.as_str(), now) {
        upload_session::lead_back(answer, origin, |url| route.own(url), mark, key, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_an_error_like_others() {
        let fine = async {
            tokio::task::yield_now().await;
            Ok(7)
        };
        assert_eq!(unless_it_panics(pin!(fine)).await.ok(), Some(7));
        let panics = async {
            tokio::task::yield_now().await;
            panic!("a bug")
        };
        let error = unless_it_panics::<()>(pin!(panics)).await.unwrap_err();
        assert_eq!((error.answer().status.as_u16(), error.answer().outcome), (500, "panicked"));
    }
}
