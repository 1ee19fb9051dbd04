//! Log lines: to standard error, as text or JSON, written by a thread of their own so that a blocked terminal or a full
//! pipe delays no request.

mod json;
mod writer;

use std::{
    io::{self, IsTerminal},
    str::FromStr,
};

use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    filter::Targets,
    fmt,
    layer::{Layer, SubscriberExt},
    registry,
    util::SubscriberInitExt,
};

use self::{json::JsonLines, writer::WriterGuard};
use crate::config::LogFormat;

/// Starts logging. Lines are written until the guard is dropped. Only the first call of a process has an effect.
pub fn start(level: &str, format: LogFormat) -> io::Result<WriterGuard> {
    let (writer, guard) = writer::start(io::stderr())?;
    let layer = match format {
        LogFormat::Json => fmt::layer().event_format(JsonLines).with_writer(writer).boxed(),
        LogFormat::Text => fmt::layer().with_ansi(io::stderr().is_terminal()).with_writer(writer).boxed(),
    };
    // A second start, as tests in one process do, keeps the first.
    let _ = registry().with(layer.with_filter(filter(level))).try_init();
    Ok(guard)
}

/// The libraries below us print headers at their finest levels, and those can hold secrets.
fn filter(level: &str) -> Targets {
    let level = LevelFilter::from_str(level).unwrap_or(LevelFilter::INFO);
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("tollgate", level)
}
