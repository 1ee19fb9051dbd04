//! Streams: the time to the first event, and how long every event was under way.

use std::{sync::Arc, time::Duration};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::{
    sync::Barrier,
    time::{Instant, sleep},
};

use crate::{
    summary::milliseconds,
    target::{Connection, Failure, Target},
};

#[derive(Default)]
struct Seen {
    /// Microseconds from the request to the first event.
    first: Vec<u64>,
    /// Microseconds from the upstream's clock to ours.
    under_way: Vec<u64>,
    complete: u32,
    failed: u32,
}

pub(crate) async fn run(target: Arc<Target>, connections: u32, rounds: u32, ramp: u64) -> Value {
    let start = Arc::new(Barrier::new(connections as usize));
    let tasks: Vec<_> = (0..connections)
        .map(|client| {
            let after = Duration::from_micros(ramp * 1000 * u64::from(client) / u64::from(connections));
            tokio::spawn(streams(target.clone(), start.clone(), after, rounds))
        })
        .collect();
    let mut all = Seen::default();
    for task in tasks {
        let seen = task.await.expect("a client does not panic");
        all.first.extend(seen.first);
        all.under_way.extend(seen.under_way);
        all.complete += seen.complete;
        all.failed += seen.failed;
    }
    json!({
        "complete": all.complete,
        "failed": all.failed,
        "events": all.under_way.len(),
        "first_ms": milliseconds(all.first),
        "under_way_ms": milliseconds(all.under_way),
    })
}

async fn streams(target: Arc<Target>, start: Arc<Barrier>, after: Duration, rounds: u32) -> Seen {
    let mut seen = Seen::default();
    let mut connection = target.connect().await;
    start.wait().await;
    sleep(after).await;
    for _ in 0..rounds {
        let streamed = match &mut connection {
            Ok(open) => stream(&target, open, &mut seen).await,
            Err(_) => Err("there is no connection".into()),
        };
        match streamed {
            Ok(true) => seen.complete += 1,
            _ => {
                seen.failed += 1;
                connection = target.connect().await;
            }
        }
    }
    seen
}

/// Reads one stream: whether it came to its `[DONE]`.
async fn stream(target: &Target, connection: &mut Connection, seen: &mut Seen) -> Result<bool, Failure> {
    connection.ready().await?;
    let begun = Instant::now();
    let mut body = connection.send_request(target.request()).await?.into_body();
    let (mut events, mut first, mut done) = (Vec::new(), true, false);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        let now = benches::wall_clock_nanos();
        if std::mem::take(&mut first) {
            seen.first.push(begun.elapsed().as_micros() as u64);
        }
        events.extend_from_slice(&data);
        while let Some(length) = events.windows(2).position(|end| end == b"\n\n") {
            let event: Vec<u8> = events.drain(..length + 2).collect();
            done |= event.starts_with(b"data: [DONE]");
            if let Some(sent) = sent_at(&event) {
                seen.under_way.push(now.saturating_sub(sent) / 1000);
            }
        }
    }
    Ok(done)
}

/// The upstream's wall clock, which the event carries behind an `@`.
fn sent_at(event: &[u8]) -> Option<u64> {
    let at = event.iter().position(|byte| *byte == b'@')?;
    let digits: Vec<u8> = event[at + 1..].iter().copied().take_while(u8::is_ascii_digit).collect();
    std::str::from_utf8(&digits).ok()?.parse().ok()
}
