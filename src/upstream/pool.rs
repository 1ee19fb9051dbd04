//! Connections to upstreams, of one worker: those that wait for their next request, and those that many requests share.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use hyper::{Request, Response, body::Incoming, client::conn::http1};
use tokio::time::{Instant, timeout};

use super::{
    SendError,
    connect::Origin,
    http2::{Shared, Stream},
    socket::Heard,
};
use crate::upload::UploadBody;

/// What carries one request at a time: a connection, or a stream of one.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) sender: Sender,
    /// What came by the connection, for other streams too.
    pub(super) heard: Heard,
}

#[derive(Debug)]
pub(super) enum Sender {
    Http1(http1::SendRequest<UploadBody>),
    Http2(Stream),
}

impl Connection {
    /// Sends a request and waits for the head of its answer. Dropped before, it tells the upstream to stop.
    pub(super) async fn send(&mut self, request: Request<UploadBody>) -> hyper::Result<Response<Incoming>> {
        match &mut self.sender {
            Sender::Http1(sender) => sender.send_request(request).await,
            Sender::Http2(stream) => stream.send(request).await,
        }
    }

    /// Whether others use the connection at the same time.
    pub(super) fn is_shared(&self) -> bool {
        matches!(self.sender, Sender::Http2(_))
    }
}

/// More idle connections to one upstream than this are closed.
const MOST_IDLE: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<HashMap<u64, Kept>>);

/// The connections to one endpoint.
#[derive(Debug, Default)]
struct Kept {
    /// HTTP/1.1, the most recently used last.
    idle: Vec<Idle>,
    /// HTTP/2.
    shared: Vec<(Shared, Duration)>,
    /// Held by the one who makes a connection that others wait for.
    turn: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct Idle {
    sender: http1::SendRequest<UploadBody>,
    heard: Heard,
    until: Instant,
}

impl Idle {
    fn is_usable(&self, now: Instant) -> bool {
        now < self.until && !self.sender.is_closed()
    }
}

impl Kept {
    fn close_idle(&mut self, now: Instant) {
        self.idle.retain(|idle| idle.is_usable(now));
        self.close_idle_shared(now);
    }

    fn close_idle_shared(&mut self, now: Instant) {
        self.shared.retain(|(shared, most_idle)| shared.is_alive(*most_idle, now));
    }

    fn open_stream(&self) -> Option<Connection> {
        let stream = self.shared.iter().find_map(|(shared, _)| shared.open())?;
        Some(Connection { heard: stream.connection().heard.clone(), sender: Sender::Http2(stream) })
    }

    /// One that still uploads the end of its last request is not ready. Those that were used longer ago than the one that
    /// is taken are left to the sweep.
    fn take_idle(&mut self, now: Instant) -> Option<Connection> {
        for latest in (0..self.idle.len()).rev() {
            let idle = &self.idle[latest];
            let is_usable = idle.is_usable(now);
            if is_usable && !idle.sender.is_ready() {
                continue;
            }
            let Idle { sender, heard, .. } = self.idle.remove(latest);
            if is_usable {
                return Some(Connection { sender: Sender::Http1(sender), heard });
            }
        }
        None
    }

    fn is_forgotten(&self) -> bool {
        self.idle.is_empty() && self.shared.is_empty() && Arc::strong_count(&self.turn) == 1
    }
}

impl Pool {
    /// A stream of a connection that has room, or else the most recently used connection that is ready.
    pub(super) fn take(&self, endpoint: u64) -> Option<Connection> {
        let mut pool = self.kept();
        let kept = pool.get_mut(&endpoint)?;
        let now = Instant::now();
        kept.close_idle_shared(now);
        kept.open_stream().or_else(|| kept.take_idle(now))
    }

    /// A connection that has not been in use, or a stream of one that somebody else has made in the meantime, within the
    /// origin's `connect_timeout`.
    pub(super) async fn connect(&self, endpoint: u64, origin: &Origin) -> Result<Connection, SendError> {
        let connecting = async {
            if origin.shares() {
                self.connect_in_turn(endpoint, origin).await
            } else {
                origin.connect().await
            }
        };
        // In a box, for it is large and rare: no request that finds a connection carries it along.
        match timeout(origin.connect_timeout, Box::pin(connecting)).await {
            Ok(connected) => connected,
            Err(_elapsed) => Err(SendError::ConnectTimeout),
        }
    }

    /// Requests that come at the same time wait for one connection and share it.
    async fn connect_in_turn(&self, endpoint: u64, origin: &Origin) -> Result<Connection, SendError> {
        let turn = self.kept().entry(endpoint).or_default().turn.clone();
        let turn = turn.lock().await;
        if let Some(made) = self.kept().get(&endpoint).and_then(Kept::open_stream) {
            return Ok(made);
        }
        if !origin.shares() {
            // Whoever had the turn before found a server that shares nothing, so nobody needs to wait.
            drop(turn);
            return origin.connect().await;
        }
        let connection = origin.connect().await?;
        if let Sender::Http2(stream) = &connection.sender {
            let shared = (stream.connection().clone(), origin.pool_idle_timeout);
            self.kept().entry(endpoint).or_default().shared.push(shared);
        }
        Ok(connection)
    }

    pub(super) fn lease(self: &Arc<Self>, endpoint: u64, idle: Duration, connection: Connection) -> Lease {
        Lease { pool: Arc::downgrade(self), endpoint, idle, connection }
    }

    pub(super) fn close_idle(&self) {
        let now = Instant::now();
        self.kept().retain(|_, kept| {
            kept.close_idle(now);
            !kept.is_forgotten()
        });
    }

    fn put(&self, endpoint: u64, idle: Idle) {
        let mut pool = self.kept();
        let connections = &mut pool.entry(endpoint).or_default().idle;
        if connections.len() < MOST_IDLE {
            connections.push(idle);
        }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<u64, Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection or stream in use. A connection that is dropped is closed.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Weak<Pool>,
    endpoint: u64,
    idle: Duration,
    connection: Connection,
}

impl Lease {
    /// Whether the body came by a stream, which can end in ways that a connection can't.
    pub(super) fn is_of_stream(&self) -> bool {
        self.connection.is_shared()
    }

    /// Puts the connection back, for the answer has been read to its end.
    pub(super) fn give_back(self) {
        let Connection { sender: Sender::Http1(sender), heard } = self.connection else { return };
        if let Some(pool) = self.pool.upgrade()
            && !sender.is_closed()
        {
            pool.put(self.endpoint, Idle { sender, heard, until: Instant::now() + self.idle });
        }
    }
}
