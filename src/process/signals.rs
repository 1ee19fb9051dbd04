//! What the operating system asks for.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// SIGTERM or SIGINT: finish what has begun and end.
    End,
    /// SIGHUP: read the configuration again.
    Reload,
}

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// From now on signals are wishes.
    pub(super) fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    pub(super) async fn next(&mut self) -> Wish {
        tokio::select! {
            _ = self.terminate.recv() => Wish::End,
            _ = self.interrupt.recv() => Wish::End,
            _ = self.hangup.recv() => Wish::Reload,
        }
    }

    /// Waits for the wish to end, whatever else is wished for.
    pub(super) async fn end(&mut self) {
        while self.next().await != Wish::End {}
    }
}
