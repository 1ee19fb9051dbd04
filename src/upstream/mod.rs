//! The upstreams: sends a request over a pooled connection and hands back the answer as it comes.
//!
//! HTTP/1.1, one request at a time on a connection: a client that stops reading can then stall nobody but itself.

mod connect;
mod pool;
mod socket;

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::{Request, Response, StatusCode, body::Incoming, header::HeaderValue, http::request::Parts};
use tokio::time::{Instant, Sleep};

use self::pool::{Connection, Lease, Pool};
use crate::{
    config::{self, Credential},
    dialect::Dialect,
    tls::{self, TlsError},
    upload::{Upload, UploadFailure},
};

/// One upstream, as routes name it.
#[derive(Clone, Debug)]
pub struct Target {
    /// Tells its connections from those of every other target, a changed one of the same name included.
    id: u64,
    /// The name in logs and metrics.
    pub name: Arc<str>,
    /// The dialect, where it does not depend on the path.
    pub dialect: Option<Dialect>,
    /// What `Host` says.
    pub host: HeaderValue,
    /// Goes before every path; empty, or `/…` without a slash at its end.
    pub base_path: String,
    /// Set in place of the client's.
    pub credential: Option<Credential>,
    origin: connect::Origin,
    timeouts: Timeouts,
}

#[derive(Clone, Copy, Debug)]
struct Timeouts {
    connect: Duration,
    first_byte: Duration,
    idle: Duration,
    pool_idle: Duration,
}

/// Why an upstream gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// It could not be reached.
    #[error("connecting failed: {0}")]
    Connect(#[source] std::io::Error),
    /// Connecting took too long.
    #[error("connecting took too long")]
    ConnectTimeout,
    /// The connection broke before an answer came.
    #[error("the connection broke: {0}")]
    Exchange(#[source] hyper::Error),
    /// What came is no answer.
    #[error("the upstream did not answer in HTTP/1.1")]
    NotHttp,
    /// No answer came in time.
    #[error("no answer came in time")]
    FirstByteTimeout,
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

impl Target {
    /// The target of a configured upstream. Reads the certificates that it is trusted by.
    pub fn new(upstream: &config::Upstream) -> Result<Self, TlsError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let secure = upstream.url.scheme_str() == Some("https");
        let trust = if secure { Some(tls::upstream_config(upstream.ca_file.as_deref())?) } else { None };
        let authority = upstream.url.authority().map_or("", |authority| authority.as_str());
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            name: upstream.name.clone(),
            dialect: upstream.dialect,
            host: HeaderValue::from_str(authority).expect("an authority is visible ASCII"),
            base_path: upstream.url.path().trim_end_matches('/').to_owned(),
            credential: upstream.credential.clone(),
            origin: connect::Origin::new(&upstream.url, trust),
            timeouts: Timeouts {
                connect: upstream.connect_timeout,
                first_byte: upstream.first_byte_timeout,
                idle: upstream.idle_timeout,
                pool_idle: upstream.pool_idle_timeout,
            },
        })
    }

    /// A target that nobody connects to.
    #[cfg(test)]
    pub(crate) fn for_test(authority: &str) -> Self {
        let minute = Duration::from_secs(60);
        Self {
            id: 0,
            name: authority.into(),
            dialect: None,
            host: HeaderValue::from_str(authority).expect("tests give plain names"),
            base_path: String::new(),
            credential: None,
            origin: connect::Origin::new(&hyper::Uri::from_static("http://localhost"), None),
            timeouts: Timeouts { connect: minute, first_byte: minute, idle: minute, pool_idle: minute },
        }
    }
}

/// The connections of one worker to all upstreams.
#[derive(Clone, Debug, Default)]
pub struct Upstreams {
    pool: Arc<Pool>,
}

impl Upstreams {
    /// Sends a request and waits for the head of the answer.
    ///
    /// A pooled connection may have been closed by the other side in the moment of its use. If so, before any byte of
    /// an answer, the request is sent once more over a fresh one.
    pub async fn send(
        &self,
        target: &Target,
        head: Parts,
        upload: &Upload,
    ) -> Result<Response<AnswerBody>, SendError> {
        if let Some(pooled) = self.pool.take(target.id) {
            let heard = pooled.heard.clone();
            match self.exchange(target, pooled, head.clone(), upload).await {
                Err(SendError::Exchange(error))
                    if is_stale(&error) && !heard.anything() && upload.is_replayable() =>
                {
                    tracing::debug!(upstream = %target.name, %error, "a pooled connection was stale");
                }
                answer => return answer,
            }
        } else {
            upload.forget();
        }
        let fresh = self.connect(target).await?;
        self.exchange(target, fresh, head, upload).await
    }

    /// Closes the connections that have been idle for too long.
    pub fn close_idle(&self) {
        self.pool.close_idle();
    }

    async fn connect(&self, target: &Target) -> Result<Connection, SendError> {
        match tokio::time::timeout(target.timeouts.connect, target.origin.connect()).await {
            Ok(connected) => connected,
            Err(_elapsed) => Err(SendError::ConnectTimeout),
        }
    }

    async fn exchange(
        &self,
        target: &Target,
        mut connection: Connection,
        head: Parts,
        upload: &Upload,
    ) -> Result<Response<AnswerBody>, SendError> {
        connection.heard.reset();
        let sent = connection.sender.send_request(Request::from_parts(head, upload.body()));
        let answer = tokio::select! {
            answer = sent => answer.map_err(|error| send_error(error, upload))?,
            () = silence(upload, target.timeouts.first_byte) => return Err(SendError::FirstByteTimeout),
        };
        upload.forget();
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            // Nobody asked for it: upgrades are refused before.
            return Err(SendError::NotHttp);
        }
        let lease = self.pool.lease(target.id, target.timeouts.pool_idle, connection);
        Ok(answer.map(|body| AnswerBody::new(body, lease, target.timeouts.idle)))
    }
}

/// Whether a pooled connection was closed before it answered anything.
fn is_stale(error: &hyper::Error) -> bool {
    error.is_incomplete_message() || error.is_canceled() || error.is_closed() || is_reset(error)
}

fn is_reset(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<std::io::Error>());
    cause.is_some_and(socket::is_closed)
}

fn send_error(error: hyper::Error, upload: &Upload) -> SendError {
    match upload.failure() {
        Some(UploadFailure::TooLarge(most)) => SendError::TooLarge(most),
        Some(UploadFailure::Stalled) => SendError::UploadStalled,
        Some(UploadFailure::Malformed) => SendError::UploadMalformed,
        Some(UploadFailure::Gone) => SendError::ClientGone,
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

/// The body of an answer: passed on as it comes, bounded in silence. At its end the connection goes back to the pool;
/// dropped before, it is closed, which tells the upstream to stop.
#[derive(Debug)]
pub struct AnswerBody {
    body: Incoming,
    lease: Option<Lease>,
    most_silence: Duration,
    silence: Option<Pin<Box<Sleep>>>,
}

/// Why an answer broke off.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The upstream ended it before it was complete.
    #[error("the upstream broke off: {0}")]
    Broken(#[source] hyper::Error),
    /// The upstream sent nothing for too long.
    #[error("the upstream sent nothing for too long")]
    Stalled,
}

impl AnswerBody {
    fn new(body: Incoming, lease: Lease, most_silence: Duration) -> Self {
        let mut this = Self { body, lease: Some(lease), most_silence, silence: None };
        this.release_at_end();
        this
    }

    fn release_at_end(&mut self) {
        if self.body.is_end_stream()
            && let Some(lease) = self.lease.take()
        {
            lease.give_back();
        }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                this.silence = None;
                this.release_at_end();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.lease = None;
                Poll::Ready(Some(Err(AnswerError::Broken(error))))
            }
            Poll::Ready(None) => {
                this.lease.take().into_iter().for_each(Lease::give_back);
                Poll::Ready(None)
            }
            Poll::Pending => {
                let most = this.most_silence;
                let silence = this.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(most)));
                ready!(silence.as_mut().poll(cx));
                this.lease = None;
                Poll::Ready(Some(Err(AnswerError::Stalled)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
