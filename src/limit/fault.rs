//! Why a store did not decide.

use std::fmt;

/// A store's failure to decide. It is never a refusal.
#[derive(Clone, Debug)]
pub struct Fault {
    kind: FaultKind,
    detail: String,
}

impl Fault {
    /// A fault with what the store said of it.
    pub fn new(kind: FaultKind, detail: String) -> Self {
        Self { kind, detail }
    }

    /// Its class.
    pub fn kind(&self) -> FaultKind {
        self.kind
    }
}

impl From<FaultKind> for Fault {
    fn from(kind: FaultKind) -> Self {
        Self::new(kind, String::new())
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.detail.is_empty() { "" } else { ": " };
        write!(f, "{}{separator}{}", self.kind.label(), self.detail)
    }
}

/// Classes of fault, few enough for a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// No answer within the deadline.
    Timeout,
    /// No connection, or it was lost.
    Disconnected,
    /// Wrong password or missing permission: a fault of configuration.
    NotPermitted,
    /// The server is a replica.
    ReadOnly,
    /// The server is loading its data or runs another script.
    Busy,
    /// The server takes no writes: out of memory, or it can't persist.
    CannotWrite,
    /// The answer has the wrong form.
    BadReply,
    /// The store was not asked, for it has failed too often.
    BreakerOpen,
    /// Anything else.
    Other,
}

impl FaultKind {
    /// Whether other keys will meet it too. A wrong type at one key must not keep the others from being counted.
    pub fn is_of_the_whole_store(self) -> bool {
        match self {
            Self::Timeout
            | Self::Disconnected
            | Self::NotPermitted
            | Self::ReadOnly
            | Self::Busy
            | Self::CannotWrite => true,
            Self::BadReply | Self::BreakerOpen | Self::Other => false,
        }
    }

    /// Whether it says something about the one request, or about this program, and nothing about the store's health.
    pub fn is_of_one_request(self) -> bool {
        matches!(self, Self::BadReply | Self::Other)
    }

    /// The label in metrics and logs.
    pub fn label(self) -> &'static str {
        match self {
            Self::Timeout => "timeout",
            Self::Disconnected => "disconnected",
            Self::NotPermitted => "not_permitted",
            Self::ReadOnly => "read_only",
            Self::Busy => "busy",
            Self::CannotWrite => "cannot_write",
            Self::BadReply => "bad_reply",
            Self::BreakerOpen => "breaker_open",
            Self::Other => "other",
        }
    }
}
