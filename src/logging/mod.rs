//! Log lines: to standard error, as text or JSON, written by a thread of their own so that a blocked terminal or a full
//! pipe delays no request.

mod json;

use std::{
    io::{BufWriter, IsTerminal},
    str::FromStr,
};

use tracing::level_filters::LevelFilter;
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::{
    filter::Targets,
    fmt,
    layer::{Layer, SubscriberExt},
    registry,
    util::SubscriberInitExt,
};

use self::json::JsonLines;
use crate::config::LogFormat;

/// Lines that may wait to be written. More are dropped, and counted by nobody but the reader who misses them.
const LINES: usize = 16 * 1024;

/// What one write to standard error takes at most.
const BUFFER_BYTES: usize = 64 * 1024;

/// Starts logging. Lines are written until the guard is dropped. Only the first call of a process has an effect.
#[must_use = "log lines are lost when the guard is dropped"]
pub fn start(level: &str, format: LogFormat) -> WorkerGuard {
    // The writing thread flushes whenever it has caught up, so under load many lines go out with one system call.
    let stderr = BufWriter::with_capacity(BUFFER_BYTES, std::io::stderr());
    let (writer, guard) = NonBlockingBuilder::default().buffered_lines_limit(LINES).finish(stderr);
    let layer = match format {
        LogFormat::Json => fmt::layer().event_format(JsonLines).with_writer(writer).boxed(),
        LogFormat::Text => {
            fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(writer).boxed()
        }
    };
    // A second start, as tests in one process do, keeps the first.
    let _ = registry().with(layer.with_filter(filter(level))).try_init();
    guard
}

/// The libraries below us print headers at their finest levels, and those can hold secrets.
fn filter(level: &str) -> Targets {
    let level = LevelFilter::from_str(level).unwrap_or(LevelFilter::INFO);
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("tollgate", level)
}
