//! The body of every answer: one that Tollgate made itself, or an upstream's as it passes.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};

use crate::{
    event_body::EventBody,
    meter::MeteredBody,
    upstream::{AnswerBody, AnswerError},
};

/// The body of an answer.
#[derive(Debug)]
pub enum Body {
    /// Made here, whole.
    Fixed(MeteredBody<Fixed>),
    /// An upstream's.
    Upstream(MeteredBody<EventBody<AnswerBody>>),
    /// None: what follows the head is a tunnel's.
    Switched,
}

/// Bytes that are all there.
#[derive(Debug)]
pub struct Fixed(Option<Bytes>);

impl Fixed {
    /// A body of these bytes.
    pub fn new(bytes: impl Into<Bytes>) -> Self {
        Self(Some(bytes.into()).filter(|bytes| !bytes.is_empty()))
    }
}

impl HttpBody for Fixed {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.0.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        match self.get_mut() {
            Self::Fixed(body) => Pin::new(body).poll_frame(cx),
            Self::Upstream(body) => Pin::new(body).poll_frame(cx),
            Self::Switched => Poll::Ready(None),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Fixed(body) => body.is_end_stream(),
            Self::Upstream(body) => body.is_end_stream(),
            Self::Switched => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Fixed(body) => body.size_hint(),
            Self::Upstream(body) => body.size_hint(),
            Self::Switched => SizeHint::with_exact(0),
        }
    }
}
