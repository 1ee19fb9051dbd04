//! A connection to an upstream that hears the other side out, and that knows whether there was anything to hear.
//!
//! An upstream that has seen enough of a request answers and closes, with the rest unread. The next write then fails,
//! and whoever stops there never reads the answer, which has arrived. So a failed write is not reported: what follows
//! is dropped, and reading tells how it ends.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Whether the other side has said anything since this was reset.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard(Arc<AtomicBool>);

impl Heard {
    pub(super) fn reset(&self) {
        self.0.store(false, Relaxed);
    }

    pub(super) fn anything(&self) -> bool {
        self.0.load(Relaxed)
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
        if buf.filled().len() > before {
            self.heard.0.store(true, Relaxed);
        }
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
