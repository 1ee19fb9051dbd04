//! Answers on their way to the client: what Tollgate says in the head of an upstream's answer, and the answers that it
//! makes itself. With each goes its exchange, which ends where the answer does.

use std::time::Duration;

use hyper::{
    HeaderMap, Response, StatusCode,
    header::{
        CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue, RETRY_AFTER, SEC_WEBSOCKET_VERSION,
        WWW_AUTHENTICATE,
    },
};

use crate::{
    body::{Body, Fixed},
    dialect::ErrorBody,
    error::Error,
    event_body::{EventBody, Injector},
    events::EventStream,
    exchange::{self, Exchange},
    headers::{self, REQUEST_ID, X_REQUEST_ID},
    meter::MeteredBody,
    policy::Policy,
    probe,
    tunnel::Tunnel,
    upstream::{AnswerBody, Switched},
};

/// The upstream's answer, with what the limits say in its head. If it is an event stream, its reader hears of silence for
/// so long as `keepalive`, and of a break, in the stream's own words.
pub fn pass_on(
    answer: Response<AnswerBody>,
    keepalive: Option<Duration>,
    policy: &Policy,
    mut exchange: Exchange,
) -> Response<Body> {
    let (mut head, body) = answer.into_parts();
    let stream = EventStream::of_answer(&head.headers, exchange.dialect, exchange.path());
    let injector = stream
        .map(|stream| Injector::new(stream, exchange.request_id.clone(), keepalive, exchange.cut().clone()));
    complete_head(&mut head.headers, policy, &exchange);
    head.version = hyper::Version::HTTP_11;
    exchange.answered(head.status, "answered", None);
    Response::from_parts(head, Body::Upstream(MeteredBody::new(EventBody::new(body, injector), exchange)))
}

/// The answer that ends the HTTP of its connection, and the tunnel that begins behind it.
pub fn switch(
    head: Response<()>,
    connection: Switched,
    policy: &Policy,
    mut exchange: Exchange,
) -> (Response<Body>, Box<Tunnel>) {
    let mut answer = head.map(|()| Body::Switched);
    let fields = answer.headers_mut();
    complete_head(fields, policy, &exchange);
    headers::switch_to_websocket(fields);
    exchange.answered(answer.status(), "answered", None);
    (answer, Box::new(Tunnel::new(connection, exchange)))
}

/// The answer to a browser that asks for a page. What it allows comes into its head with the grant.
pub fn to_preflight(mut exchange: Exchange) -> Response<Body> {
    let mut answer = Response::new(());
    *answer.status_mut() = StatusCode::NO_CONTENT;
    answer.headers_mut().insert(X_REQUEST_ID, exchange.request_id.clone());
    exchange.answered(answer.status(), "preflight", None);
    answer.map(|()| Body::Fixed(MeteredBody::new(Fixed::new(""), exchange)))
}

/// The answer to somebody who asks whether we are there.
pub fn to_probe(mut exchange: Exchange) -> Response<Body> {
    let mut answer = Response::new(());
    describe_json(answer.headers_mut(), probe::ANSWER);
    exchange.answered(answer.status(), exchange::PROBE, None);
    answer.map(|()| json(probe::ANSWER, exchange))
}

/// A refusal, in the shape that the caller's SDK understands.
pub fn refuse(error: &Error, policy: &Policy, mut exchange: Exchange) -> Response<Body> {
    let told = error.answer();
    let text = exchange.dialect.error_body(&ErrorBody {
        status: told.status.as_u16(),
        kind: told.kind,
        message: &told.message,
        request_id: exchange.request_id.to_str().unwrap_or_default(),
    });
    let mut answer = Response::new(());
    *answer.status_mut() = told.status;
    let fields = answer.headers_mut();
    describe_json(fields, &text);
    fields.insert(X_REQUEST_ID, exchange.request_id.clone());
    fields.insert(REQUEST_ID, exchange.request_id.clone());
    say_when_to_return(fields, error, policy, &exchange);
    if told.status == StatusCode::UNAUTHORIZED {
        // RFC 9110 §15.5.2: a 401 says what would open.
        fields.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if told.status == StatusCode::UPGRADE_REQUIRED {
        // Clients of some APIs take this, and this alone, for the word to go on in plain HTTP. They do so at once.
        fields.insert(CONNECTION, HeaderValue::from_static("close"));
        fields.insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
    }
    exchange.answered(told.status, told.outcome, Some(error.to_string()));
    answer.map(|()| json(text, exchange))
}

/// An upstream's id of the request, where it gives one, is the one that its own support asks for.
fn complete_head(fields: &mut HeaderMap, policy: &Policy, exchange: &Exchange) {
    fields.entry(X_REQUEST_ID).or_insert_with(|| exchange.request_id.clone());
    set_statuses(fields, policy, exchange);
}

fn say_when_to_return(fields: &mut HeaderMap, error: &Error, policy: &Policy, exchange: &Exchange) {
    match (error, &exchange.principal) {
        (Error::Refused { by, retry_after, .. }, Some(principal)) => {
            let names = &policy.tier(principal).field;
            headers::set_refusal(fields, names, &exchange.statuses, *by, *retry_after);
        }
        (Error::StoreUnavailable, _) => drop(fields.insert(RETRY_AFTER, HeaderValue::from_static("1"))),
        _ => set_statuses(fields, policy, exchange),
    }
}

fn set_statuses(fields: &mut HeaderMap, policy: &Policy, exchange: &Exchange) {
    if let Some(principal) = &exchange.principal {
        headers::set_statuses(fields, &policy.tier(principal).field, &exchange.statuses);
    }
}

fn describe_json(fields: &mut HeaderMap, text: &str) {
    fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    fields.insert(CONTENT_LENGTH, text.len().into());
}

/// The body that the head describes, unless the client asked for the head alone.
fn json(text: impl Into<bytes::Bytes>, exchange: Exchange) -> Body {
    let body = if exchange.wants_no_body() { Fixed::new("") } else { Fixed::new(text) };
    Body::Fixed(MeteredBody::new(body, exchange))
}
