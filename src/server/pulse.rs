//! The pulse of a connection: what its client did last, and when its time is up.
//!
//! hyper has no timer for an idle HTTP/2 connection and none for a client that does not read, and its timer for
//! HTTP/1.1 can't tell a slow head from an idle connection. So the stream notes what passes, requests note that they
//! are there, and one timer a connection looks at both.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use crate::config::Bounds;

/// How long a connection that has nothing more to do may take to say goodbye.
pub(super) const GOODBYE: Duration = Duration::from_secs(1);

/// What a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Why a connection's time is up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Expiry {
    /// No request came, or not all of its head.
    SlowHead,
    /// Nothing to do for too long.
    Idle,
    /// The client does not take what is written.
    WriteStalled,
    /// The process drains, and nothing is under way.
    Drained,
}

impl Expiry {
    /// Those that are the client's doing.
    pub(super) const OF_CLIENTS: [Self; 3] = [Self::SlowHead, Self::Idle, Self::WriteStalled];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::SlowHead => "slow_head",
            Self::Idle => "idle",
            Self::WriteStalled => "write_stalled",
            Self::Drained => "drained",
        }
    }
}

/// Times are milliseconds since the connection began, plus one; zero means that it did not happen.
#[derive(Debug)]
pub(super) struct Pulse {
    protocol: Protocol,
    began: Instant,
    head: Duration,
    idle: Duration,
    write: Duration,
    requests: AtomicUsize,
    head_began: AtomicU64,
    idle_since: AtomicU64,
    write_stalled_since: AtomicU64,
    draining_since: AtomicU64,
}

impl Pulse {
    pub(super) fn new(protocol: Protocol, bounds: &Bounds) -> Self {
        let idle = match protocol {
            Protocol::Http1 => bounds.idle_timeout,
            Protocol::Http2 => bounds.idle_timeout * 4,
        };
        Self {
            protocol,
            began: Instant::now(),
            head: bounds.header_timeout,
            idle,
            write: bounds.write_timeout,
            requests: AtomicUsize::new(0),
            // The handshake is over, and the first request is due.
            head_began: AtomicU64::new(1),
            idle_since: AtomicU64::new(0),
            write_stalled_since: AtomicU64::new(0),
            draining_since: AtomicU64::new(0),
        }
    }

    pub(super) fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Bytes came. On an idle HTTP/1.1 connection they are the beginning of a head; on HTTP/2 they can be anything.
    pub(super) fn read(&self) {
        if self.protocol == Protocol::Http1 && !self.has_requests() && self.head_began.load(Relaxed) == 0 {
            self.head_began.store(self.now(), Relaxed);
        }
    }

    /// The client took something.
    pub(super) fn wrote(&self) {
        if self.write_stalled_since.load(Relaxed) != 0 {
            self.write_stalled_since.store(0, Relaxed);
        }
    }

    /// The client takes nothing at present.
    pub(super) fn write_blocked(&self) {
        if self.write_stalled_since.load(Relaxed) == 0 {
            self.write_stalled_since.store(self.now(), Relaxed);
        }
    }

    /// From now on only what is under way is waited for, and a moment for what is on the wire.
    pub(super) fn drain(&self) {
        self.draining_since.store(self.now(), Relaxed);
    }

    /// A head is complete. The request lasts as long as what is returned.
    pub(super) fn request_begun(self: &Arc<Self>) -> Begun {
        self.requests.fetch_add(1, Relaxed);
        self.head_began.store(0, Relaxed);
        Begun(self.clone())
    }

    /// Whether a request is under way.
    pub(super) fn has_requests(&self) -> bool {
        self.requests.load(Relaxed) > 0
    }

    /// Ends when the client's time is up.
    pub(super) async fn expiry(&self) -> Expiry {
        loop {
            // Nothing wakes this when something begins, so it looks again before the shortest bound can have passed.
            let shortest = self.head.min(self.write).min(self.idle);
            let draining = self.draining_since.load(Relaxed) > 0;
            let look_again = Instant::now() + if draining { shortest.min(GOODBYE) } else { shortest };
            let wake_at = match self.deadline() {
                Some((deadline, expiry)) if deadline <= Instant::now() => return expiry,
                Some((deadline, _)) => deadline.min(look_again),
                None => look_again,
            };
            tokio::time::sleep_until(wake_at).await;
        }
    }

    fn deadline(&self) -> Option<(Instant, Expiry)> {
        let at = |since: u64, most: Duration, expiry: Expiry| {
            (since > 0).then(|| (self.began + Duration::from_millis(since - 1) + most, expiry))
        };
        let stalled = at(self.write_stalled_since.load(Relaxed), self.write, Expiry::WriteStalled);
        if self.has_requests() {
            return stalled;
        }
        let idle_since = self.idle_since.load(Relaxed);
        let head = at(self.head_began.load(Relaxed), self.head, Expiry::SlowHead);
        let idle = at(idle_since, self.idle, Expiry::Idle);
        let draining_since = self.draining_since.load(Relaxed);
        let since = if draining_since == 0 { 0 } else { draining_since.max(idle_since) };
        let drained = at(since, GOODBYE, Expiry::Drained);
        [stalled, head, idle, drained].into_iter().flatten().min_by_key(|(at, _)| *at)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_millis() as u64 + 1
    }
}

/// A request that has not ended.
#[derive(Debug)]
pub(super) struct Begun(Arc<Pulse>);

impl Clone for Begun {
    /// One that lasts as long as the longer of both.
    fn clone(&self) -> Self {
        self.0.request_begun()
    }
}

impl Begun {
    pub(super) fn until_the_end_of<B>(self, body: B) -> Lasting<B> {
        Lasting { body, _begun: self }
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let pulse = &self.0;
        pulse.idle_since.store(pulse.now(), Relaxed);
        pulse.requests.fetch_sub(1, Relaxed);
    }
}

/// A body that keeps its request begun until its last byte.
#[derive(Debug)]
pub(super) struct Lasting<B> {
    body: B,
    _begun: Begun,
}

impl<B: Body + Unpin> Body for Lasting<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
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

    fn pulse(protocol: Protocol) -> Arc<Pulse> {
        let seconds = Duration::from_secs;
        let bounds = Bounds {
            max_connections: 1,
            max_connections_per_ip: 1,
            max_streams: 1,
            max_header_size: 1,
            max_headers: 256,
            model_lookahead: 1,
            handshake_timeout: seconds(1),
            header_timeout: seconds(10),
            idle_timeout: seconds(75),
            body_timeout: seconds(1),
            write_timeout: seconds(60),
        };
        Arc::new(Pulse::new(protocol, &bounds))
    }

    async fn expires(pulse: &Pulse) -> (Expiry, u64) {
        let began = Instant::now();
        (pulse.expiry().await, began.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_request_is_due_soon() {
        for protocol in [Protocol::Http1, Protocol::Http2] {
            assert_eq!(expires(&pulse(protocol)).await, (Expiry::SlowHead, 10));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_must_be_finished_and_trickling_does_not_help() {
        let pulse = pulse(Protocol::Http1);
        drop(pulse.request_begun());
        tokio::time::advance(Duration::from_secs(33)).await;
        pulse.read();
        tokio::time::advance(Duration::from_secs(4)).await;
        pulse.read();
        assert_eq!(expires(&pulse).await, (Expiry::SlowHead, 6));
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_connection_is_kept_for_a_while() {
        for (protocol, seconds) in [(Protocol::Http1, 75), (Protocol::Http2, 300)] {
            let pulse = pulse(protocol);
            drop(pulse.request_begun());
            assert_eq!(expires(&pulse).await, (Expiry::Idle, seconds));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_waits_for_requests_and_a_moment_for_what_is_on_the_wire() {
        for protocol in [Protocol::Http1, Protocol::Http2] {
            let silent = pulse(protocol);
            silent.drain();
            assert_eq!(expires(&silent).await, (Expiry::Drained, 1));
            let busy = pulse(protocol);
            let begun = busy.request_begun();
            busy.drain();
            let hours = tokio::time::timeout(Duration::from_secs(7200), busy.expiry()).await;
            assert!(hours.is_err());
            drop(begun);
            assert_eq!(expires(&busy).await, (Expiry::Drained, 1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_ping_does_not_look_like_a_slow_head() {
        let pulse = pulse(Protocol::Http2);
        drop(pulse.request_begun());
        pulse.read();
        assert_eq!(expires(&pulse).await, (Expiry::Idle, 300));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_may_last_but_its_reader_may_not_stop() {
        let pulse = pulse(Protocol::Http1);
        let begun = pulse.request_begun();
        let hours = tokio::time::timeout(Duration::from_secs(7200), pulse.expiry()).await;
        assert!(hours.is_err());
        pulse.write_blocked();
        tokio::time::advance(Duration::from_secs(20)).await;
        pulse.write_blocked();
        assert_eq!(expires(&pulse).await, (Expiry::WriteStalled, 40));
        pulse.wrote();
        assert!(tokio::time::timeout(Duration::from_secs(600), pulse.expiry()).await.is_err());
        drop(begun);
    }
}
