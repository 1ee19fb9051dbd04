//! Watches a body as it passes: counts its bytes and knows how it ended, whichever way that was.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

use crate::{exchange::Exchange, upstream::AnswerError};

/// Passes frames through untouched. The [`Exchange`] lives until the last byte and is told of the end: complete,
/// broken, or, by being dropped, gone with the client.
#[derive(Debug)]
pub struct MeteredBody<B> {
    body: B,
    exchange: Option<Exchange>,
}

impl<B: Body<Data = Bytes, Error = AnswerError>> MeteredBody<B> {
    /// Watches `body` on behalf of `exchange`.
    pub fn new(body: B, exchange: Exchange) -> Self {
        let mut this = Self { body, exchange: Some(exchange) };
        this.complete_at_end();
        this
    }

    /// hyper does not ask again after a body says that it has ended.
    fn complete_at_end(&mut self) {
        if self.body.is_end_stream()
            && let Some(exchange) = self.exchange.take()
        {
            exchange.complete();
        }
    }
}

impl<B: Body<Data = Bytes, Error = AnswerError> + Unpin> Body for MeteredBody<B> {
    type Data = Bytes;
    type Error = AnswerError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, AnswerError>>> {
        let this = &mut *self;
        let frame = std::task::ready!(Pin::new(&mut this.body).poll_frame(cx));
        match &frame {
            Some(Ok(frame)) => {
                if let (Some(exchange), Some(data)) = (&mut this.exchange, frame.data_ref()) {
                    exchange.sent(data.len());
                }
                this.complete_at_end();
            }
            Some(Err(error)) => this.exchange.take().into_iter().for_each(|exchange| exchange.broke(error)),
            None => this.exchange.take().into_iter().for_each(Exchange::complete),
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
