//! How the scripts are called, and what their replies mean.

use std::{
    sync::LazyLock,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use redis::Cmd;
use uuid::Uuid;

use crate::limit::{
    Decision, Limit, LogKind, Status, Verdict,
    window::{longest_window, most_admissions, most_attempts},
};

/// The script over logs of one kind. Its contract stands at the top of `sliding_window.lua`.
pub fn source(kind: LogKind) -> &'static str {
    match kind {
        LogKind::SortedSet => concat!(include_str!("sorted_set.lua"), include_str!("sliding_window.lua")),
        LogKind::List => concat!(include_str!("list.lua"), include_str!("sliding_window.lua")),
    }
}

/// The name by which a server that has seen the script knows it.
pub(super) fn hash(kind: LogKind) -> &'static str {
    static HASHES: LazyLock<[String; 2]> = LazyLock::new(|| {
        [LogKind::SortedSet, LogKind::List].map(|kind| redis::Script::new(source(kind)).get_hash().to_owned())
    });
    match kind {
        LogKind::SortedSet => &HASHES[0],
        LogKind::List => &HASHES[1],
    }
}

/// One call for some requests of a caller, able to be sent again for the same requests.
pub(super) struct Call<'a> {
    keys: Vec<String>,
    members: Vec<String>,
    limits: &'a [Limit],
}

impl<'a> Call<'a> {
    /// The caller's keys share a hash tag, so that a cluster serves them from one slot; `1` is the format's version. Only
    /// those are named that the limits look at: a cluster that moves a slot serves one key of it at any moment, but two
    /// only when the move is over.
    pub(super) fn new(key_id: &str, limits: &'a [Limit], requests: usize) -> Self {
        let key = |log: &str| format!("ratelimit:{{{key_id}}}:1:{log}");
        let logs = [("admitted", false), ("attempted", true)];
        let is_looked_at = |attempts| limits.iter().any(|limit| limit.count_refused == attempts);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
        let member = |_| format!("{now}:{:08x}", Uuid::new_v4().as_fields().0);
        Self {
            keys: logs
                .iter()
                .filter(|(_, attempts)| is_looked_at(*attempts))
                .map(|(log, _)| key(log))
                .collect(),
            members: (0..requests).map(member).collect(),
            limits,
        }
    }

    /// `name` is `EVALSHA` with the script's hash or `EVAL` with the script.
    pub(super) fn command(&self, name: &str, script: &str, repeated: bool) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(self.keys.len()).arg(&self.keys).arg(u8::from(repeated));
        for number in arguments(self.limits) {
            command.arg(number);
        }
        command.arg(&self.members);
        command
    }

    /// Reads the script's reply: a decision for each request, in their order.
    pub(super) fn decisions(&self, reply: &[i64]) -> Option<Vec<Decision>> {
        decisions(reply, self.limits, self.members.len())
    }
}

/// What the script is told of the limits, from its second argument on.
pub fn arguments(limits: &[Limit]) -> impl Iterator<Item = u64> {
    let of_logs = [
        longest_window(limits, false),
        longest_window(limits, true),
        most_admissions(limits).into(),
        most_attempts(limits).into(),
        limits.len() as u64,
    ];
    let of_limit = |limit: &Limit| {
        let kind = u64::from(limit.count_refused) + 2 * u64::from(!limit.enforce);
        [limit.requests.get().into(), limit.window.micros(), kind]
    };
    of_logs.into_iter().chain(limits.iter().flat_map(of_limit))
}

/// A decision for each of `requests` requests out of a reply, the first ones being those that were admitted; nothing if
/// the reply has another form.
pub fn decisions(reply: &[i64], limits: &[Limit], requests: usize) -> Option<Vec<Decision>> {
    let (admitted, of_limits) = reply.split_first()?;
    let admitted = usize::try_from(*admitted).ok().filter(|admitted| *admitted <= requests)?;
    if of_limits.len() != 3 * limits.len() {
        return None;
    }
    let of_limits: Vec<OfLimit> = of_limits.chunks_exact(3).zip(limits).map(OfLimit::read).collect();
    let decision = |index: usize| {
        let after_it = admitted.saturating_sub(index + 1);
        let is_admitted = index < admitted;
        Decision {
            statuses: of_limits.iter().map(|limit| limit.status(after_it as i64, is_admitted)).collect(),
            verdict: if is_admitted { Verdict::Admit } else { refusal(&of_limits) },
        }
    };
    Some((0..requests).map(decision).collect())
}

/// What a reply says of one limit.
struct OfLimit {
    limit: Limit,
    /// Below zero where more is used than allowed.
    remaining: i64,
    oldest_leaves: Duration,
    wait: Duration,
}

impl OfLimit {
    fn read((numbers, limit): (&[i64], &Limit)) -> Self {
        let micros = |number: i64| Duration::from_micros(number.max(0) as u64);
        Self {
            limit: *limit,
            remaining: numbers[0],
            oldest_leaves: micros(numbers[1]),
            wait: micros(numbers[2]),
        }
    }

    /// How it stood for the request after which so many more were admitted by the same call.
    fn status(&self, after_it: i64, is_admitted: bool) -> Status {
        let remaining = self.remaining + after_it;
        Status {
            limit: self.limit.requests.get(),
            remaining: u32::try_from(remaining.max(0)).unwrap_or(u32::MAX),
            reset_after: if is_admitted { self.oldest_leaves } else { self.oldest_leaves.max(self.wait) },
            over: is_admitted && !self.limit.enforce && remaining < 0,
        }
    }
}

/// The longest wait of a limit that is enforced decides.
fn refusal(of_limits: &[OfLimit]) -> Verdict {
    let enforced = of_limits.iter().enumerate().filter(|(_, of)| of.limit.enforce);
    let (by, retry_after) =
        enforced.map(|(by, of)| (by, of.wait)).max_by_key(|(_, wait)| *wait).unwrap_or_default();
    Verdict::Refuse { by, retry_after }
}
