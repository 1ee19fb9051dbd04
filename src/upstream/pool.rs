//! Idle connections to upstreams, of one worker.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use hyper::client::conn::http1::SendRequest;
use tokio::time::Instant;

use super::socket::Heard;
use crate::upload::UploadBody;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) sender: SendRequest<UploadBody>,
    pub(super) heard: Heard,
}

/// More idle connections to one upstream than this are closed.
const MOST_IDLE: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<HashMap<u64, Vec<Idle>>>);

#[derive(Debug)]
struct Idle {
    connection: Connection,
    until: Instant,
}

impl Idle {
    fn is_usable(&self, now: Instant) -> bool {
        now < self.until && !self.connection.sender.is_closed()
    }
}

impl Pool {
    /// The most recently used connection that is ready. One that still uploads the end of its last request is not.
    pub(super) fn take(&self, endpoint: u64) -> Option<Connection> {
        let now = Instant::now();
        let mut pool = self.idle();
        let idle = pool.get_mut(&endpoint)?;
        idle.retain(|idle| idle.is_usable(now));
        let ready = idle.iter().rposition(|idle| idle.connection.sender.is_ready())?;
        Some(idle.remove(ready).connection)
    }

    pub(super) fn lease(self: &Arc<Self>, endpoint: u64, idle: Duration, connection: Connection) -> Lease {
        Lease { pool: Arc::downgrade(self), endpoint, idle, connection }
    }

    pub(super) fn close_idle(&self) {
        let now = Instant::now();
        self.idle().retain(|_, idle| {
            idle.retain(|idle| idle.is_usable(now));
            !idle.is_empty()
        });
    }

    fn put(&self, endpoint: u64, idle: Duration, connection: Connection) {
        let mut pool = self.idle();
        let connections = pool.entry(endpoint).or_default();
        if connections.len() < MOST_IDLE {
            connections.push(Idle { connection, until: Instant::now() + idle });
        }
    }

    fn idle(&self) -> MutexGuard<'_, HashMap<u64, Vec<Idle>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection in use. Dropped, it is closed.
#[derive(Debug)]
pub(super) struct Lease {
    pool: Weak<Pool>,
    endpoint: u64,
    idle: Duration,
    connection: Connection,
}

impl Lease {
    /// Puts the connection back, for the answer has been read to its end.
    pub(super) fn give_back(self) {
        if let Some(pool) = self.pool.upgrade()
            && !self.connection.sender.is_closed()
        {
            pool.put(self.endpoint, self.idle, self.connection);
        }
    }
}
