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

    /// The fault, with the server where it happened.
    pub fn at(self, server: &impl fmt::Display) -> Self {
        let separator = if self.detail.is_empty() { "" } else { ": " };
        Self { detail: format!("{server}{separator}{}", self.detail), ..self }
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
    /// The cluster has the key elsewhere, or nowhere.
    Cluster,
    /// Something else has written at the caller's key.
    WrongType,
    /// The answer has the wrong form.
    BadReply,
    /// The store was not asked, for it has failed too often.
    BreakerOpen,
    /// Anything else.
    Other,
}

impl FaultKind {
    /// All there are.
    pub const ALL: [Self; 11] = [
        Self::Timeout,
        Self::Disconnected,
        Self::NotPermitted,
        Self::ReadOnly,
        Self::Busy,
        Self::CannotWrite,
        Self::Cluster,
        Self::WrongType,
        Self::BadReply,
        Self::BreakerOpen,
        Self::Other,
    ];

    /// Whether other keys will meet it too. A wrong type at one key must not keep the others from being counted.
    pub fn is_of_the_whole_store(self) -> bool {
        match self {
            Self::Timeout
            | Self::Disconnected
            | Self::NotPermitted
            | Self::ReadOnly
            | Self::Busy
            | Self::CannotWrite
            | Self::Cluster
            | Self::BadReply => true,
            Self::WrongType | Self::BreakerOpen | Self::Other => false,
        }
    }

    /// Whether it says something about the one request, or about this program, and nothing about the store's health.
    pub fn is_of_one_request(self) -> bool {
        matches!(self, Self::WrongType | Self::Other)
    }

    /// Whether it stays until somebody changes the configuration, here or there.
    pub fn needs_a_person(self) -> bool {
        matches!(self, Self::NotPermitted | Self::BadReply)
    }

    /// What the operator can do, where that is known.
    pub fn remedy(self) -> Option<&'static str> {
        match self {
            Self::NotPermitted => Some(
                "check the user and the password in limiter.redis.url, and that the user may run EVAL, EVALSHA and \
                 what the scripts call (TIME, PEXPIRE and the sorted sets' commands) on keys ratelimit:*",
            ),
            Self::ReadOnly => Some("this server is a replica; limiter.redis.url has to name the primary"),
            Self::CannotWrite => Some("see Redis' maxmemory, its last save and its replicas"),
            Self::Cluster => Some(
                "if limiter.redis.url names one server of a cluster, configure `cluster` in its place; see the cluster's state",
            ),
            Self::WrongType => Some("something else wrote at ratelimit:{KEY}:*; delete what is there"),
            Self::BadReply => Some("check that it is Redis that answers at limiter.redis.url"),
            Self::Timeout | Self::Disconnected | Self::Busy | Self::BreakerOpen | Self::Other => None,
        }
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
            Self::Cluster => "cluster",
            Self::WrongType => "wrong_type",
            Self::BadReply => "bad_reply",
            Self::BreakerOpen => "breaker_open",
            Self::Other => "other",
        }
    }
}
