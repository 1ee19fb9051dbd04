//! The body of an upstream's answer.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::{body::Incoming, upgrade::OnUpgrade};
use tokio::time::{Instant, Sleep};

use super::{pool::Lease, state::InFlight, with_causes};
use crate::upload::{Upload, UploadFailure};

/// The body of an answer: passed on as it comes, bounded in silence. At its end the connection goes back to the pool;
/// dropped before, it is closed, which tells the upstream to stop.
#[derive(Debug)]
pub struct AnswerBody {
    body: Incoming,
    lease: Option<Lease>,
    most_silence: Duration,
    silence: Option<Pin<Box<Sleep>>>,
    deadline: Option<Instant>,
    in_flight: Option<InFlight>,
    switched: Option<Box<Switched>>,
    /// The request's body, where its end had not been sent when the answer began.
    upload: Option<Upload>,
}

/// A connection to an upstream that speaks HTTP no more.
#[derive(Debug)]
pub struct Switched {
    /// Comes to the connection itself.
    pub upgrade: OnUpgrade,
    /// How long both sides may be silent.
    pub idle: Duration,
    pub(super) in_flight: Option<InFlight>,
}

/// Why an answer broke off.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The upstream ended it before it was complete.
    #[error("the upstream broke off: {}", with_causes(.0))]
    Broken(#[source] hyper::Error),
    /// The upstream ended its stream before the answer's end, and called that no error.
    #[error("the upstream broke off: its stream ended before its answer did")]
    CutShort,
    /// The request's body came to no good end, and the upstream's connection with it.
    #[error(transparent)]
    Upload(UploadFailure),
    /// The upstream sent nothing for too long.
    #[error("the upstream sent nothing for too long")]
    Stalled,
    /// The whole exchange took longer than one may.
    #[error("the exchange took too long")]
    TotalTimeout,
    /// This process ends, and did not wait for it any longer.
    #[error("the proxy stopped")]
    Stopped,
}

impl AnswerBody {
    pub(super) fn new(body: Incoming, lease: Lease, most_silence: Duration) -> Self {
        let mut this = Self { lease: Some(lease), ..Self::bare(body, most_silence) };
        this.release_at_end();
        this
    }

    fn bare(body: Incoming, most_silence: Duration) -> Self {
        let (lease, silence, deadline, in_flight, switched, upload) = (None, None, None, None, None, None);
        Self { body, lease, most_silence, silence, deadline, in_flight, switched, upload }
    }

    /// Counts as a request of its endpoint until it has passed.
    pub(super) fn count_as(&mut self, in_flight: Option<InFlight>) {
        match &mut self.switched {
            None => self.in_flight = in_flight,
            Some(switched) => switched.in_flight = in_flight,
        }
    }

    /// The empty body of an answer that ends the HTTP of its connection, which no pool gets back.
    pub(super) fn switched(body: Incoming, switched: Switched) -> Self {
        let switched_idle = switched.idle;
        Self { switched: Some(Box::new(switched)), ..Self::bare(body, switched_idle) }
    }

    /// Its upstream has begun to answer before all of the request was sent.
    pub(super) fn during(self, upload: &Upload) -> Self {
        Self { upload: (!upload.is_sent()).then(|| upload.clone()), ..self }
    }

    /// What the connection has become, where the upstream has switched protocols.
    pub fn take_switched(&mut self) -> Option<Box<Switched>> {
        self.switched.take()
    }

    /// Breaks it off at this instant, whatever passes then.
    pub(super) fn until(self, deadline: Option<Instant>) -> Self {
        Self { deadline, ..self }
    }

    fn is_overdue(&self) -> bool {
        self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }

    /// Ends when the upstream has had its time: to go on, or to be done.
    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<AnswerError> {
        let silence = self.silence.get_or_insert_with(|| {
            let end = Instant::now() + self.most_silence;
            Box::pin(tokio::time::sleep_until(self.deadline.map_or(end, |deadline| deadline.min(end))))
        });
        ready!(silence.as_mut().poll(cx));
        Poll::Ready(if self.is_overdue() { AnswerError::TotalTimeout } else { AnswerError::Stalled })
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
        if this.is_overdue() && !this.body.is_end_stream() {
            this.lease = None;
            return Poll::Ready(Some(Err(AnswerError::TotalTimeout)));
        }
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                this.silence = None;
                this.release_at_end();
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.lease = None;
                let failure = this.upload.as_ref().and_then(Upload::failure);
                Poll::Ready(Some(Err(failure.map_or(AnswerError::Broken(error), AnswerError::Upload))))
            }
            Poll::Ready(None) => match this.lease.take() {
                // hyper takes a stream that is reset with NO_ERROR for one that came to its end.
                Some(lease) if lease.is_of_stream() && !this.body.is_end_stream() => {
                    Poll::Ready(Some(Err(AnswerError::CutShort)))
                }
                lease => {
                    lease.into_iter().for_each(Lease::give_back);
                    Poll::Ready(None)
                }
            },
            Poll::Pending => {
                let error = ready!(this.poll_silence(cx));
                this.lease = None;
                Poll::Ready(Some(Err(error)))
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
