//! How a process learns how many there are: each leaves a mark in Redis every few seconds and counts the fresh ones.
//!
//! It has a connection of its own and runs beside the workers, so no request waits for it or costs more for it.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use tokio::time::MissedTickBehavior;
use uuid::Uuid;

use super::servers::{Deployment, Servers};
use crate::limit::{
    fault::{Fault, FaultKind},
    replicas::{Recent, Replicas},
};

const SCRIPT: &str = include_str!("heartbeat.lua");

/// `~` is in no caller's id, and `1` is the format's version.
const MARKS: &str = "ratelimit:{~replicas}:1";

/// What a cluster goes by.
const TAG: &str = "~replicas";

const INTERVAL: Duration = Duration::from_secs(2);

/// A process whose beat is older is gone. Four beats may be lost before that.
const FRESH: Duration = Duration::from_secs(10);

/// Nobody waits for a beat, so it has more time than a decision.
const PATIENCE: Duration = Duration::from_secs(1);

/// The mark of this process.
#[derive(Debug)]
pub struct Heartbeat {
    servers: Arc<Servers>,
    name: String,
    recent: Recent,
    complained: bool,
}

impl Heartbeat {
    /// It connects with its first beat.
    pub fn new(deployment: &Arc<Deployment>) -> Self {
        let servers = Arc::new(Servers::new(deployment.clone()));
        let beats = FRESH.as_secs().div_ceil(INTERVAL.as_secs()) as usize;
        let name = Uuid::new_v4().simple().to_string();
        Self { servers, name, recent: Recent::new(beats), complained: false }
    }

    /// Beats until dropped. While Redis is away the last count stays.
    pub async fn teach(mut self, replicas: Replicas) {
        let mut beats = tokio::time::interval(INTERVAL);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            match self.beat().await {
                Ok(count) => self.learn(count, &replicas),
                Err(fault) => self.complain(&fault),
            }
        }
    }

    /// An outage is told of by those who need decisions. What forbids only this would never be seen.
    fn complain(&mut self, fault: &Fault) {
        if fault.kind().needs_a_person() && !std::mem::replace(&mut self.complained, true) {
            let remedy = fault.kind().remedy();
            tracing::error!(%fault, remedy, "the processes that share the limits can't be counted");
        } else {
            tracing::debug!(%fault, "the heartbeat did not reach Redis");
        }
    }

    fn learn(&mut self, count: NonZeroU32, replicas: &Replicas) {
        self.complained = false;
        let count = self.recent.highest_with(count);
        if replicas.learn(count) {
            tracing::info!(replicas = count, "the number of processes that share the limits is known");
        }
    }

    async fn beat(&self) -> Result<NonZeroU32, Fault> {
        let beat = tokio::time::timeout(PATIENCE, self.mark()).await;
        let answer = beat.unwrap_or_else(|_elapsed| Err(Fault::from(FaultKind::Timeout)));
        if answer.is_err() {
            // Beats are few, so there is nothing to lose by a new connection for the next one.
            self.servers.deciding(TAG).link.discard_present();
        }
        answer
    }

    async fn mark(&self) -> Result<NonZeroU32, Fault> {
        let (_, mut connection) = self.servers.deciding(TAG).link.connection(0).await?;
        let mut command = redis::cmd("EVAL");
        command.arg(SCRIPT).arg(1).arg(MARKS).arg(&self.name).arg(FRESH.as_micros() as u64);
        let answer = connection.send(&command).await.inspect_err(|error| {
            // A cluster says who has the marks, and the next beat goes there.
            self.servers.after(error, connection.endpoint());
        })?;
        let count: u32 = redis::from_redis_value(answer).map_err(redis::RedisError::from)?;
        NonZeroU32::new(count).ok_or_else(|| Fault::from(FaultKind::BadReply))
    }
}
