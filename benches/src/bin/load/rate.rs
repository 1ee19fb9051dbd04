//! Latency where nothing queues: a rate far below what the proxy can do.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use crate::{summary::milliseconds, target::Target};

pub(crate) async fn run(target: Arc<Target>, connections: u32, rate: u32, seconds: u32) -> Value {
    let start = Instant::now() + Duration::from_millis(500);
    let every = Duration::from_secs(1) * connections / rate;
    let each = rate * seconds / connections;
    let tasks: Vec<_> = (0..connections)
        .map(|client| {
            let first = start + every * client / connections;
            tokio::spawn(steadily(target.clone(), first, every, each))
        })
        .collect();
    let (mut took, mut failed) = (Vec::new(), 0);
    for task in tasks {
        let (micros, failures) = task.await.expect("a client does not panic");
        took.extend(micros);
        failed += failures;
    }
    json!({ "latency_ms": milliseconds(took), "failed": failed })
}

/// A request that had to wait for the one before it counts from when it was due.
async fn steadily(target: Arc<Target>, first: Instant, every: Duration, count: u32) -> (Vec<u64>, u32) {
    let (mut took, mut failed) = (Vec::new(), 0);
    let mut connection = target.connect().await.ok();
    for turn in 0..count {
        let due = first + every * turn;
        sleep_until(due).await;
        // A timer wakes up to a millisecond late, which is not the proxy's doing.
        let begun = if Instant::now() - due < Duration::from_millis(2) { Instant::now() } else { due };
        let answer = match &mut connection {
            Some(open) => target.complete(open).await,
            None => Err("there is no connection".into()),
        };
        match answer {
            Ok(200) => took.push(begun.elapsed().as_micros() as u64),
            _ => {
                failed += 1;
                connection = target.connect().await.ok();
            }
        }
    }
    (took, failed)
}
