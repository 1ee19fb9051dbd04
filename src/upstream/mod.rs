//! The upstreams: sends a request over a pooled connection and hands back the answer as it comes.
//!
//! HTTP/1.1, one request at a time on a connection: a client that stops reading can then stall nobody but itself.

mod answer;
mod connect;
mod endpoint;
mod pool;
mod socket;

use std::{sync::Arc, time::Duration};

use hyper::{Request, Response, StatusCode, http::request::Parts};
use tokio::time::Instant;

pub use self::{
    answer::{AnswerBody, AnswerError},
    endpoint::Target,
};
use self::{
    endpoint::Endpoint,
    pool::{Connection, Pool},
};
use crate::upload::{Upload, UploadFailure};

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

/// The connections of one worker to all upstreams.
#[derive(Clone, Debug, Default)]
pub struct Upstreams {
    pool: Arc<Pool>,
}

impl Upstreams {
    /// Sends a request, whose head is ready but for where it goes, and waits for the head of the answer.
    ///
    /// A pooled connection may have been closed by the other side in the moment of its use. If so, before any byte of
    /// an answer, the request is sent once more over a fresh one.
    pub async fn send(
        &self,
        target: &Target,
        mut head: Parts,
        upload: &Upload,
    ) -> Result<Response<AnswerBody>, SendError> {
        target.endpoint.address(&mut head);
        let deadline = target.timeouts.total.map(|total| Instant::now() + total);
        let answer = match deadline {
            None => self.answer(target, head, upload).await?,
            Some(deadline) => tokio::time::timeout_at(deadline, self.answer(target, head, upload))
                .await
                .map_err(|_elapsed| SendError::TotalTimeout)??,
        };
        Ok(answer.map(|body| body.until(deadline)))
    }

    /// The answer from a pooled connection, or else from a fresh one.
    async fn answer(
        &self,
        target: &Target,
        head: Parts,
        upload: &Upload,
    ) -> Result<Response<AnswerBody>, SendError> {
        let endpoint = &target.endpoint;
        if let Some(pooled) = self.pool.take(endpoint.id) {
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
        let fresh = endpoint.origin.connect().await?;
        self.exchange(target, fresh, head, upload).await
    }

    /// Closes the connections that have been idle for too long.
    pub fn close_idle(&self) {
        self.pool.close_idle();
    }

    async fn exchange(
        &self,
        target: &Target,
        mut connection: Connection,
        head: Parts,
        upload: &Upload,
    ) -> Result<Response<AnswerBody>, SendError> {
        connection.heard.reset();
        let most = target.endpoint.origin.max_head;
        let sent = connection.sender.send_request(Request::from_parts(head, upload.body()));
        let answer = tokio::select! {
            answer = sent => answer.map_err(|error| send_error(error, upload, most))?,
            () = silence(upload, target.timeouts.first_byte) => return Err(SendError::FirstByteTimeout),
        };
        upload.forget();
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            // Nobody asked for it: upgrades are refused before.
            return Err(SendError::NotHttp);
        }
        target.watch_head(answer.headers());
        let Endpoint { id, origin, .. } = &target.endpoint;
        let lease = self.pool.lease(*id, origin.pool_idle_timeout, connection);
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

fn send_error(error: hyper::Error, upload: &Upload, max_head: usize) -> SendError {
    match upload.failure() {
        Some(UploadFailure::TooLarge(most)) => SendError::TooLarge(most),
        Some(UploadFailure::Stalled) => SendError::UploadStalled,
        Some(UploadFailure::Malformed) => SendError::UploadMalformed,
        Some(UploadFailure::Gone) => SendError::ClientGone,
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
