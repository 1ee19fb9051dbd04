//! The attempts of one request, until one of them is its answer. Nothing has reached the client before that.

use std::{sync::Arc, time::Duration};

use hyper::{Response, StatusCode, header::UPGRADE, http::request::Parts};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{
    AnswerBody, Connections, Failed, SendError,
    endpoint::Upstream,
    failover::{Attempt, Failover},
    retry_after,
};
use crate::{config::RetryOn, headers::CREDENTIAL_SLOTS, upload::Upload};

/// Before an endpoint gets the same request again.
const PAUSE: Duration = Duration::from_millis(100);

/// What was tried for one request, for its record.
#[derive(Debug, Default)]
pub struct Attempts {
    /// How many there were.
    pub count: u32,
    /// The name of the endpoint that was tried last.
    pub endpoint: Option<Arc<str>>,
    /// What it is recognized by, on every replica and after a reload.
    pub mark: u32,
    /// The name of its upstream, where that stands in for the one that the route names.
    pub fallback: Option<Arc<str>>,
}

impl Attempts {
    fn note(&mut self, attempt: &Attempt<'_>, route: &Upstream) {
        self.count += 1;
        self.endpoint = Some(attempt.endpoint.state.name().clone());
        self.mark = attempt.endpoint.mark;
        self.fallback = (!std::ptr::eq(attempt.upstream, route)).then(|| attempt.upstream.name.clone());
    }
}

/// What became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Any answer but those below.
    Answered,
    /// The provider's 429.
    TooManyRequests,
    /// An answer that another endpoint may better.
    ServerError,
    /// No connection, or no handshake.
    Connect,
    /// No answer in time.
    Timeout,
    /// The connection broke before the head of an answer was complete, or that made no sense.
    Broken,
    /// The client's body went wrong.
    Client,
    /// The client went away, or its request has had all of its time.
    Abandoned,
}

impl Outcome {
    /// All there are, in the order of their declaration.
    pub(super) const ALL: [Self; 8] = [
        Self::Answered,
        Self::TooManyRequests,
        Self::ServerError,
        Self::Connect,
        Self::Timeout,
        Self::Broken,
        Self::Client,
        Self::Abandoned,
    ];

    /// The metric's label.
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::TooManyRequests => "429",
            Self::ServerError => "5xx",
            Self::Connect => "connect",
            Self::Timeout => "timeout",
            Self::Broken => "broken",
            Self::Client => "client_failed",
            Self::Abandoned => "abandoned",
        }
    }

    fn of(sent: &Result<Response<AnswerBody>, Failed>) -> Self {
        match sent {
            Ok(answer) => Self::of_status(answer.status()),
            Err(failed) => match failed.error {
                SendError::Connect(_) | SendError::ConnectTimeout | SendError::TlsTimeout => Self::Connect,
                SendError::FirstByteTimeout | SendError::TotalTimeout => Self::Timeout,
                SendError::Exchange(_) | SendError::NotHttp | SendError::HeadTooLarge(_) => Self::Broken,
                SendError::TooLarge(_) | SendError::UploadStalled | SendError::UploadMalformed => {
                    Self::Client
                }
                SendError::ClientGone => Self::Abandoned,
            },
        }
    }

    /// 529 is how Anthropic says that it is overloaded.
    fn of_status(status: StatusCode) -> Self {
        match status.as_u16() {
            429 => Self::TooManyRequests,
            500 | 502 | 503 | 504 | 529 => Self::ServerError,
            _ => Self::Answered,
        }
    }

    fn kind(self) -> Option<RetryOn> {
        match self {
            Self::Connect => Some(RetryOn::Connect),
            Self::Timeout => Some(RetryOn::Timeout),
            Self::Broken => Some(RetryOn::Broken),
            Self::TooManyRequests => Some(RetryOn::TooManyRequests),
            Self::ServerError => Some(RetryOn::ServerError),
            Self::Answered | Self::Client | Self::Abandoned => None,
        }
    }
}

/// One attempt that is over.
struct Tried {
    result: Result<Response<AnswerBody>, SendError>,
    /// As what it may be tried again; never after a byte of something that was no whole head.
    kind: Option<RetryOn>,
}

impl Connections {
    /// Sends a request, whose head is ready but for where it goes, and waits for the head of the answer. Where that fails
    /// in a way that another attempt may mend, it is sent elsewhere. An answer that nothing betters is the answer.
    /// `only_at`: the mark of the one endpoint that can answer it, if there still is one.
    pub async fn send(
        &self,
        upstream: &Upstream,
        only_at: Option<u32>,
        head: Parts,
        upload: &Upload,
        attempts: &mut Attempts,
    ) -> Result<Response<AnswerBody>, SendError> {
        let deadline = upstream.total_timeout.map(|total| Instant::now() + total);
        let sending = self.send_until_answered(upstream, only_at, head, upload, attempts);
        let answer = match deadline {
            None => sending.await,
            Some(deadline) => {
                tokio::time::timeout_at(deadline, sending).await.unwrap_or(Err(SendError::TotalTimeout))
            }
        };
        upload.forget();
        Ok(answer?.map(|body| body.until(deadline)))
    }

    async fn send_until_answered(
        &self,
        upstream: &Upstream,
        only_at: Option<u32>,
        head: Parts,
        upload: &Upload,
        attempts: &mut Attempts,
    ) -> Result<Response<AnswerBody>, SendError> {
        if let Some(retry) = &upstream.retry {
            upload.keep_at_most(retry.max_body);
        }
        // Its 429 is about the client's own key, and nothing that others should hear of.
        let is_private =
            !upstream.has_credential() && CREDENTIAL_SLOTS.iter().any(|slot| head.headers.contains_key(slot));
        let mut failover = Failover::new(upstream, head.headers.contains_key(UPGRADE), Instant::now());
        let mut attempt = only_at.and_then(|mark| failover.only(mark)).unwrap_or_else(|| failover.first());
        let mut earlier = None;
        while failover.may_go_on() {
            attempts.note(&attempt, upstream);
            let id = attempt.endpoint.id;
            let tried = self.make(attempt, head.clone(), upload, (is_private, false)).await;
            let next = if failover.goes_on_after(tried.kind) && upload.is_replayable() {
                failover.next(id)
            } else {
                None
            };
            let Some(next) = next else { return or_earlier(tried.result, earlier) };
            // Where the rest of the body has not been sent, its connection breaks as soon as it is sent elsewhere.
            earlier = tried.result.ok().filter(|_| upload.is_sent()).or(earlier);
            if next.again {
                tokio::time::sleep(PAUSE).await;
            }
            attempt = next;
        }
        attempts.note(&attempt, upstream);
        or_earlier(self.make(attempt, head, upload, (is_private, true)).await.result, earlier)
    }

    async fn make(
        &self,
        attempt: Attempt<'_>,
        head: Parts,
        upload: &Upload,
        (is_private, is_last): (bool, bool),
    ) -> Tried {
        let sent = self.send_to(attempt.endpoint, head, upload, is_last).await;
        let outcome = Outcome::of(&sent);
        let is_pause = |_: &&Response<AnswerBody>| outcome == Outcome::TooManyRequests && !is_private;
        let refused = sent.as_ref().ok().filter(is_pause);
        let pause = refused.and_then(|answer| retry_after::pause(answer.headers(), Timestamp::now()));
        let in_flight = attempt.sending.settle(outcome, pause);
        match sent {
            Ok(mut answer) => {
                answer.body_mut().count_as(in_flight);
                Tried { result: Ok(answer), kind: outcome.kind() }
            }
            Err(Failed { error, heard }) => {
                Tried { result: Err(error), kind: outcome.kind().filter(|_| !heard) }
            }
        }
    }
}

/// An upstream's own words are worth more to the client than ours about another one.
fn or_earlier(
    result: Result<Response<AnswerBody>, SendError>,
    earlier: Option<Response<AnswerBody>>,
) -> Result<Response<AnswerBody>, SendError> {
    result.or_else(|error| earlier.ok_or(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_stand_at_their_own_index() {
        for (index, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index);
        }
        assert_eq!(Outcome::of_status(StatusCode::from_u16(529).unwrap()), Outcome::ServerError);
        for status in [200, 301, 400, 404, 501, 505] {
            assert_eq!(
                Outcome::of_status(StatusCode::from_u16(status).unwrap()),
                Outcome::Answered,
                "{status}"
            );
        }
    }
}
