//! One connection to Redis, made when it is needed and replaced when it is lost.
//!
//! redis-rs' own connection manager makes every call wait while it reconnects, 9.45 s with its defaults, and keeps a
//! connection that no longer answers. Here the attempt runs in a task of its own, callers wait for it no longer than
//! their deadline, and after a failed attempt they learn at once that there is none.

use std::time::Duration;

use redis::{
    AsyncConnectionConfig, Client, IntoConnectionInfo, RedisError, aio::MultiplexedConnection,
    io::tcp::TcpSettings,
};
use socket2::TcpKeepalive;
use tokio::{sync::watch, time::Instant};

use crate::limit::fault::{Fault, FaultKind};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// After a failed attempt callers are told so for this long, before the next one is made.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Unacknowledged data ends a connection after this long, where the kernel would try for a quarter of an hour.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(2);

/// Requests that may wait to be written. The library's 50 makes callers queue under load.
const PIPELINE: usize = 1024;

#[derive(Debug)]
pub(super) struct Link {
    client: Client,
    state: watch::Sender<State>,
}

#[derive(Debug)]
enum State {
    Idle { next_generation: u64 },
    Connecting,
    Up { generation: u64, epoch: u64, connection: MultiplexedConnection },
    Failed { generation: u64, at: Instant, fault: Fault },
}

impl Link {
    pub(super) fn new(url: &str) -> Result<Self, RedisError> {
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(1));
        let settings = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        #[cfg(target_os = "linux")]
        let settings = settings.set_user_timeout(UNACKNOWLEDGED_TIMEOUT);
        let client = Client::open(url.into_connection_info()?.set_tcp_settings(settings))?;
        Ok(Self { client, state: watch::Sender::new(State::Idle { next_generation: 1 }) })
    }

    /// The connection and its number. One that was made before the breaker's present `epoch` is not trusted any more.
    pub(super) async fn connection(&self, epoch: u64) -> Result<(u64, MultiplexedConnection), Fault> {
        if let State::Up { generation, epoch: made_in, connection } = &*self.state.borrow()
            && *made_in == epoch
        {
            return Ok((*generation, connection.clone()));
        }
        self.connect(epoch).await
    }

    /// Gives up this connection, unless it has been replaced already.
    pub(super) fn discard(&self, broken: u64) {
        self.state.send_if_modified(|state| {
            let current = matches!(state, State::Up { generation, .. } if *generation == broken);
            if current {
                *state = State::Idle { next_generation: broken + 1 };
            }
            current
        });
    }

    async fn connect(&self, epoch: u64) -> Result<(u64, MultiplexedConnection), Fault> {
        let mut changes = self.state.subscribe();
        if let Some(generation) = self.claim_attempt(epoch) {
            tokio::spawn(attempt(self.client.clone(), self.state.clone(), generation, epoch));
        }
        let settled =
            changes.wait_for(|state| matches!(state, State::Up { .. } | State::Failed { .. })).await;
        match settled.as_deref() {
            Ok(State::Up { generation, connection, .. }) => Ok((*generation, connection.clone())),
            Ok(State::Failed { fault, .. }) => Err(fault.clone()),
            _ => Err(Fault::from(FaultKind::Disconnected)),
        }
    }

    /// Whether this caller is the one to start an attempt, and the number of the connection it will make.
    fn claim_attempt(&self, epoch: u64) -> Option<u64> {
        let mut claimed = None;
        self.state.send_if_modified(|state| {
            claimed = match state {
                State::Idle { next_generation } => Some(*next_generation),
                State::Up { generation, epoch: made_in, .. } if *made_in != epoch => Some(*generation + 1),
                State::Failed { generation, at, .. } if at.elapsed() >= RETRY_INTERVAL => {
                    Some(*generation + 1)
                }
                State::Up { .. } | State::Failed { .. } | State::Connecting => None,
            };
            if claimed.is_some() {
                *state = State::Connecting;
            }
            claimed.is_some()
        });
        claimed
    }
}

async fn attempt(client: Client, state: watch::Sender<State>, generation: u64, epoch: u64) {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(CONNECT_TIMEOUT))
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE);
    let connected = client.get_multiplexed_async_connection_with_config(&config).await;
    state.send_replace(match connected {
        Ok(connection) => State::Up { generation, epoch, connection },
        Err(error) => State::Failed { generation, at: Instant::now(), fault: error.into() },
    });
}
