//! The edge of one worker: accepts connections, speaks TLS and HTTP on each in a task of its own, and drains.

mod admission;
mod connection;
mod flush;
mod listener;
mod pulse;
mod reading;
mod stream;
mod switch;

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio::{net::TcpListener, sync::watch};
use tokio_util::task::TaskTracker;

pub use self::{
    admission::Admission,
    listener::{BindError, Listeners, bind},
};
use self::{admission::Refusal, pulse::Expiry};
use crate::{cut::Cut, proxy::Proxy};

/// After an accept fails for want of resources, the loop pauses instead of spinning.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long streams that are cut may take to say so.
const LAST_WORDS: Duration = Duration::from_millis(250);

/// What a process is doing. Signals change it, every connection watches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Accepting.
    Serving,
    /// Finishing what has begun.
    Draining,
    /// Ending at once.
    Stopping,
}

/// The labels of all reasons why a connection does not come about.
pub fn refusal_labels() -> Vec<&'static str> {
    Refusal::ALL.map(Refusal::label).into()
}

/// The labels of all reasons why a connection is ended for its client's slowness.
pub fn expiry_labels() -> Vec<&'static str> {
    Expiry::OF_CLIENTS.map(Expiry::label).into()
}

/// One worker's edge.
#[derive(Clone)]
pub struct Server {
    /// Answers the requests.
    pub proxy: Arc<Proxy>,
    /// What new connections speak TLS with.
    pub tls: Arc<ArcSwap<ServerConfig>>,
    /// Who may connect, over all workers.
    pub admission: Arc<Admission>,
    /// Says who ended what was ended before its end.
    pub cut: Cut,
    /// What the process is doing.
    pub phase: watch::Receiver<Phase>,
}

impl Server {
    /// Serves until the process drains and every connection has ended, or until it stops.
    pub async fn run(mut self, listeners: Vec<TcpListener>) {
        let connections = TaskTracker::new();
        for listener in listeners {
            connections.spawn(self.clone().accept(listener, connections.clone()));
        }
        connections.close();
        tokio::select! {
            () = connections.wait() => return,
            _ = self.phase.wait_for(|phase| *phase == Phase::Stopping) => {}
        }
        let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
    }

    /// Survives everything: a connection that fails is its own affair, and a want of file descriptors passes.
    async fn accept(mut self, listener: TcpListener, connections: TaskTracker) {
        let mut failing = false;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = self.phase.wait_for(|phase| *phase != Phase::Serving) => return,
            };
            match accepted {
                Ok((socket, peer)) => {
                    if std::mem::take(&mut failing) {
                        tracing::info!("accepting connections again");
                    }
                    // A socket of both families shows an IPv4 address in a form of its own.
                    let client = peer.ip().to_canonical();
                    match self.admission.admit(client) {
                        Ok(slot) => drop(connections.spawn(self.clone().connection(socket, client, slot))),
                        Err(refusal) => self.refused(refusal),
                    }
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    // Said once: it comes back after every pause until there is room.
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "accepting failed; trying again");
                    }
                    self.refused(Refusal::AcceptFailed);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn refused(&self, refusal: Refusal) {
        self.proxy.shared.metrics.connection_refused(refusal.label());
    }
}

/// Such an error concerns only the connection that was about to be accepted.
fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
