//! The pauses that providers want, shared by all processes: a provider that told one of them to wait means them all.
//!
//! It runs beside the workers, so no request waits for it or costs more for it. Others hear of a pause within about
//! twice the interval. While Redis is away, each process knows its own.

use std::{sync::Arc, time::Duration};

use tokio::time::MissedTickBehavior;

use super::{
    aside::{Aside, Complaint},
    servers::Deployment,
};
use crate::limit::fault::Fault;

const SCRIPT: &str = include_str!("cooldowns.lua");

/// `~` is in no caller's id, and `1` is the format's version.
const PAUSES: &str = "ratelimit:{~cooldowns}:1";

/// What a cluster goes by.
const TAG: &str = "~cooldowns";

const INTERVAL: Duration = Duration::from_secs(1);

const COMPLAINT: Complaint = Complaint {
    lasting: "the pauses that providers want can't be shared",
    passing: "the pauses that providers want were not shared",
};

/// What one process is told by providers, and hears of others.
pub trait Pauses {
    /// Whether there is anything to tell or to hear.
    fn matter(&self) -> bool;
    /// Who wants this process to wait, and for how long from now.
    fn told(&self) -> Vec<(String, Duration)>;
    /// Somebody wants some process to wait for so long from now.
    fn heard(&self, name: &str, left: Duration);
}

/// The part of this process in them.
#[derive(Debug)]
pub struct Cooldowns(Aside);

impl Cooldowns {
    /// It connects when there is something to share.
    pub fn new(deployment: &Arc<Deployment>) -> Self {
        Self(Aside::new(deployment, TAG))
    }

    /// Shares them until dropped.
    pub async fn share(mut self, pauses: impl Pauses) {
        let mut turns = tokio::time::interval(INTERVAL);
        turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            turns.tick().await;
            if !pauses.matter() {
                continue;
            }
            match self.exchange(&pauses.told()).await {
                Ok(all) => {
                    self.0.content();
                    all.iter().for_each(|(name, left)| pauses.heard(name, Duration::from_micros(*left)));
                }
                Err(fault) => self.0.complain(&fault, COMPLAINT),
            }
        }
    }

    async fn exchange(&self, told: &[(String, Duration)]) -> Result<Vec<(String, u64)>, Fault> {
        let mut command = redis::cmd("EVAL");
        command.arg(SCRIPT).arg(1).arg(PAUSES);
        for (name, left) in told {
            command.arg(name).arg(left.as_micros() as u64);
        }
        self.0.ask(&command).await
    }
}
