//! What of an answer has been flushed, so that an answer that breaks off takes nothing back.
//!
//! hyper ends a connection or a stream as soon as a body fails, with the pieces that it still holds. So a failure is
//! kept until all that was handed over before it is with the kernel.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    task::{Context, Poll, Waker, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};

/// What one connection has written.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    /// How often everything that was written has left.
    flushes: AtomicU64,
    /// Whether something was written since.
    behind: AtomicBool,
    waits: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Flushes {
    /// The connection writes.
    pub(super) fn wrote(&self) {
        self.behind.store(true, Relaxed);
    }

    /// All of it has left.
    pub(super) fn flushed(&self) {
        self.behind.store(false, Relaxed);
        self.flushes.fetch_add(1, Relaxed);
        if self.waits.swap(false, SeqCst) {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    fn count(&self) -> u64 {
        self.flushes.load(Relaxed)
    }

    /// Ends when all has left that was written since there had been so many flushes, and all that was written with it.
    fn poll_flushed_since(&self, flushes: u64, cx: &Context<'_>) -> Poll<()> {
        if self.count() > flushes && !self.behind.load(Relaxed) {
            return Poll::Ready(());
        }
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(cx.waker().clone());
        self.waits.store(true, SeqCst);
        Poll::Pending
    }
}

/// A body whose failure comes after its pieces have left.
#[derive(Debug)]
pub(super) struct FlushedBody<B: Body> {
    body: B,
    flushes: Arc<Flushes>,
    last_piece: LastPiece,
    failure: Option<B::Error>,
}

/// Where the last piece of an answer is, of which the head is the first. hyper asks for the next as soon as it has
/// written one.
#[derive(Clone, Copy, Debug)]
enum LastPiece {
    HandedOver,
    /// Written after so many flushes.
    Written(u64),
}

impl<B: Body> FlushedBody<B> {
    pub(super) fn new(body: B, flushes: Arc<Flushes>) -> Self {
        Self { body, flushes, last_piece: LastPiece::HandedOver, failure: None }
    }
}

impl<B: Body<Data = Bytes, Error: Unpin> + Unpin> Body for FlushedBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        if matches!(this.last_piece, LastPiece::HandedOver) {
            this.last_piece = LastPiece::Written(this.flushes.count());
        }
        if this.failure.is_none() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Err(failure)) => this.failure = Some(failure),
                frame => {
                    this.last_piece = LastPiece::HandedOver;
                    return Poll::Ready(frame);
                }
            }
        }
        if let LastPiece::Written(flushes) = this.last_piece {
            ready!(this.flushes.poll_flushed_since(flushes, cx));
        }
        Poll::Ready(this.failure.take().map(Err))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_has_left_when_nothing_of_it_is_behind() {
        let flushes = Flushes::default();
        let cx = Context::from_waker(Waker::noop());
        let has_left = |since| flushes.poll_flushed_since(since, &cx).is_ready();
        assert!(!has_left(0), "nothing has left yet");
        flushes.wrote();
        flushes.flushed();
        assert!(has_left(0) && !has_left(1));
        flushes.wrote();
        assert!(!has_left(0), "a part of it may be what was written now");
        flushes.flushed();
        assert!(has_left(0) && has_left(1));
    }
}
