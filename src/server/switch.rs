//! What becomes of an HTTP/1.1 connection whose client has asked for another protocol.

use std::{
    future::poll_fn,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
};

use bytes::Bytes;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::{pulse::Begun, stream::WatchedStream};
use crate::tunnel::Tunnel;

/// What the last request that asked has come to: told by the requests of a connection to the task that drives it.
#[derive(Clone, Debug, Default)]
pub(super) struct Switch(Arc<Mutex<Question>>);

/// hyper ends the HTTP of a connection on which a client has asked, be it granted or not, and hands the rest over.
#[derive(Debug, Default)]
enum Question {
    /// Nobody has asked.
    #[default]
    None,
    /// There is no answer yet.
    Open,
    Answered(OnUpgrade, Option<Granted>),
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
    /// A request asks.
    pub(super) fn asked(&self) {
        *self.question() = Question::Open;
    }

    /// It has its answer.
    pub(super) fn answered(&self, upgrade: OnUpgrade, granted: Option<Granted>) {
        *self.question() = Question::Answered(upgrade, granted);
    }

    /// Ends when no question is open. Only the task that drives the connection may wait for that, and it has to look again
    /// after whatever it does, for nobody wakes it.
    pub(super) async fn settled(&self) {
        poll_fn(|_cx| match *self.question() {
            Question::Open => Poll::Pending,
            Question::None | Question::Answered(..) => Poll::Ready(()),
        })
        .await;
    }

    /// What hyper has left of its connection, which has ended in order; nothing, if it keeps or has lost it.
    pub(super) async fn rest(&self) -> Option<Rest> {
        let Question::Answered(upgrade, granted) = mem::take(&mut *self.question()) else { return None };
        let parts = upgrade.await.ok()?.downcast::<TokioIo<WatchedStream>>().ok()?;
        Some(Rest { stream: parts.io.into_inner(), early: parts.read_buf, granted })
    }

    fn question(&self) -> MutexGuard<'_, Question> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
