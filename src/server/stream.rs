//! A TLS stream that tells its connection's pulse what passes, that notices a client who is gone also while nobody reads,
//! and that is closed with care.
//!
//! A client that closes its side, with a FIN or a reset, is taken for gone. Whoever reads sees that; but hyper does not
//! read while a byte of a next request waits, or while the upstream takes nothing of an upload. Then the kernel is asked
//! from time to time, for it knows of an end behind the bytes that nobody has read.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::{Instant, Sleep},
};
use tokio_rustls::server::TlsStream;

use super::{flush::Flushes, pulse::Pulse};

/// How often the kernel is asked whether a client is gone to whom nobody listens.
const LOOK: Duration = Duration::from_millis(400);

/// For so long, and so many bytes, a client that still sends is listened to after the last byte of its answer.
const LINGER: (Duration, usize) = (Duration::from_secs(2), 32 * 1024 * 1024);

pub(super) struct WatchedStream {
    stream: TlsStream<TcpStream>,
    pulse: Arc<Pulse>,
    flushes: Arc<Flushes>,
    /// Whether the last read brought something, and nobody has read on since.
    unread: bool,
    next_look: Option<Pin<Box<Sleep>>>,
    /// Whether each way ends for itself, as in a tunnel.
    one_way: bool,
    linger: Option<Linger>,
}

struct Linger {
    end: Pin<Box<Sleep>>,
    left: usize,
}

impl WatchedStream {
    pub(super) fn new(stream: TlsStream<TcpStream>, pulse: Arc<Pulse>, flushes: Arc<Flushes>) -> Self {
        Self { stream, pulse, flushes, unread: false, next_look: None, one_way: false, linger: None }
    }

    /// From here on each way ends for itself: a client that has closed its own is not gone, and what it sends after the
    /// other is shut down can still be read.
    pub(super) fn close_one_way(&mut self) {
        self.one_way = true;
    }

    /// Fails when the client of a request that is under way is gone, as far as the kernel knows. hyper flushes whenever it
    /// has done what it can, so this is asked in time.
    fn look_for_the_end(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if !self.unread || !self.pulse.has_requests() {
            return Ok(());
        }
        let next_look = self.next_look.get_or_insert_with(|| Box::pin(tokio::time::sleep(LOOK)));
        while next_look.as_mut().poll(cx).is_ready() {
            if is_gone(self.stream.get_ref().0, self.one_way, cx) {
                return Err(io::Error::new(io::ErrorKind::ConnectionReset, "the client is gone"));
            }
            next_look.as_mut().reset(Instant::now() + LOOK);
        }
        Ok(())
    }

    /// Reads and drops what still comes, encrypted as it is, until the client closes too. A socket that is closed with
    /// bytes unread resets the connection, and a client that is reset may never see the answer that was sent before.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let linger = self
            .linger
            .get_or_insert_with(|| Linger { end: Box::pin(tokio::time::sleep(LINGER.0)), left: LINGER.1 });
        let socket = self.stream.get_ref().0;
        let mut dropped = [0; 4096];
        while linger.left > 0 && linger.end.as_mut().poll(cx).is_pending() {
            if ready!(socket.poll_read_ready(cx)).is_err() {
                break;
            }
            match socket.try_read(&mut dropped) {
                Ok(0) => break,
                Ok(bytes) => linger.left = linger.left.saturating_sub(bytes),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
        Poll::Ready(())
    }

    fn note<T>(&mut self, written: Poll<io::Result<T>>, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        self.flushes.wrote();
        if written.is_pending() {
            self.look_for_the_end(cx)?;
        }
        self.note_progress(written)
    }

    fn note_progress<T>(&self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match written {
            Poll::Pending => self.pulse.write_blocked(),
            Poll::Ready(_) => self.pulse.wrote(),
        }
        written
    }
}

/// What the driver has heard of the socket says it without a call: an end is never taken back. `one_way`: a client that
/// has closed its own side is not gone, and one that has reset both is.
fn is_gone(socket: &TcpStream, one_way: bool, cx: &mut Context<'_>) -> bool {
    let readiness = std::pin::pin!(socket.ready(Interest::READABLE | Interest::WRITABLE));
    match readiness.poll(cx) {
        Poll::Ready(Ok(ready)) if one_way => ready.is_write_closed(),
        Poll::Ready(Ok(ready)) => ready.is_read_closed(),
        Poll::Ready(Err(_)) => true,
        Poll::Pending => false,
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.unread = buf.filled().len() > before;
        if self.unread {
            self.pulse.read();
        }
        read
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.note(written, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.note(written, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.look_for_the_end(cx)?;
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.flushes.flushed();
        }
        self.note_progress(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        if self.one_way {
            return Poll::Ready(Ok(()));
        }
        self.poll_linger(cx).map(Ok)
    }
}
