//! How connections to an upstream are made and kept.

use std::{path::PathBuf, time::Duration};

use crate::config::{field::Field, table::TableReader};

/// What holds for every connection to an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// `ca_file`: trust these certificates (PEM) and not the system's.
    pub ca_file: Option<PathBuf>,
    /// `connect_timeout`, TLS included. Default 5 s.
    pub connect_timeout: Duration,
    /// `max_answer_header_size`: a larger head of an answer is not passed on. Default 64 KiB.
    pub max_answer_header_size: usize,
    /// `pool_idle_timeout`: how long an unused connection is kept. Default 10 s.
    pub pool_idle_timeout: Duration,
}

pub(super) fn connection(table: &mut TableReader<'_>) -> Connection {
    let ca_file = table.read("ca_file", Field::path);
    // hyper's parser needs a buffer of 8 KiB.
    let max_answer_header_size =
        table.read("max_answer_header_size", |field| field.size(8 << 10..=1 << 20)).unwrap_or(64 << 10);
    let mut duration = |key, default| table.read(key, Field::duration).unwrap_or(default);
    Connection {
        ca_file,
        max_answer_header_size,
        connect_timeout: duration("connect_timeout", Duration::from_secs(5)),
        pool_idle_timeout: duration("pool_idle_timeout", Duration::from_secs(10)),
    }
}
