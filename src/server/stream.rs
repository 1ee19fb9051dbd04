//! A TLS stream that tells its connection's pulse what passes, and that is closed with care.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Sleep,
};
use tokio_rustls::server::TlsStream;

use super::pulse::Pulse;

/// For so long, and so many bytes, a client that still sends is listened to after the last byte of its answer.
const LINGER: (Duration, usize) = (Duration::from_secs(2), 32 * 1024 * 1024);

pub(super) struct WatchedStream {
    stream: TlsStream<TcpStream>,
    pulse: Arc<Pulse>,
    linger: Option<Linger>,
}

struct Linger {
    end: Pin<Box<Sleep>>,
    left: usize,
}

impl WatchedStream {
    pub(super) fn new(stream: TlsStream<TcpStream>, pulse: Arc<Pulse>) -> Self {
        Self { stream, pulse, linger: None }
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

    fn note<T>(&self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match written {
            Poll::Pending => self.pulse.write_blocked(),
            Poll::Ready(_) => self.pulse.wrote(),
        }
        written
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
        if buf.filled().len() > before {
            self.pulse.read();
        }
        read
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.note(written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.note(flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        self.poll_linger(cx).map(Ok)
    }
}
