//! What is tried again: `retry`.

use std::{num::NonZeroU32, time::Duration};

use crate::config::{field::Field, table::TableReader};

const KINDS: [(&str, RetryOn); 5] = [
    ("connect", RetryOn::Connect),
    ("timeout", RetryOn::Timeout),
    ("broken", RetryOn::Broken),
    ("429", RetryOn::TooManyRequests),
    ("5xx", RetryOn::ServerError),
];

const MIB: u64 = 1 << 20;

/// `retry = { attempts, on, within, max_body }`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    /// `attempts` over the endpoints of this upstream, the first included. Default 2.
    pub attempts: NonZeroU32,
    /// `on`: what is tried again. Default `connect`, `429` and `5xx`.
    pub on: Vec<RetryOn>,
    /// `within`: no attempt begins later than this after the first. Default 10 s, for an attempt to connect takes up to 5 s.
    pub within: Duration,
    /// `max_body`: a request whose body has more bytes is not tried again once it was sent. Default 1 MiB.
    pub max_body: u64,
}

/// What an attempt can fail by, as far as it may be tried again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryOn {
    /// `connect`: no connection, or no handshake.
    Connect,
    /// `timeout`: no byte of an answer in `first_byte_timeout`.
    Timeout,
    /// `broken`: the connection broke before any byte of an answer.
    Broken,
    /// `429`.
    TooManyRequests,
    /// `5xx`: 500, 502, 503, 504 and 529.
    ServerError,
}

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: NonZeroU32::MIN.saturating_add(1),
            on: vec![RetryOn::Connect, RetryOn::TooManyRequests, RetryOn::ServerError],
            within: Duration::from_secs(10),
            max_body: MIB,
        }
    }
}

pub(super) fn retry(field: Field<'_>) -> Option<Retry> {
    let mut table = field.table()?;
    let retry = read(&mut table);
    table.finish();
    Some(retry)
}

fn read(table: &mut TableReader<'_>) -> Retry {
    let default = Retry::default();
    let attempts = table.read("attempts", |field| field.whole_number(1..=10)).and_then(NonZeroU32::new);
    Retry {
        attempts: attempts.unwrap_or(default.attempts),
        on: table.read("on", kinds).unwrap_or(default.on),
        within: table.read("within", Field::duration).unwrap_or(default.within),
        max_body: table.read("max_body", |field| field.size(0..=64 * MIB)).unwrap_or(default.max_body),
    }
}

fn kinds(field: Field<'_>) -> Option<Vec<RetryOn>> {
    let items = field.items()?;
    if items.is_empty() {
        return field.wrong("nothing would be tried again; say so by `attempts = 1`".to_owned());
    }
    Some(items.into_iter().filter_map(|item| item.choice(&KINDS)).collect())
}
