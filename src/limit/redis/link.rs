//! One connection to Redis, made when it is needed and replaced when it is lost.
//!
//! redis-rs' own connection manager makes every call wait while it reconnects, 9.45 s with its defaults, and keeps a
//! connection that no longer answers. Here the attempt runs in a task of its own, callers wait for it no longer than
//! their deadline, and after a failed attempt they learn at once that there is none.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{sync::watch, time::Instant};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    dial::{Connection, Dialer},
    sentinel::Sentinels,
    topology::{Endpoint, Server},
};
use crate::limit::fault::{Fault, FaultKind};

/// After a failed attempt callers are told so for this long, before the next one is made.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// So many questions in a row without an answer, and the connection is taken for dead. A kernel can't tell where somebody
/// on the way acknowledges what it never delivers, and other workers' luck must not keep a worker on a dead connection.
const UNANSWERED: u32 = 3;

/// Where a link leads.
#[derive(Debug)]
pub(super) enum Destination {
    /// To the first of these that can be reached.
    AnyOf(Vec<Server>),
    /// To whichever server is the primary.
    Primary(Sentinels),
}

impl Destination {
    /// A new connection to it.
    pub(super) async fn connect(&self, dialer: &Dialer) -> Result<Connection, Fault> {
        match self {
            Self::Primary(sentinels) => sentinels.connect_to_primary(dialer).await,
            Self::AnyOf(servers) => {
                let mut fault = Fault::from(FaultKind::Disconnected);
                for server in servers {
                    match dialer.dial(server).await {
                        Ok(connection) => return Ok(connection),
                        Err(error) => fault = error,
                    }
                }
                Err(fault)
            }
        }
    }

    /// Waits until the connection leads to the wrong server. Where the server stays the same, that is never.
    async fn moved_from(&self, endpoint: &Endpoint) {
        match self {
            Self::Primary(sentinels) => sentinels.replaced(endpoint).await,
            Self::AnyOf(_) => std::future::pending().await,
        }
    }
}

#[derive(Debug)]
pub(super) struct Link {
    dialer: Dialer,
    destination: Arc<Destination>,
    state: watch::Sender<State>,
    unanswered: AtomicU32,
    gone: CancellationToken,
    _goes_with_it: DropGuard,
}

#[derive(Debug)]
enum State {
    Idle { next_generation: u64 },
    Connecting,
    Up { generation: u64, epoch: u64, connection: Connection },
    Failed { generation: u64, at: Instant, fault: Fault },
}

impl Link {
    pub(super) fn new(dialer: Dialer, destination: Arc<Destination>) -> Self {
        let state = watch::Sender::new(State::Idle { next_generation: 1 });
        let gone = CancellationToken::new();
        let _goes_with_it = gone.clone().drop_guard();
        Self { dialer, destination, state, unanswered: AtomicU32::new(0), gone, _goes_with_it }
    }

    /// The connection and its number. One that was made before the breaker's present `epoch` is not trusted any more.
    pub(super) async fn connection(&self, epoch: u64) -> Result<(u64, Connection), Fault> {
        if let State::Up { generation, epoch: made_in, connection } = &*self.state.borrow()
            && *made_in == epoch
        {
            return Ok((*generation, connection.clone()));
        }
        self.connect(epoch).await
    }

    /// Gives up this connection, unless it has been replaced already.
    pub(super) fn discard(&self, broken: u64) {
        discard_if(&self.state, |generation| generation == broken);
    }

    /// Gives up whatever connection there is.
    pub(super) fn discard_present(&self) {
        discard_if(&self.state, |_| true);
    }

    /// A question was answered, well or badly.
    pub(super) fn was_answered(&self) {
        if self.unanswered.load(Relaxed) != 0 {
            self.unanswered.store(0, Relaxed);
        }
    }

    /// A question was not answered in time.
    pub(super) fn was_silent(&self) {
        if self.unanswered.fetch_add(1, Relaxed) + 1 >= UNANSWERED {
            self.unanswered.store(0, Relaxed);
            self.discard_present();
        }
    }

    async fn connect(&self, epoch: u64) -> Result<(u64, Connection), Fault> {
        let mut changes = self.state.subscribe();
        if let Some(generation) = self.claim_attempt(epoch) {
            let (dialer, destination) = (self.dialer.clone(), self.destination.clone());
            let attempt = attempt(dialer, destination, self.state.clone(), generation, epoch);
            tokio::spawn(self.gone.clone().run_until_cancelled_owned(attempt));
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

fn discard_if(state: &watch::Sender<State>, is_useless: impl Fn(u64) -> bool) {
    state.send_if_modified(|state| match state {
        State::Up { generation, .. } if is_useless(*generation) => {
            *state = State::Idle { next_generation: *generation + 1 };
            true
        }
        _ => false,
    });
}

/// Connects, and sees to it that the connection is given up when it leads to the wrong server. Boxed, because the way to
/// a primary leads over links to Sentinels.
fn attempt(
    dialer: Dialer,
    destination: Arc<Destination>,
    state: watch::Sender<State>,
    generation: u64,
    epoch: u64,
) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        let connection = match destination.connect(&dialer).await {
            Ok(connection) => connection,
            Err(fault) => {
                state.send_replace(State::Failed { generation, at: Instant::now(), fault });
                return;
            }
        };
        let endpoint = connection.endpoint().clone();
        let mut changes = state.subscribe();
        state.send_replace(State::Up { generation, epoch, connection });
        let is_another =
            |state: &State| !matches!(state, State::Up { generation: present, .. } if *present == generation);
        tokio::select! {
            _ = changes.wait_for(is_another) => {}
            () = destination.moved_from(&endpoint) => {
                tracing::info!(was = %endpoint, "the Sentinels have another primary");
                discard_if(&state, |present| present == generation);
            }
        }
    })
}
