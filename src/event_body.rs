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
    events::{EventStream, LastWords},
    upstream::AnswerError,
};

/// The body of an upstream's answer. One that is no event stream only passes.
#[derive(Debug)]
pub struct EventBody<B> {
    body: B,
    speaker: Option<Box<Speaker>>,
}

/// Who speaks between the upstream's events.
#[derive(Debug)]
pub struct Speaker {
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

impl Speaker {
    /// Speaks in `stream`: after so much silence, if that is wanted, at a break, and when the process stops.
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

    fn last_words(&self, error: &AnswerError) -> Option<LastWords> {
        let answer = error::broken_answer(error);
        self.stream.last_words(&ErrorBody {
            status: answer.status.as_u16(),
            kind: answer.kind,
            message: &answer.message,
            request_id: self.request_id.to_str().unwrap_or_default(),
        })
    }

    /// The stream breaks off. Either the break comes now, or first an event that tells of it.
    fn break_off(&mut self, error: AnswerError) -> Result<Frame<Bytes>, AnswerError> {
        match self.last_words(&error) {
            None => Err(error),
            Some(LastWords { event, end }) => {
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
    fn poll_sign_of_life(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        let Some(keepalive) = &mut self.keepalive else { return Poll::Pending };
        loop {
            let due = keepalive.heard + keepalive.after;
            let silence = keepalive.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
            ready!(silence.as_mut().poll(cx));
            if due <= Instant::now() {
                keepalive.heard = Instant::now();
                if let Some(words) = self.stream.sign_of_life() {
                    return Poll::Ready(words);
                }
            }
            silence.as_mut().reset(keepalive.heard + keepalive.after);
        }
    }
}

impl<B> EventBody<B> {
    /// Passes `body` on; the speaker, if there is one, speaks between its events.
    pub fn new(body: B, speaker: Option<Speaker>) -> Self {
        Self { body, speaker: speaker.map(Box::new) }
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
        let Some(speaker) = &mut this.speaker else { return Pin::new(&mut this.body).poll_frame(cx) };
        if let Some(ending) = speaker.end() {
            return Poll::Ready(Some(ending));
        }
        let frame = match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                frame.data_ref().into_iter().for_each(|data| speaker.passed(data));
                Some(Ok(frame))
            }
            Poll::Ready(Some(Err(error))) => Some(speaker.break_off(error)),
            Poll::Ready(None) => None,
            Poll::Pending if speaker.is_stopped() => Some(speaker.break_off(AnswerError::Stopped)),
            Poll::Pending => Some(Ok(Frame::data(ready!(speaker.poll_sign_of_life(cx))))),
        };
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        let has_said_all = |speaker: &Speaker| matches!(speaker.ending, Ending::NotYet);
        self.body.is_end_stream() && self.speaker.as_deref().is_none_or(has_said_all)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
