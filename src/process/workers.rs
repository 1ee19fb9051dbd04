//! The worker threads: each with a runtime, listening sockets and connections of its own.

use std::{
    io,
    thread::{self, JoinHandle},
    time::Duration,
};

use tokio::{
    net::TcpListener,
    runtime::{Builder, Runtime},
    sync::mpsc,
};

use crate::server::{Listeners, Server};

/// How often a worker closes upstream connections that have been idle for too long.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// The worker threads. Each drops its sender when it ends.
pub(super) struct Workers {
    threads: Vec<JoinHandle<()>>,
    alive: mpsc::Receiver<Infallible>,
}

/// Nothing is ever sent.
enum Infallible {}

impl Workers {
    pub(super) fn spawn(servers: impl Iterator<Item = Server>, listeners: Listeners) -> io::Result<Self> {
        let (sender, alive) = mpsc::channel::<Infallible>(1);
        let start = |(index, (server, sockets)): (usize, (Server, Vec<std::net::TcpListener>))| {
            let alive = sender.clone();
            let runtime = current_thread_runtime()?;
            thread::Builder::new().name(format!("worker-{index}")).spawn(move || {
                work(&runtime, server, sockets);
                drop(runtime);
                drop(alive);
            })
        };
        let threads = servers.zip(listeners.of_workers).enumerate().map(start).collect::<io::Result<_>>()?;
        Ok(Self { threads, alive })
    }

    /// Waits until all have ended.
    pub(super) async fn ended(&mut self) {
        self.alive.recv().await;
    }

    pub(super) fn join(self) {
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a worker panicked");
            }
        }
    }
}

fn work(runtime: &Runtime, server: Server, sockets: Vec<std::net::TcpListener>) {
    runtime.block_on(async move {
        let listeners: Result<Vec<_>, _> = sockets.into_iter().map(TcpListener::from_std).collect();
        let listeners = match listeners {
            Ok(listeners) => listeners,
            Err(error) => return tracing::error!(%error, "a worker can't listen"),
        };
        let connections = server.proxy.connections.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(SWEEP_INTERVAL).await;
                connections.close_idle();
            }
        });
        server.run(listeners).await;
    });
}

/// A runtime that runs on the thread that enters it.
pub(super) fn current_thread_runtime() -> io::Result<Runtime> {
    Builder::new_current_thread().enable_all().build()
}
