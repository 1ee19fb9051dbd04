//! How a process learns how many there are: each leaves a mark in Redis every few seconds and counts the fresh ones.
//!
//! It runs beside the workers, so no request waits for it or costs more for it.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use tokio::time::MissedTickBehavior;
use uuid::Uuid;

use super::{
    aside::{Aside, Complaint},
    servers::Deployment,
};
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

const COMPLAINT: Complaint = Complaint {
    lasting: "the processes that share the limits can't be counted",
    passing: "the heartbeat did not reach Redis",
};

/// The mark of this process.
#[derive(Debug)]
pub struct Heartbeat {
    aside: Aside,
    name: String,
    recent: Recent,
}

impl Heartbeat {
    /// It connects with its first beat.
    pub fn new(deployment: &Arc<Deployment>) -> Self {
        let beats = FRESH.as_secs().div_ceil(INTERVAL.as_secs()) as usize;
        let name = Uuid::new_v4().simple().to_string();
        Self { aside: Aside::new(deployment, TAG), name, recent: Recent::new(beats) }
    }

    /// Beats until dropped. While Redis is away the last count stays.
    pub async fn teach(mut self, replicas: Replicas) {
        let mut beats = tokio::time::interval(INTERVAL);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            beats.tick().await;
            match self.beat().await {
                Ok(count) => self.learn(count, &replicas),
                Err(fault) => self.aside.complain(&fault, COMPLAINT),
            }
        }
    }

    fn learn(&mut self, count: NonZeroU32, replicas: &Replicas) {
        self.aside.content();
        let count = self.recent.highest_with(count);
        if replicas.learn(count) {
            tracing::info!(replicas = count, "the number of processes that share the limits is known");
        }
    }

    async fn beat(&self) -> Result<NonZeroU32, Fault> {
        let mut command = redis::cmd("EVAL");
        command.arg(SCRIPT).arg(1).arg(MARKS).arg(&self.name).arg(FRESH.as_micros() as u64);
        let count: u32 = self.aside.ask(&command).await?;
        NonZeroU32::new(count).ok_or_else(|| Fault::from(FaultKind::BadReply))
    }
}
