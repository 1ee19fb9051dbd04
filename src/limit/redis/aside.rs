//! What is asked of Redis beside the requests: on a connection of its own, so that none of them waits for it.

use std::{sync::Arc, time::Duration};

use redis::{Cmd, FromRedisValue};

use super::servers::{Deployment, Servers};
use crate::limit::fault::{Fault, FaultKind};

/// No caller waits for the answer, so it has more time than a decision.
const PATIENCE: Duration = Duration::from_secs(1);

/// Asks about the keys of one hash tag.
#[derive(Debug)]
pub(super) struct Aside {
    servers: Arc<Servers>,
    tag: &'static str,
    complained: bool,
}

/// What is said of a question that has no answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Complaint {
    /// Once, where it takes a person to mend it.
    pub(super) lasting: &'static str,
    /// Every other time.
    pub(super) passing: &'static str,
}

impl Aside {
    /// It connects when it is first asked.
    pub(super) fn new(deployment: &Arc<Deployment>, tag: &'static str) -> Self {
        Self { servers: Arc::new(Servers::new(deployment.clone())), tag, complained: false }
    }

    /// The last question had an answer that was of use.
    pub(super) fn content(&mut self) {
        self.complained = false;
    }

    /// An outage is told of by those who need decisions. What forbids only this would never be seen.
    pub(super) fn complain(&mut self, fault: &Fault, complaint: Complaint) {
        if fault.kind().needs_a_person() && !std::mem::replace(&mut self.complained, true) {
            tracing::error!(%fault, remedy = fault.kind().remedy(), "{}", complaint.lasting);
        } else {
            tracing::debug!(%fault, "{}", complaint.passing);
        }
    }

    /// The answer to a command.
    pub(super) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, Fault> {
        let asked = tokio::time::timeout(PATIENCE, self.send(command)).await;
        let answer = asked.unwrap_or_else(|_elapsed| Err(Fault::from(FaultKind::Timeout)));
        if answer.is_err() {
            // Such questions are few, so there is nothing to lose by a new connection for the next one.
            self.servers.deciding(self.tag).link.discard_present();
        }
        answer
    }

    async fn send<T: FromRedisValue>(&self, command: &Cmd) -> Result<T, Fault> {
        let (_, mut connection) = self.servers.deciding(self.tag).link.connection(0).await?;
        let answer = connection.send(command).await.inspect_err(|error| {
            // A cluster says who has the keys, and the next question goes there.
            self.servers.after(error, connection.endpoint());
        })?;
        Ok(redis::from_redis_value(answer).map_err(redis::RedisError::from)?)
    }
}
