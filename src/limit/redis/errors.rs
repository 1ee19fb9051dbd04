//! What an error of Redis means for a decision.

use redis::{ErrorKind, RedisError, ServerErrorKind};

use crate::limit::fault::{Fault, FaultKind};

/// Ways to say that something is not permitted without a code that says so. A server that wants a password refuses the
/// script's many arguments before it looks at the command, and names no password.
const FORBIDDEN: [&str; 5] = [
    "unauthenticated multibulk length",
    "unauthenticated bulk length",
    "The user executing the script can't",
    "ACL failure in script",
    "unknown command",
];

impl From<RedisError> for Fault {
    fn from(error: RedisError) -> Self {
        let kind = match error.kind() {
            ErrorKind::Io if error.is_timeout() => FaultKind::Timeout,
            ErrorKind::Io => FaultKind::Disconnected,
            ErrorKind::AuthenticationFailed => FaultKind::NotPermitted,
            ErrorKind::Parse | ErrorKind::UnexpectedReturnType => FaultKind::BadReply,
            _ => of_server(error.code().unwrap_or_default(), error.detail().unwrap_or_default()),
        };
        Self::new(kind, error.to_string())
    }
}

/// Why there is no connection. Whatever it is, it is not one request's affair.
pub(super) fn of_connecting(error: RedisError) -> Fault {
    let detail = error.to_string();
    let kind = Fault::from(error).kind();
    Fault::new(if kind.is_of_one_request() { FaultKind::Disconnected } else { kind }, detail)
}

/// Whether the connection is of no more use, though it is not lost: another one may reach another server, and after an
/// answer of the wrong form nobody knows to which question the next one belongs.
pub(super) fn is_of_the_connection(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::UnexpectedReturnType | ErrorKind::Server(ServerErrorKind::ReadOnly))
}

fn of_server(code: &str, detail: &str) -> FaultKind {
    if code != "ERR" {
        return of_code(code).unwrap_or(FaultKind::Other);
    }
    if FORBIDDEN.iter().any(|words| detail.contains(words)) {
        return FaultKind::NotPermitted;
    }
    // Servers before 7.0 wrap the error of a command in one of the script.
    let words = detail.split_whitespace().map(|word| word.trim_start_matches('-'));
    words.filter_map(of_code).next().unwrap_or(FaultKind::Other)
}

fn of_code(code: &str) -> Option<FaultKind> {
    Some(match code {
        "NOAUTH" | "WRONGPASS" | "NOPERM" | "DENIED" => FaultKind::NotPermitted,
        "READONLY" | "MASTERDOWN" => FaultKind::ReadOnly,
        "LOADING" | "BUSY" => FaultKind::Busy,
        "OOM" | "MISCONF" | "NOREPLICAS" => FaultKind::CannotWrite,
        "CLUSTERDOWN" | "MOVED" | "ASK" | "TRYAGAIN" | "CROSSSLOT" => FaultKind::Cluster,
        "WRONGTYPE" => FaultKind::WrongType,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_way_to_say_it_has_the_same_kind() {
        for (code, detail, kind) in [
            ("OOM", "command not allowed when used memory > 'maxmemory'.", FaultKind::CannotWrite),
            (
                "ERR",
                "Error running script (call to f_1): @user_script:47: @user_script: 47: -OOM command not allowed",
                FaultKind::CannotWrite,
            ),
            (
                "ERR",
                "Error running script (call to f_1): @user_script:22: WRONGTYPE Operation",
                FaultKind::WrongType,
            ),
            (
                "ERR",
                "The user executing the script can't run this command or subcommand",
                FaultKind::NotPermitted,
            ),
            ("ERR", "Protocol error: unauthenticated multibulk length", FaultKind::NotPermitted),
            ("ERR", "unknown command 'EVALSHA', with args beginning with:", FaultKind::NotPermitted),
            ("ERR", "user_script:3: attempt to compare nil with number", FaultKind::Other),
            ("NEWCODE", "of a later version", FaultKind::Other),
        ] {
            assert_eq!(of_server(code, detail), kind, "{code} {detail}");
        }
    }
}
