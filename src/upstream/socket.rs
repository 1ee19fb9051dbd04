//! A connection to an upstream that hears the other side out, and that knows how much there was to hear.
//!
//! An upstream that has seen enough of a request answers and closes, with the rest unread. The next write then fails,
//! and whoever stops there never reads the answer, which has arrived. So a failed write is not reported: what follows
//! is dropped, and reading tells how it ends.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::Notify,
};

/// What the other side has said.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard(Arc<Ear>);

#[derive(Debug, Default)]
struct Ear {
    bytes: AtomicU64,
    first: Notify,
}

impl Heard {
    /// How many bytes came so far.
    pub(super) fn bytes(&self) -> u64 {
        self.0.bytes.load(Relaxed)
    }

    /// Waits for the first byte. There is one who waits.
    pub(super) async fn first(&self) {
        self.0.first.notified().await;
    }

    /// One task alone reads, so nothing is lost between the two steps.
    fn hear(&self, bytes: usize) {
        let before = self.bytes();
        self.0.bytes.store(before + bytes as u64, Relaxed);
        if before == 0 && bytes > 0 {
            self.0.first.notify_one();
        }
    }
}

#[derive(Debug)]
pub(super) struct Socket<T> {
    io: T,
    heard: Heard,
    deaf: bool,
}

impl<T> Socket<T> {
    pub(super) fn new(io: T, heard: Heard) -> Self {
        Self { io, heard, deaf: false }
    }

    /// Takes note of a write that failed because the other side has closed, and hides it.
    fn unless_closed<R>(&mut self, written: io::Result<R>, all: R) -> io::Result<R> {
        match written {
            Err(error) if is_closed(&error) => {
                self.deaf = true;
                Ok(all)
            }
            written => written,
        }
    }
}

/// Whether the other side has closed or reset the connection.
pub(super) fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe)
}

impl<T: AsyncRead + Unpin> AsyncRead for Socket<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        self.heard.hear(buf.filled().len() - before);
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Socket<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.deaf {
            return Poll::Ready(Ok(buf.len()));
        }
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, buf));
        Poll::Ready(self.unless_closed(written, buf.len()))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all = bufs.iter().map(|buf| buf.len()).sum();
        if self.deaf {
            return Poll::Ready(Ok(all));
        }
        let written = ready!(Pin::new(&mut self.io).poll_write_vectored(cx, bufs));
        Poll::Ready(self.unless_closed(written, all))
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.deaf {
            return Poll::Ready(Ok(()));
        }
        let flushed = ready!(Pin::new(&mut self.io).poll_flush(cx));
        Poll::Ready(self.unless_closed(flushed, ()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
