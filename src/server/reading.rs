//! The reader of one HTTP/2 stream, who may stop reading while the connection goes on.
//!
//! A stream whose window stays full waits inside hyper for ever: no byte is written, so the connection's pulse notices
//! nothing, and the answer's body is not asked again, so it can't end itself. Hence the task of the stream watches: its
//! body notes each piece that it hands over, and a task that waits with a piece in its hands waits for the reader.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::rt::Executor;
use pin_project_lite::pin_project;
use tokio::{
    task::futures::TaskLocalFuture,
    time::{Instant, Sleep},
};

use crate::cut::{Cut, Reason};

tokio::task_local! {
    /// The reader of the stream whose task this is.
    static READER: Reader;
}

/// Whether a piece was handed over, and is still waited with.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    /// Odd while a piece is out; changes with every piece.
    pieces: Arc<AtomicU64>,
    cut: Cut,
}

impl Reader {
    /// The reader of the stream whose task this is called in, if it is the task of one.
    pub(super) fn current() -> Option<Self> {
        READER.try_with(Self::clone).ok()
    }

    /// Says who ended the stream.
    pub(super) fn cut(&self) -> &Cut {
        &self.cut
    }

    fn asks(&self) {
        if self.pieces.load(Relaxed) % 2 == 1 {
            self.pieces.fetch_add(1, Relaxed);
        }
    }

    fn gets_a_piece(&self) {
        self.pieces.fetch_add(1, Relaxed);
    }

    /// The piece that is waited with, if there is one.
    fn waited_with(&self) -> Option<u64> {
        Some(self.pieces.load(Relaxed)).filter(|piece| piece % 2 == 1)
    }
}

/// Runs the streams of one connection, each in a task that ends it when its reader stops.
#[derive(Clone, Debug)]
pub(super) struct StreamExecutor {
    /// How long a reader may take nothing.
    pub(super) patience: Duration,
    /// Says who ended the connection.
    pub(super) cut: Cut,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, stream: F) {
        let reader = Reader { pieces: Arc::default(), cut: self.cut.part() };
        let stream = READER.scope(reader.clone(), stream);
        tokio::spawn(WatchedTask { stream, reader, patience: self.patience, waiting: None });
    }
}

pin_project! {
    /// Dropping hyper's task of a stream resets the stream.
    struct WatchedTask<F> {
        #[pin]
        stream: TaskLocalFuture<Reader, F>,
        reader: Reader,
        patience: Duration,
        waiting: Option<(u64, Pin<Box<Sleep>>)>,
    }
}

impl<F: Future<Output = ()>> Future for WatchedTask<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.stream.poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(piece) = this.reader.waited_with() else {
            *this.waiting = None;
            return Poll::Pending;
        };
        let patience = *this.patience;
        match this.waiting {
            Some((known, _)) if *known == piece => {}
            Some((known, sleep)) => {
                *known = piece;
                sleep.as_mut().reset(Instant::now() + patience);
            }
            None => *this.waiting = Some((piece, Box::pin(tokio::time::sleep(patience)))),
        }
        let (_, sleep) = this.waiting.as_mut().expect("it was just set");
        std::task::ready!(sleep.as_mut().poll(cx));
        this.reader.cut.because(Reason::Unread);
        Poll::Ready(())
    }
}

/// A body that tells the task of its stream when a piece is out.
#[derive(Debug)]
pub(super) struct ReadBody<B> {
    body: B,
    reader: Option<Reader>,
}

impl<B> ReadBody<B> {
    pub(super) fn new(body: B, reader: Option<Reader>) -> Self {
        Self { body, reader }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for ReadBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let this = &mut *self;
        let Some(reader) = &this.reader else { return Pin::new(&mut this.body).poll_frame(cx) };
        reader.asks();
        let frame = std::task::ready!(Pin::new(&mut this.body).poll_frame(cx));
        if matches!(frame, Some(Ok(_))) {
            reader.gets_a_piece();
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
