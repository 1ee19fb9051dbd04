//! The hub: the life of one request. The only file that knows the order of the stages.

use std::{
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use arc_swap::ArcSwap;
use http_body::Body as _;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{
        CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HeaderValue, RETRY_AFTER, SEC_WEBSOCKET_VERSION,
        WWW_AUTHENTICATE,
    },
    http::request::Parts,
};
use jiff::Timestamp;
use tokio::time::Instant;
use uuid::Uuid;

use crate::{
    auth::{self, Principal},
    body::{Body, Fixed},
    config::Bounds,
    cors::Grant,
    cut::Cut,
    dialect::ErrorBody,
    error::Error,
    event_body::{EventBody, Speaker},
    events::EventStream,
    exchange::{self, Exchange},
    forward,
    headers::{self, REQUEST_ID, X_REQUEST_ID},
    hygiene::{self, HeadBounds, Protocol},
    keys::KeyId,
    limit::{Limiter, Outcome, Verdict},
    media::Media,
    meter::MeteredBody,
    metrics::Metrics,
    model::{self, Scanner},
    policy::{Policy, Tier},
    probe,
    route::{Choice, Destination, Route},
    tunnel::Tunnel,
    upload::Upload,
    upload_session,
    upstream::{AnswerBody, EndpointStates, Switched, Upstreams},
};

/// An early answer waits for so much of the body, so that its client reads it instead of a reset.
const DRAIN: (u64, Duration) = (32 * 1024 * 1024, Duration::from_secs(5));

/// Strangers may send less before they are cut off.
const DRAIN_OF_STRANGERS: (u64, Duration) = (256 * 1024, Duration::from_secs(1));

/// A longer id of a request is replaced by one of our own.
const MAX_REQUEST_ID_BYTES: usize = 128;

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
    pub upstreams: Upstreams,
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
    /// It has an upstream's answer.
    Upstream(Response<EventBody<AnswerBody>>),
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
        let request_id = request_id(&head);
        let metrics = self.shared.metrics.clone();
        let mut exchange =
            Exchange::begin(metrics, conn.client, conn.cut, head.method.clone(), head.uri.path(), request_id);
        let upload = Upload::new(incoming, self.shared.bounds.body_timeout);
        let grant = policy.cors.as_ref().map(|cors| cors.grant(&head));
        let waits_for_continue = head.headers.contains_key(EXPECT);
        let wants_no_body = head.method == Method::HEAD;
        let handled = self.handle(&policy, &mut exchange, head, grant.as_ref(), &upload);
        let (mut answer, tunnel) = match unless_it_panics(handled).await {
            Ok(Handled::Upstream(answer)) => (pass_on(answer, &policy, exchange), None),
            Ok(Handled::Switched(head, connection)) => switch(head, *connection, &policy, exchange),
            Ok(Handled::Preflight) => (answer_preflight(exchange), None),
            Ok(Handled::Probe) => (answer_probe(exchange, wants_no_body), None),
            Err(error) => {
                if !waits_for_continue || upload.has_begun() {
                    let (most, within) =
                        if exchange.principal.is_some() { DRAIN } else { DRAIN_OF_STRANGERS };
                    upload.drain(most, within).await;
                }
                (refuse(&error, &policy, exchange, wants_no_body), None)
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
        exchange.authenticated(&principal, policy.tier(&principal));
        if let Some(retry) = headers::retry_count(&head.headers) {
            self.shared.metrics.client_tried(retry);
        }

        // What the head says costs nothing to ask for, so what it refuses must not use up the caller's limit.
        let nothing_follows = upload.body().is_end_stream();
        let destination = destination(policy, exchange, &head, nothing_follows)?;
        check_protocol(protocol, destination.routes())?;
        upload.hold_to(destination.most_bytes(media(&head, &principal)))?;

        let upload_origin = upload_session::origin(&head, self.public_url(policy));
        let counts = |route: &Route| !policy.uncounted.include(&head.method, &route.path, nothing_follows);
        if destination.routes().any(counts) && principal.uploads_to.is_none() {
            self.admit(exchange, &principal.key, policy.tier(&principal)).await?;
        } else {
            exchange.uncounted();
        }

        // A client that waits for `100 Continue` gets it here at the earliest, where its body is first asked for.
        let route = match destination {
            Destination::Settled(route) => route,
            Destination::ByModel(choice) => self.choose(choice, exchange, &head, upload, &principal).await?,
        };
        check_protocol(protocol, std::iter::once(&route))?;

        if let Some(grant) = grant {
            grant.settle(&mut head.headers);
        }
        let Exchange { request_id, client, .. } = &*exchange;
        forward::outgoing(&mut head, &route, &policy.keys, request_id, *client, nothing_follows);
        if protocol == Protocol::WebSocket {
            headers::switch_to_websocket(&mut head.headers);
        }
        let (target, attempts) = (&route.target, &mut exchange.attempts);
        let mut answer = self.upstreams.send(target, principal.uploads_to, head, upload, attempts).await?;
        exchange.named_by_upstream(answer.headers());
        forward::incoming(answer.headers_mut(), &route.target);
        if let Some(connection) = answer.body_mut().take_switched() {
            return Ok(Handled::Switched(answer.map(drop), connection));
        }
        if let Some(origin) = upload_origin {
            let mark = exchange.attempts.mark;
            lead_upload_back(answer.headers_mut(), &origin, (&route, mark), policy, &principal);
        }
        let answer = speak_between_events(answer, exchange, route.target.keepalive);
        Ok(Handled::Upstream(answer))
    }

    fn head_bounds(&self) -> HeadBounds {
        let Bounds { max_headers, max_header_size, .. } = self.shared.bounds;
        HeadBounds { fields: max_headers, bytes: max_header_size as usize }
    }

    /// Where the routes depend on the host, clients must stay at theirs.
    fn public_url(&self, policy: &Policy) -> Option<&str> {
        self.shared.public_url.as_deref().filter(|_| !policy.routes.asks_for_host())
    }

    /// The route that the model in the body leads to. As much of the body is read as it takes to find that.
    async fn choose(
        &self,
        choice: Choice,
        exchange: &mut Exchange,
        head: &Parts,
        upload: &Upload,
        principal: &Principal,
    ) -> Result<Route, Error> {
        let model = match Scanner::of_body(&head.headers) {
            Some(mut scanner) => {
                upload.look_ahead(self.shared.bounds.model_lookahead, |piece| scanner.feed(piece)).await?
            }
            None => None,
        };
        let route = choice.choose(model.as_deref())?;
        exchange.routed(&route);
        upload.hold_to(route.most_bytes(media(head, principal)))?;
        Ok(route)
    }

    async fn admit(&self, exchange: &mut Exchange, key: &KeyId, tier: &Tier) -> Result<(), Error> {
        let asked = Instant::now();
        let ruling = self.limiter.rule(key, &tier.limits).await;
        exchange.ruled(tier, &ruling, asked.elapsed());
        match ruling.outcome {
            Outcome::Uncounted => Ok(()),
            Outcome::Unavailable => Err(Error::StoreUnavailable),
            Outcome::Decided(decision) => match decision.verdict {
                Verdict::Admit => Ok(()),
                Verdict::Refuse { by, retry_after } => {
                    Err(Error::Refused { limit: tier.limits[by], by, retry_after })
                }
            },
        }
    }
}

/// What kind of a body follows. The rest of an upload is a file, of which clients say nothing more.
fn media<'a>(head: &'a Parts, principal: &Principal) -> Media<'a> {
    match principal.uploads_to {
        Some(_) => Media::File,
        None => Media::of(head.headers.get(CONTENT_TYPE)),
    }
}

/// Where the head alone leads. Its URL may name the model, which then need not be looked for in the body; and there is
/// none in the body of a request that has none.
fn destination(
    policy: &Policy,
    exchange: &mut Exchange,
    head: &Parts,
    nothing_follows: bool,
) -> Result<Destination, Error> {
    let mut destination = policy.routes.resolve(headers::host(head), head.uri.path())?;
    if let Destination::ByModel(choice) = &destination {
        exchange.could_go(&destination);
        let model = model::in_url(&head.method, &head.uri);
        if model.is_some() || nothing_follows {
            destination = Destination::Settled(choice.clone().choose(model.as_deref())?);
        }
    }
    if let Destination::Settled(route) = &destination {
        exchange.routed(route);
    }
    Ok(destination)
}

/// A bug in a stage ends the request that met it, and no other on its connection. The state behind the stages is whole at
/// every await, and their locks are taken again after a panic.
async fn unless_it_panics<T>(stages: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    let mut stages = pin!(stages);
    std::future::poll_fn(|cx| {
        let polled = catch_unwind(AssertUnwindSafe(|| stages.as_mut().poll(cx)));
        polled.unwrap_or(Poll::Ready(Err(Error::Panicked)))
    })
    .await
}

/// The upstream's answer. If it is an event stream, its reader hears of silence and of its break, in the stream's own words.
fn speak_between_events(
    answer: Response<AnswerBody>,
    exchange: &Exchange,
    keepalive: Option<Duration>,
) -> Response<EventBody<AnswerBody>> {
    let stream = EventStream::of_answer(answer.headers(), exchange.dialect, exchange.path());
    let speaker = stream
        .map(|stream| Speaker::new(stream, exchange.request_id.clone(), keepalive, exchange.cut().clone()));
    answer.map(|body| EventBody::new(body, speaker))
}

fn check_protocol<'a>(protocol: Protocol, mut routes: impl Iterator<Item = &'a Route>) -> Result<(), Error> {
    let may_go = protocol == Protocol::Http || routes.any(|route| route.target.websocket);
    if may_go { Ok(()) } else { Err(Error::WebSocketOff) }
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

/// The upstream's answer on its way to the client, with what the limits say in its head.
fn pass_on(
    answer: Response<EventBody<AnswerBody>>,
    policy: &Policy,
    mut exchange: Exchange,
) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    head.headers.entry(X_REQUEST_ID).or_insert(exchange.request_id.clone());
    set_statuses(&mut head.headers, policy, &exchange);
    head.version = hyper::Version::HTTP_11;
    exchange.answered(head.status, "answered", None);
    Response::from_parts(head, Body::Upstream(MeteredBody::new(body, exchange)))
}

/// The answer that ends the HTTP of its connection, and the tunnel that begins behind it.
fn switch(
    head: Response<()>,
    connection: Switched,
    policy: &Policy,
    mut exchange: Exchange,
) -> (Response<Body>, Option<Box<Tunnel>>) {
    let mut answer = head.map(|()| Body::Switched);
    let fields = answer.headers_mut();
    fields.entry(X_REQUEST_ID).or_insert(exchange.request_id.clone());
    set_statuses(fields, policy, &exchange);
    headers::switch_to_websocket(fields);
    exchange.answered(answer.status(), "answered", None);
    (answer, Some(Box::new(Tunnel::new(connection, exchange))))
}

/// The answer to a browser that asks for a page. What it allows comes into its head with the grant.
fn answer_preflight(mut exchange: Exchange) -> Response<Body> {
    let mut response = Response::new(());
    *response.status_mut() = StatusCode::NO_CONTENT;
    response.headers_mut().insert(X_REQUEST_ID, exchange.request_id.clone());
    exchange.answered(response.status(), "preflight", None);
    response.map(|()| Body::Fixed(MeteredBody::new(Fixed::new(""), exchange)))
}

fn answer_probe(mut exchange: Exchange, without_body: bool) -> Response<Body> {
    let mut response = Response::new(());
    let fields = response.headers_mut();
    fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    fields.insert(CONTENT_LENGTH, probe::ANSWER.len().into());
    exchange.answered(response.status(), exchange::PROBE, None);
    let body = Fixed::new(if without_body { "" } else { probe::ANSWER });
    response.map(|()| Body::Fixed(MeteredBody::new(body, exchange)))
}

/// An answer of our own, in the shape that the caller's SDK understands.
fn refuse(error: &Error, policy: &Policy, mut exchange: Exchange, without_body: bool) -> Response<Body> {
    let answer = error.answer();
    let text = exchange.dialect.error_body(&ErrorBody {
        status: answer.status.as_u16(),
        kind: answer.kind,
        message: &answer.message,
        request_id: exchange.request_id.to_str().unwrap_or_default(),
    });
    let mut response = Response::new(());
    *response.status_mut() = answer.status;
    let fields = response.headers_mut();
    fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    fields.insert(CONTENT_LENGTH, text.len().into());
    fields.insert(X_REQUEST_ID, exchange.request_id.clone());
    fields.insert(REQUEST_ID, exchange.request_id.clone());
    match (error, &exchange.principal) {
        (Error::Refused { by, retry_after, .. }, Some(principal)) => {
            headers::set_refusal(
                fields,
                &policy.tier(principal).field,
                &exchange.statuses,
                *by,
                *retry_after,
            );
        }
        (Error::StoreUnavailable, _) => drop(fields.insert(RETRY_AFTER, HeaderValue::from_static("1"))),
        _ => set_statuses(fields, policy, &exchange),
    }
    if answer.status == StatusCode::UNAUTHORIZED {
        // RFC 9110 §15.5.2: a 401 says what would open.
        fields.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if answer.status == StatusCode::UPGRADE_REQUIRED {
        // Clients of some APIs take this, and this alone, for the word to go on in plain HTTP. They do so at once.
        fields.insert(CONNECTION, HeaderValue::from_static("close"));
        fields.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
    }
    exchange.answered(answer.status, answer.outcome, Some(error.to_string()));
    let body = Fixed::new(if without_body { String::new() } else { text });
    response.map(|()| Body::Fixed(MeteredBody::new(body, exchange)))
}

fn set_statuses(fields: &mut HeaderMap, policy: &Policy, exchange: &Exchange) {
    if let Some(principal) = &exchange.principal {
        headers::set_statuses(fields, &policy.tier(principal).field, &exchange.statuses);
    }
}

/// The client's own id if it is a plain one, else a new one.
fn request_id(head: &Parts) -> HeaderValue {
    let is_plain = |value: &&HeaderValue| {
        value.len() <= MAX_REQUEST_ID_BYTES
            && !value.is_empty()
            && value.as_bytes().iter().all(u8::is_ascii_graphic)
    };
    match head.headers.get(X_REQUEST_ID).filter(is_plain) {
        Some(kept) => kept.clone(),
        None => HeaderValue::try_from(Uuid::new_v4().simple().to_string())
            .expect("hexadecimal digits are visible ASCII"),
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
        assert_eq!(unless_it_panics(fine).await.ok(), Some(7));
        let panics = async {
            tokio::task::yield_now().await;
            panic!("a bug")
        };
        let error = unless_it_panics::<()>(panics).await.unwrap_err();
        assert_eq!((error.answer().status.as_u16(), error.answer().outcome), (500, "panicked"));
    }
}
