//! The limit of open files, and how many connections it pays for.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors beside those of connections: listeners, Redis, epoll, logs.
const OTHER_DESCRIPTORS: u64 = 128;

/// Raises the limit of open files as far as it goes, and fits the bound of connections to it: each can need a second
/// descriptor for its upstream.
pub(super) fn affordable_connections(wanted: usize) -> usize {
    let limits = getrlimit(Resource::Nofile);
    let Some(hard) = limits.maximum else { return wanted };
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: Some(hard), maximum: Some(hard) }) {
        tracing::warn!(%error, "the limit of open files could not be raised");
    }
    let open_files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let affordable =
        usize::try_from(open_files.saturating_sub(OTHER_DESCRIPTORS) / 2).unwrap_or(usize::MAX).max(1);
    if affordable < wanted {
        tracing::warn!(
            wanted,
            affordable,
            open_files,
            "max_connections is more than the limit of open files allows"
        );
    }
    wanted.min(affordable)
}
