//! An event stream on its way to the client: its bytes pass untouched, and between its events it is said that the
//! upstream is silent but alive, or that it broke off.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::header::HeaderValue;
use tokio::time::{Instant, Sleep};

use crate::{
    cut::{Cut, Reason},
    dialect::ErrorBody,
    error,
    events::{ErrorEvent, EventStream},
    upstream::AnswerError,
};

/// The body of an upstream's answer. One that is no event stream only passes.
#[derive(Debug)]
pub struct EventBody<B> {
    body: B,
    injector: Option<Box<Injector>>,
}

/// Puts keepalives and an error event of ours between the upstream's events.
#[derive(Debug)]
pub struct Injector {
    stream: EventStream,
    request_id: HeaderValue,
    keepalive: Option<Keepalive>,
    cut: Cut,
    ending: Ending,
}

#[derive(Debug)]
struct Keepalive {
    after: Duration,
    /// When the client last heard anything.
    heard: Instant,
    silence: Option<Pin<Box<Sleep>>>,
}

/// What still comes when the upstream has broken off.
#[derive(Debug)]
enum Ending {
    NotYet,
    /// The end of the error event. It goes by itself: HTTP/2 takes a piece as soon as there is room for its first byte,
    /// so that a last piece of one line end tells that there was room for all of the event.
    EndOfEvent(Bytes, AnswerError),
    Break(AnswerError),
}

impl Injector {
    /// Puts events into `stream`: after so much silence, if that is wanted, at a break, and when the process stops.
    pub fn new(stream: EventStream, request_id: HeaderValue, keepalive: Option<Duration>, cut: Cut) -> Self {
        let keepalive = keepalive.map(|after| Keepalive { after, heard: Instant::now(), silence: None });
        Self { stream, request_id, keepalive, cut, ending: Ending::NotYet }
    }

    fn is_stopped(&self) -> bool {
        self.cut.reason() == Some(Reason::Stopping)
    }

    fn passed(&mut self, bytes: &[u8]) {
        self.stream.passed(bytes);
        if let Some(keepalive) = &mut self.keepalive {
            keepalive.heard = Instant::now();
        }
    }

    fn error_event(&self, error: &AnswerError) -> Option<ErrorEvent> {
        let answer = error::broken_answer(error);
        self.stream.error_event(&ErrorBody {
            status: answer.status.as_u16(),
            kind: answer.kind,
            message: &answer.message,
            request_id: self.request_id.to_str().unwrap_or_default(),
        })
    }

    /// The stream breaks off. Either the break comes now, or first an event that tells of it.
    fn break_off(&mut self, error: AnswerError) -> Result<Frame<Bytes>, AnswerError> {
        match self.error_event(&error) {
            None => Err(error),
            Some(ErrorEvent { event, end }) => {
                self.ending = Ending::EndOfEvent(end, error);
                Ok(Frame::data(event))
            }
        }
    }

    /// What is left to say once the event was begun.
    fn end(&mut self) -> Option<Result<Frame<Bytes>, AnswerError>> {
        match std::mem::replace(&mut self.ending, Ending::NotYet) {
            Ending::NotYet => None,
            Ending::EndOfEvent(end, error) => {
                self.ending = Ending::Break(error);
                Some(Ok(Frame::data(end)))
            }
            Ending::Break(error) => Some(Err(error)),
        }
    }

    /// Something to say, when the client has heard nothing for long enough.
    fn poll_keepalive(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        let Some(keepalive) = &mut self.keepalive else { return Poll::Pending };
        loop {
            let due = keepalive.heard + keepalive.after;
            let silence = keepalive.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            ready!(silence.as_mut().poll(cx));
            if due <= Instant::now() {
                keepalive.heard = Instant::now();
                if let Some(words) = self.stream.keepalive() {
                    return Poll::Ready(words);
                }
            }
            silence.as_mut().reset(keepalive.heard + keepalive.after);
        }
    }
}

impl<B> EventBody<B> {
    /// Passes `body` on; the injector, if there is one, puts events between its own.
    pub fn new(body: B, injector: Option<Injector>) -> Self {
        Self { body, injector: injector.map(Box::new) }
    }
}

impl<B: Body<Data = Bytes, Error = AnswerError> + Unpin> Body for EventBody<B> {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        let this = &mut *self;
        let Some(injector) = &mut this.injector else { return Pin::new(&mut this.body).poll_frame(cx) };
        if let Some(ending) = injector.end() {
            return Poll::Ready(Some(ending));
        }
        let frame = match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                frame.data_ref().into_iter().for_each(|data| injector.passed(data));
                Some(Ok(frame))
            }
            Poll::Ready(Some(Err(error))) => Some(injector.break_off(error)),
            Poll::Ready(None) => None,
            Poll::Pending if injector.is_stopped() => Some(injector.break_off(AnswerError::Stopped)),
            Poll::Pending => Some(Ok(Frame::data(ready!(injector.poll_keepalive(cx))))),
        };
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let has_said_all = |injector: &Injector| matches!(injector.ending, Ending::NotYet);
        self.body.is_end_stream() && self.injector.as_deref().is_none_or(has_said_all)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
