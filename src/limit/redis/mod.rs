//! The store that replicas share: one script in Redis decides and records, in one round trip.

mod link;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value, aio::MultiplexedConnection};
use tokio::time::Instant;
use uuid::Uuid;

use self::link::Link;
use super::{
    Decision, Limit, Status, Verdict,
    breaker::{Breaker, Change},
    denied::Denied,
    fault::{Fault, FaultKind},
    window::{longest_window, most_attempts},
};
use crate::keys::KeyId;

/// The script. Its contract stands at its top.
pub const SCRIPT: &str = include_str!("sliding_window.lua");

/// How often a store that was given up is tried again. Recovery takes at most this and one call.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// Faults that concern single requests are logged no more often than this.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// The text is no Redis URL.
#[derive(Debug, thiserror::Error)]
#[error("`limiter.redis.url` is not understood: {0}")]
pub struct InvalidUrl(String);

/// Sliding-window logs in Redis. Each worker has one, with its own connection; the breaker is shared.
#[derive(Clone, Debug)]
pub struct RedisStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    link: Link,
    script: redis::Script,
    timeout: Duration,
    breaker: Arc<Breaker>,
    denied: Denied,
    began: Instant,
    /// Whole seconds after `began`, plus one.
    complained_at: AtomicU64,
}

impl RedisStore {
    /// A store that connects when it is first asked. Every answer comes within `timeout`.
    pub fn new(url: &str, timeout: Duration, breaker: Arc<Breaker>) -> Result<Self, InvalidUrl> {
        // redis-rs' messages name what is wrong with the URL, never the URL, which may hold a password.
        let link = Link::new(url).map_err(|error| InvalidUrl(error.to_string()))?;
        let script = redis::Script::new(SCRIPT);
        let (began, complained_at) = (Instant::now(), AtomicU64::new(0));
        Ok(Self(Arc::new(Inner {
            link,
            script,
            timeout,
            breaker,
            denied: Denied::default(),
            began,
            complained_at,
        })))
    }

    /// Decides on one request of `key` and records it. What is known to be refused is refused without asking.
    pub async fn decide(&self, key: &KeyId, limits: &[Limit]) -> Result<Decision, Fault> {
        let asked = Instant::now();
        if let Some(refusal) = self.0.denied.recall(key, limits, asked) {
            return Ok(refusal);
        }
        if self.0.breaker.is_open() {
            return Err(Fault::from(FaultKind::BreakerOpen));
        }
        let answer = self.within_deadline(&Call::new(key.as_str(), limits)).await;
        match &answer {
            Ok(decision) => {
                self.0.breaker.succeeded();
                self.0.denied.remember(key, limits, asked, decision);
            }
            Err(fault) => self.note(key, fault),
        }
        answer
    }

    fn note(&self, key: &KeyId, fault: &Fault) {
        if fault.kind().is_of_one_request() {
            self.complain(key, fault);
        } else if fault.kind().is_of_the_whole_store() && self.0.breaker.failed() == Change::Opened {
            self.give_up(fault);
        }
    }

    async fn within_deadline(&self, call: &Call<'_>) -> Result<Decision, Fault> {
        let answer = tokio::time::timeout(self.0.timeout, self.run(call)).await;
        answer.unwrap_or_else(|_elapsed| Err(Fault::from(FaultKind::Timeout)))
    }

    /// Runs the script. A lost answer may mean a recorded request, so the repetition carries the same member, which
    /// the script counts once. Nothing else is repeated but what provably did not run.
    async fn run(&self, call: &Call<'_>) -> Result<Decision, Fault> {
        let epoch = self.0.breaker.epoch();
        let (generation, mut connection) = self.0.link.connection(epoch).await?;
        match self.evaluate(&mut connection, call, false).await {
            Err(error) if error.is_connection_dropped() => {
                self.0.link.discard(generation);
                let (_, mut connection) = self.0.link.connection(epoch).await?;
                Ok(self.evaluate(&mut connection, call, true).await?)
            }
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) => {
                // The server was demoted. A new connection may reach the new primary.
                self.0.link.discard(generation);
                Err(error.into())
            }
            answer => Ok(answer?),
        }
    }

    /// Scripts can vanish from a server at any time. Whole, this one is as good as by its hash.
    async fn evaluate(
        &self,
        connection: &mut MultiplexedConnection,
        call: &Call<'_>,
        repeated: bool,
    ) -> Result<Decision, RedisError> {
        let by_hash = call.command("EVALSHA", self.0.script.get_hash(), repeated);
        let reply = match send(connection, &by_hash).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                send(connection, &call.command("EVAL", SCRIPT, repeated)).await?
            }
            reply => reply?,
        };
        parse(reply, call.limits)
    }

    /// Tells of a fault that is no outage, but not for every request that meets it.
    fn complain(&self, key: &KeyId, fault: &Fault) {
        let now = self.0.began.elapsed().as_secs() + 1;
        let last = self.0.complained_at.load(Relaxed);
        if last == 0 || now >= last + COMPLAINT_INTERVAL.as_secs() {
            self.0.complained_at.store(now, Relaxed);
            tracing::error!(%key, %fault, "Redis did not decide on a request; on_store_failure applied");
        }
    }

    /// Tells the operator once, and tries in the background until the store decides again.
    fn give_up(&self, fault: &Fault) {
        tracing::error!(%fault, "Redis does not decide; on_store_failure applies");
        let store = self.clone();
        tokio::spawn(async move { store.probe().await });
    }

    async fn probe(&self) {
        // A decision for a key id that nobody can have: it needs the same commands and permissions as a real one.
        let limits = [Limit::probe()];
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            self.0.breaker.renew_epoch();
            match self.within_deadline(&Call::new("~probe", &limits)).await {
                Ok(_) => break,
                Err(fault) => tracing::debug!(%fault, "Redis still does not decide"),
            }
        }
        self.0.breaker.close();
        tracing::info!("Redis decides again");
    }
}

/// redis-rs hands a server's error out as a value.
async fn send(connection: &mut MultiplexedConnection, command: &Cmd) -> Result<Value, RedisError> {
    connection.send_packed_command(command).await?.extract_error()
}

/// One call of the script, able to be sent again as the same request.
struct Call<'a> {
    admitted_log: String,
    attempted_log: String,
    member: String,
    limits: &'a [Limit],
}

impl<'a> Call<'a> {
    /// The caller's keys share a hash tag, so that a cluster serves them from one slot; `1` is the format's version.
    fn new(key_id: &str, limits: &'a [Limit]) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            admitted_log: format!("ratelimit:{{{key_id}}}:1:admitted"),
            attempted_log: format!("ratelimit:{{{key_id}}}:1:attempted"),
            member: format!("{}:{:08x}", now.as_micros(), Uuid::new_v4().as_fields().0),
            limits,
        }
    }

    fn command(&self, name: &str, script: &str, repeated: bool) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(2).arg(&self.admitted_log).arg(&self.attempted_log);
        command.arg(&self.member).arg(u8::from(repeated));
        for number in arguments(self.limits) {
            command.arg(number);
        }
        command
    }
}

/// What the script is told of the limits, from its third argument on.
pub fn arguments(limits: &[Limit]) -> impl Iterator<Item = u64> {
    let of_logs = [longest_window(limits, false), longest_window(limits, true), most_attempts(limits).into()];
    let of_limit =
        |limit: &Limit| [limit.requests.get().into(), limit.window.micros(), limit.count_refused.into()];
    of_logs.into_iter().chain(limits.iter().flat_map(of_limit))
}

/// Reads the script's reply: `{admitted, remaining, reset, wait, …}`, three numbers a limit.
fn parse(reply: Value, limits: &[Limit]) -> Result<Decision, RedisError> {
    let numbers: Vec<i64> = redis::from_redis_value(reply)?;
    let (Some((admitted, rest)), true) = (numbers.split_first(), numbers.len() == 1 + 3 * limits.len())
    else {
        return Err((ErrorKind::UnexpectedReturnType, "the script's reply has the wrong length").into());
    };
    let micros = |n: i64| Duration::from_micros(n.max(0) as u64);
    let triples = || rest.chunks_exact(3).zip(limits);
    let statuses = triples()
        .map(|(numbers, limit)| Status {
            limit: limit.requests.get(),
            remaining: u32::try_from(numbers[0].max(0)).unwrap_or(u32::MAX),
            reset_after: micros(numbers[1]),
        })
        .collect();
    let waits = triples().map(|(numbers, _)| micros(numbers[2])).enumerate();
    let (by, retry_after) = waits.max_by_key(|(_, wait)| *wait).unwrap_or_default();
    let verdict = if *admitted == 1 { Verdict::Admit } else { Verdict::Refuse { by, retry_after } };
    Ok(Decision { statuses, verdict })
}

impl From<RedisError> for Fault {
    fn from(error: RedisError) -> Self {
        let kind = match (error.kind(), error.code()) {
            (ErrorKind::AuthenticationFailed | ErrorKind::Server(ServerErrorKind::NoPerm), _)
            | (_, Some("NOAUTH" | "WRONGPASS")) => FaultKind::NotPermitted,
            (ErrorKind::Server(ServerErrorKind::ReadOnly), _) => FaultKind::ReadOnly,
            (ErrorKind::Server(ServerErrorKind::BusyLoading), _) | (_, Some("BUSY")) => FaultKind::Busy,
            (_, Some("OOM" | "MISCONF")) => FaultKind::CannotWrite,
            (ErrorKind::Parse | ErrorKind::UnexpectedReturnType, _) => FaultKind::BadReply,
            (ErrorKind::Io, _) if error.is_timeout() => FaultKind::Timeout,
            (ErrorKind::Io, _) => FaultKind::Disconnected,
            _ => FaultKind::Other,
        };
        Self::new(kind, error.to_string())
    }
}
