//! The upstreams: sends a request over a pooled connection and hands back the answer as it comes.
//!
//! HTTP/1.1, one request at a time on a connection: a client that stops reading can then stall nobody but itself. HTTP/2
//! where it is asked for.

mod answer;
mod attempts;
mod balance;
mod connect;
mod dial;
mod endpoint;
mod failover;
mod health;
mod http2;
mod pool;
mod proxy;
mod retry_after;
mod socket;
mod state;

use std::{sync::Arc, time::Duration};

use hyper::{
    HeaderMap, Request, Response, StatusCode, body::Incoming, header::UPGRADE, http::request::Parts,
};
use tokio::time::Instant;

pub use self::{
    answer::{AnswerBody, AnswerError, Switched},
    attempts::Attempts,
    connect::ConnectError,
    endpoint::Upstream,
    proxy::ProxyError,
    state::EndpointStates,
};
use self::{
    endpoint::Endpoint,
    pool::{Connection, Pool},
    socket::Heard,
};
use crate::upload::{Upload, UploadFailure};

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// It could not be reached.
    #[error("connecting failed: {0}")]
    Connect(#[from] ConnectError),
    /// Connecting took too long.
    #[error("connecting took too long")]
    ConnectTimeout,
    /// The TLS handshake took too long.
    #[error("the TLS handshake took too long")]
    TlsTimeout,
    /// The connection broke before an answer came.
    #[error("the connection broke: {}", with_causes(.0))]
    Exchange(#[source] hyper::Error),
    /// What came is no answer.
    #[error("what the upstream sent is no answer in HTTP")]
    NotHttp,
    /// The head of what came has more bytes than this, or more than 100 fields.
    #[error(
        "the head of the answer has more than {0} bytes or 100 fields; `max_answer_header_size` of the upstream bounds the bytes"
    )]
    HeadTooLarge(usize),
    /// No answer came in time.
    #[error("no answer came in time")]
    FirstByteTimeout,
    /// The exchange took longer than one may, before an answer came.
    #[error("no answer came within the time for the whole exchange")]
    TotalTimeout,
    /// The client sent more than is allowed, in bytes.
    #[error("the request body is larger than {0} bytes")]
    TooLarge(u64),
    /// The client stopped sending.
    #[error("the request body stalled")]
    UploadStalled,
    /// The client sent no valid body.
    #[error("the request body is malformed")]
    UploadMalformed,
    /// The client went away while it sent the body.
    #[error("the client went away during its upload")]
    ClientGone,
}

/// An endpoint gave no answer.
struct Failed {
    error: SendError,
    /// It had begun to say something.
    heard: bool,
}

/// The connections of one worker to all upstreams.
#[derive(Clone, Debug, Default)]
pub struct Connections {
    pool: Arc<Pool>,
}

impl Connections {
    /// Sends a request to an endpoint and waits for the head of the answer.
    ///
    /// A pooled connection may have been closed by the other side in the moment of its use, and a shared one may be told
    /// that it takes no more. If so, before any byte of an answer, the request is sent once more over another one.
    async fn send_to(
        &self,
        endpoint: &Endpoint,
        mut head: Parts,
        upload: &Upload,
        is_last: bool,
    ) -> Result<Response<AnswerBody>, Failed> {
        endpoint.address(&mut head);
        if head.headers.contains_key(UPGRADE) {
            let alone = endpoint.origin.connect_alone().await.map_err(unheard)?;
            let hearing = Hearing::at(&alone);
            return self.exchange(endpoint, alone, head, upload).await.map_err(|error| hearing.failed(error));
        }
        let pooled = self.pool.take(endpoint.id);
        let reused = pooled.is_some();
        let mut connection = match pooled {
            Some(pooled) => pooled,
            None => self.connect(endpoint).await?,
        };
        if reused || connection.is_shared() {
            let hearing = Hearing::at(&connection);
            match self.exchange(endpoint, connection, head.clone(), upload).await {
                Err(SendError::Exchange(error))
                    if upload.is_replayable()
                        && (http2::was_not_processed(&error)
                            || reused && is_stale(&error) && !hearing.has_heard_anything()) =>
                {
                    tracing::debug!(endpoint = %endpoint.state.name(), %error, "a pooled connection was stale");
                }
                answer => return answer.map_err(|error| hearing.failed(error)),
            }
            connection = self.connect(endpoint).await?;
        } else if is_last {
            upload.keep_for_one_more();
        }
        let hearing = Hearing::at(&connection);
        self.exchange(endpoint, connection, head, upload).await.map_err(|error| hearing.failed(error))
    }

    async fn connect(&self, endpoint: &Endpoint) -> Result<Connection, Failed> {
        self.pool.connect(endpoint.id, &endpoint.origin).await.map_err(unheard)
    }

    /// Closes the connections that have been idle for too long.
    pub fn close_idle(&self) {
        self.pool.close_idle();
    }

    async fn exchange(
        &self,
        endpoint: &Endpoint,
        mut connection: Connection,
        mut head: Parts,
        upload: &Upload,
    ) -> Result<Response<AnswerBody>, SendError> {
        let most = endpoint.origin.max_head;
        let asks_to_switch = head.headers.contains_key(UPGRADE);
        if connection.is_shared() {
            endpoint.origin.address_in_full(&mut head);
        }
        let sent = connection.send(Request::from_parts(head, upload.body()));
        let answer = tokio::select! {
            answer = sent => answer.map_err(|error| send_error(error, upload, most))?,
            () = silence(upload, endpoint.timeouts.first_byte) => return Err(SendError::FirstByteTimeout),
        };
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            return switch(answer, asks_to_switch, endpoint.timeouts.websocket_idle);
        }
        endpoint.watch_head(answer.headers());
        let Endpoint { id, origin, .. } = endpoint;
        let lease = self.pool.lease(*id, origin.pool_idle_timeout, connection);
        Ok(answer.map(|body| AnswerBody::new(body, lease, endpoint.timeouts.idle).during(upload)))
    }
}

/// Listens from the moment in which a request is sent.
struct Hearing {
    heard: Heard,
    before: u64,
    /// Nothing but the answer can come.
    alone: bool,
}

impl Hearing {
    fn at(connection: &Connection) -> Self {
        let heard = connection.heard.clone();
        Self { before: heard.bytes(), heard, alone: !connection.is_shared() }
    }

    fn has_heard_anything(&self) -> bool {
        self.heard.bytes() > self.before
    }

    /// By a connection that is shared comes what others have asked for, and what keeps it alive. There a head comes as a
    /// whole or not at all.
    fn failed(&self, error: SendError) -> Failed {
        Failed { error, heard: self.alone && self.has_heard_anything() }
    }
}

/// A failure before anything came.
fn unheard(error: SendError) -> Failed {
    Failed { error, heard: false }
}

/// An error of hyper and what is behind it, of which its own message says nothing.
fn with_causes(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// Nobody but who asked for a WebSocket gets one, and nothing else.
fn switch(
    mut answer: Response<Incoming>,
    asked: bool,
    idle: Duration,
) -> Result<Response<AnswerBody>, SendError> {
    if !asked || !names_websocket(answer.headers()) {
        return Err(SendError::NotHttp);
    }
    let switched = Switched { upgrade: hyper::upgrade::on(&mut answer), idle, in_flight: None };
    Ok(answer.map(|body| AnswerBody::switched(body, switched)))
}

fn names_websocket(headers: &HeaderMap) -> bool {
    headers.get(UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// Whether a pooled connection was closed before it answered anything.
fn is_stale(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_canceled() || error.is_closed() || is_reset(error)
}

fn is_reset(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<std::io::Error>());
    cause.is_some_and(socket::is_closed)
}

impl From<UploadFailure> for SendError {
    fn from(failure: UploadFailure) -> Self {
        match failure {
            UploadFailure::TooLarge(most) => Self::TooLarge(most),
            UploadFailure::Stalled => Self::UploadStalled,
            UploadFailure::Malformed => Self::UploadMalformed,
            UploadFailure::Gone => Self::ClientGone,
        }
    }
}

fn send_error(error: hyper::Error, upload: &Upload, max_head: usize) -> SendError {
    match upload.failure() {
        Some(failure) => failure.into(),
        None if error.is_parse_too_large() => SendError::HeadTooLarge(max_head),
        None if error.is_parse() => SendError::NotHttp,
        None => SendError::Exchange(error),
    }
}

/// Ends when nothing of the request has been passed on for so long.
async fn silence(upload: &Upload, most: Duration) {
    loop {
        let end = upload.last_progress() + most;
        tokio::time::sleep_until(end).await;
        if upload.last_progress() + most <= Instant::now() {
            return;
        }
    }
}
