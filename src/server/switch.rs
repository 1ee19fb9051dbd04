//! What becomes of an HTTP/1.1 connection whose client has asked for another protocol.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::{pulse::Begun, stream::WatchedStream};
use crate::tunnel::Tunnel;

/// What the last request that asked has come to: told by the requests of a connection to the task that drives it.
#[derive(Clone, Debug, Default)]
pub(super) struct Switch(Arc<Mutex<Option<Asked>>>);

/// hyper ends the HTTP of a connection on which a client has asked, be it granted or not, and hands the rest over.
#[derive(Debug)]
struct Asked {
    upgrade: OnUpgrade,
    granted: Option<Granted>,
}

/// A tunnel, and the request that lasts as long.
#[derive(Debug)]
pub(super) struct Granted {
    pub(super) tunnel: Box<Tunnel>,
    pub(super) begun: Begun,
}

/// A connection after its HTTP.
pub(super) struct Rest {
    pub(super) stream: WatchedStream,
    /// What the client has sent already.
    pub(super) early: Bytes,
    pub(super) granted: Option<Granted>,
}

impl Switch {
    pub(super) fn asked(&self, upgrade: OnUpgrade, granted: Option<Granted>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Asked { upgrade, granted });
    }

    /// What hyper has left of its connection, which has ended in order; nothing, if it keeps or has lost it.
    pub(super) async fn rest(&self) -> Option<Rest> {
        let asked = mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let Asked { upgrade, granted } = asked?;
        let parts = upgrade.await.ok()?.downcast::<TokioIo<WatchedStream>>().ok()?;
        Some(Rest { stream: parts.io.into_inner(), early: parts.read_buf, granted })
    }
}
