//! Percentiles.

use serde_json::{Value, json};

/// How many there are of these microseconds, and their percentiles in milliseconds.
pub(crate) fn milliseconds(mut micros: Vec<u64>) -> Value {
    micros.sort_unstable();
    let at = |share: f64| {
        let last = micros.len().checked_sub(1)?;
        Some(micros[(last as f64 * share).round() as usize] as f64 / 1000.0)
    };
    json!({ "n": micros.len(), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1.0) })
}
