//! A connection that has become a tunnel: bytes pass both ways as they come, and nobody here understands them.
//!
//! Nothing of our own is ever put into it. Whoever ends it ends the connection, as a broken network would: WebSocket has
//! its own goodbye, and tells a connection that ended without it from one that ended well.

use std::{
    future::poll_fn,
    io,
    ops::Range,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use crate::{
    exchange::{Closing, Exchange},
    upstream::Switched,
};

/// Each way has so much under way at most; who sends more waits until the other side has taken it.
const BUFFER_BYTES: usize = 16 * 1024;

/// After one side has ended, the other may finish what it says, but not fall silent for so long.
const LAST_SILENCE: Duration = Duration::from_secs(1);

/// A client that goes on sending after the upstream has ended is heard for so long, for it has to read what came before
/// the end, and a reset would take that away.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// A tunnel whose client is not connected yet. The exchange that it comes from ends with it.
#[derive(Debug)]
pub struct Tunnel {
    upstream: Switched,
    exchange: Exchange,
}

impl Tunnel {
    /// The tunnel that an exchange has become.
    pub fn new(upstream: Switched, exchange: Exchange) -> Self {
        Self { upstream, exchange }
    }

    /// Passes bytes until both sides have ended, one breaks, or both are silent for too long. `early`: what the client
    /// sent before it had its answer.
    pub async fn run(self, mut client: impl AsyncRead + AsyncWrite + Unpin, early: Bytes) {
        let Self { upstream: Switched { upgrade, idle, .. }, mut exchange } = self;
        let mut upstream = match upgrade.await {
            Ok(upgraded) => TokioIo::new(upgraded),
            Err(error) => return exchange.closed(&Closing::UpstreamBroke(io::Error::other(error))),
        };
        let mut flows = Flows::new(early, idle, Instant::now());
        let mut clock = pin!(sleep_until(flows.deadline()));
        let closing = poll_fn(|cx| {
            let closing = flows.poll(cx, &mut client, &mut upstream);
            exchange.tunnelled(flows.down.passed, flows.up.passed);
            if closing.is_ready() {
                return closing;
            }
            ready!(poll_past(clock.as_mut(), cx, flows.deadline()));
            Poll::Ready(flows.silenced())
        });
        let closing = closing.await;
        exchange.closed(&closing);
    }
}

/// Ready past the deadline. A clock that was set for an earlier one is only set again when it rings, so that a deadline
/// which moves with every byte costs nothing.
fn poll_past(mut clock: Pin<&mut Sleep>, cx: &mut Context<'_>, deadline: Instant) -> Poll<()> {
    if deadline < clock.deadline() {
        clock.as_mut().reset(deadline);
    }
    loop {
        ready!(clock.as_mut().poll(cx));
        if deadline <= Instant::now() {
            return Poll::Ready(());
        }
        clock.as_mut().reset(deadline);
    }
}

/// Who ends.
#[derive(Clone, Copy, Debug)]
enum Side {
    Client,
    Upstream,
}

/// Both ways, and what time says of them.
#[derive(Debug)]
struct Flows {
    up: Flow,
    down: Flow,
    idle: Duration,
    last_progress: Instant,
    first_end: Option<(Side, Instant)>,
}

impl Flows {
    fn new(early: Bytes, idle: Duration, now: Instant) -> Self {
        Self {
            up: Flow::beginning_with(&early),
            down: Flow::beginning_with(&[]),
            idle,
            last_progress: now,
            first_end: None,
        }
    }

    /// Passes what can be passed. Ready when there is nothing more to pass.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin),
        upstream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    ) -> Poll<Closing> {
        let before = self.up.passed + self.down.passed;
        if let Poll::Ready(Err(error)) = self.up.poll(cx, client, upstream) {
            // What the upstream has said before still passes.
            (self.up.closed, self.down.broken) = (true, Some(error));
            self.first_end.get_or_insert_with(|| (Side::Upstream, Instant::now()));
        }
        if let Poll::Ready(Err(error)) = self.down.poll(cx, upstream, client) {
            return Poll::Ready(Closing::ClientGone(error));
        }
        if self.up.passed + self.down.passed > before {
            self.last_progress = Instant::now();
        }
        if self.up.closed || self.down.closed {
            let side = if self.up.closed { Side::Client } else { Side::Upstream };
            self.first_end.get_or_insert_with(|| (side, Instant::now()));
        }
        if self.up.closed && self.down.closed { Poll::Ready(self.ended()) } else { Poll::Pending }
    }

    /// Until then something has to pass.
    fn deadline(&self) -> Instant {
        let silent = self.last_progress + LAST_SILENCE;
        match self.first_end {
            // A client that does not take what waits for it is the business of its connection's pulse.
            Some((Side::Client, at)) if self.down.is_empty() => silent.max(at + LAST_SILENCE),
            Some((Side::Upstream, at)) => silent.max(at + LAST_SILENCE).min(at + LAST_WORDS),
            _ => self.last_progress + self.idle,
        }
    }

    /// The closing of a tunnel in which nothing passed before the deadline.
    fn silenced(&mut self) -> Closing {
        if self.first_end.is_some() { self.ended() } else { Closing::Idle }
    }

    fn ended(&mut self) -> Closing {
        match self.first_end {
            Some((Side::Upstream, _)) => {
                self.down.broken.take().map_or(Closing::ByUpstream, Closing::UpstreamBroke)
            }
            _ => self.up.broken.take().map_or(Closing::ByClient, Closing::ClientGone),
        }
    }
}

/// One way.
#[derive(Debug)]
struct Flow {
    buffer: Box<[u8]>,
    /// What was read and not written yet.
    waiting: Range<usize>,
    passed: u64,
    ended: bool,
    closed: bool,
    /// Why its source ended, where that was no orderly end.
    broken: Option<io::Error>,
}

impl Flow {
    fn beginning_with(early: &[u8]) -> Self {
        let mut buffer = vec![0; early.len().max(BUFFER_BYTES)];
        buffer[..early.len()].copy_from_slice(early);
        let buffer = buffer.into_boxed_slice();
        Self { buffer, waiting: 0..early.len(), passed: 0, ended: false, closed: false, broken: None }
    }

    fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Ready with the end of the source, which is passed on, or with an error of a sink that takes nothing more. The source
    /// is read only when the sink has taken what was read before.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        source: &mut (impl AsyncRead + Unpin),
        sink: &mut (impl AsyncWrite + Unpin),
    ) -> Poll<io::Result<()>> {
        while !self.closed {
            while !self.is_empty() {
                let written =
                    ready!(Pin::new(&mut *sink).poll_write(cx, &self.buffer[self.waiting.clone()]))?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.waiting.start += written;
                self.passed += written as u64;
            }
            if self.ended {
                // A sink that is gone already has no use for the end.
                let _ = ready!(Pin::new(&mut *sink).poll_shutdown(cx));
                self.closed = true;
            } else if self.poll_fill(cx, source).is_pending() {
                ready!(Pin::new(&mut *sink).poll_flush(cx))?;
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_fill(&mut self, cx: &mut Context<'_>, source: &mut (impl AsyncRead + Unpin)) -> Poll<()> {
        let mut buffer = ReadBuf::new(&mut self.buffer);
        let read = ready!(Pin::new(source).poll_read(cx, &mut buffer));
        self.waiting = 0..buffer.filled().len();
        self.ended = read.is_err() || self.waiting.is_empty();
        self.broken = read.err();
        Poll::Ready(())
    }
}
