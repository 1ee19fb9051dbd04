//! How many of many requests at once are admitted.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use serde_json::{Value, json};
use tokio::sync::Barrier;

use crate::target::Target;

#[derive(Default)]
struct Seen {
    statuses: BTreeMap<u16, u32>,
    errors: u32,
}

pub(crate) async fn run(target: Arc<Target>, connections: u32, requests: u32) -> Value {
    let (start, left) = (Arc::new(Barrier::new(connections as usize)), Arc::new(AtomicU32::new(requests)));
    let tasks: Vec<_> =
        (0..connections).map(|_| tokio::spawn(client(target.clone(), start.clone(), left.clone()))).collect();
    let mut all = Seen::default();
    for task in tasks {
        let seen = task.await.expect("a client does not panic");
        all.errors += seen.errors;
        for (status, count) in seen.statuses {
            *all.statuses.entry(status).or_default() += count;
        }
    }
    json!({ "statuses": all.statuses, "errors": all.errors })
}

async fn client(target: Arc<Target>, start: Arc<Barrier>, left: Arc<AtomicU32>) -> Seen {
    let mut seen = Seen::default();
    let mut connection = target.connect().await.ok();
    start.wait().await;
    while left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok() {
        if connection.is_none() {
            connection = target.connect().await.ok();
        }
        let Some(open) = &mut connection else {
            seen.errors += 1;
            continue;
        };
        match target.complete(open).await {
            Ok(status) => *seen.statuses.entry(status).or_default() += 1,
            Err(_) => {
                seen.errors += 1;
                connection = None;
            }
        }
    }
    seen
}
