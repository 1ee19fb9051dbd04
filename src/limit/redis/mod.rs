//! The store that replicas share: one script in Redis decides and records, in one round trip.

mod link;
mod queue;
pub mod script;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind, Value, aio::MultiplexedConnection};
use tokio::time::Instant;

use self::{
    link::Link,
    queue::{Place, Queues},
    script::Call,
};
use super::{
    Decision, Limit, LogKind,
    breaker::{Breaker, Change},
    denied::Denied,
    fault::{Fault, FaultKind},
};
use crate::keys::KeyId;

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
    /// Where nothing is said, the limits decide.
    log: Option<LogKind>,
    timeout: Duration,
    breaker: Arc<Breaker>,
    denied: Denied,
    queues: Queues,
    began: Instant,
    /// Whole seconds after `began`, plus one.
    complained_at: AtomicU64,
}

impl RedisStore {
    /// A store that connects when it is first asked. Every answer comes within `timeout`.
    pub fn new(
        url: &str,
        timeout: Duration,
        log: Option<LogKind>,
        breaker: Arc<Breaker>,
    ) -> Result<Self, InvalidUrl> {
        // redis-rs' messages name what is wrong with the URL, never the URL, which may hold a password.
        let link = Link::new(url).map_err(|error| InvalidUrl(error.to_string()))?;
        Ok(Self(Arc::new(Inner {
            link,
            log,
            timeout,
            breaker,
            denied: Denied::default(),
            queues: Queues::default(),
            began: Instant::now(),
            complained_at: AtomicU64::new(0),
        })))
    }

    /// Decides on one request of `key` and records it. What is known to be refused is refused without asking.
    pub async fn decide(&self, key: &KeyId, limits: &[Limit]) -> Result<Decision, Fault> {
        if let Some(refusal) = self.0.denied.recall(key, limits, Instant::now()) {
            return Ok(refusal);
        }
        if self.0.breaker.is_open() {
            return Err(Fault::from(FaultKind::BreakerOpen));
        }
        match self.0.queues.enter(key, limits) {
            Place::Alone => self.ask_for_one(key, limits).await,
            Place::First => {
                let _turn = Turn { store: self, key };
                self.ask_for_one(key, limits).await
            }
            Place::Waiting(answer) => match tokio::time::timeout(self.0.timeout, answer).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(_)) => Err(Fault::from(FaultKind::Disconnected)),
                Err(_elapsed) => Err(Fault::from(FaultKind::Timeout)),
            },
        }
    }

    async fn ask_for_one(&self, key: &KeyId, limits: &[Limit]) -> Result<Decision, Fault> {
        let mut decisions = self.ask(key, limits, 1).await?;
        decisions.pop().ok_or_else(|| Fault::from(FaultKind::BadReply))
    }

    /// Asks about so many requests at once, and takes note of how that went.
    async fn ask(&self, key: &KeyId, limits: &[Limit], requests: usize) -> Result<Vec<Decision>, Fault> {
        let asked = Instant::now();
        let answer = self.within_deadline(key.as_str(), limits, requests).await;
        match &answer {
            Ok(decisions) => {
                self.0.breaker.succeeded();
                // The first ones are admitted, so the last one tells whether there is more room.
                decisions.iter().last().inspect(|last| self.0.denied.remember(key, limits, asked, last));
            }
            Err(fault) => self.note(key, fault),
        }
        answer
    }

    /// Asks for all who wait, until nobody does.
    async fn serve_queue(self, key: KeyId) {
        while let Some((limits, waiting)) = self.0.queues.next(&key) {
            match self.ask(&key, &limits, waiting.len()).await {
                // Whoever has left in the meantime has left a place that stays taken until it leaves the window.
                Ok(decisions) => {
                    waiting
                        .into_iter()
                        .zip(decisions)
                        .for_each(|(answer, decision)| drop(answer.send(Ok(decision))));
                }
                Err(fault) => waiting.into_iter().for_each(|answer| drop(answer.send(Err(fault.clone())))),
            }
        }
    }

    fn note(&self, key: &KeyId, fault: &Fault) {
        if fault.kind().is_of_one_request() {
            self.complain(key, fault);
        } else if fault.kind().is_of_the_whole_store() && self.0.breaker.failed() == Change::Opened {
            self.give_up(fault);
        }
    }

    async fn within_deadline(
        &self,
        key_id: &str,
        limits: &[Limit],
        requests: usize,
    ) -> Result<Vec<Decision>, Fault> {
        let kind = self.0.log.unwrap_or_else(|| LogKind::fit_for(limits));
        let call = Call::new(key_id, kind, limits, requests);
        let answer = tokio::time::timeout(self.0.timeout, self.run(kind, &call)).await;
        answer.unwrap_or_else(|_elapsed| Err(Fault::from(FaultKind::Timeout)))
    }

    /// Runs the script. A lost answer may mean recorded requests, so the repetition carries the same members, which a
    /// sorted set counts once. A list knows no members, and nothing else is repeated but what provably did not run.
    async fn run(&self, kind: LogKind, call: &Call<'_>) -> Result<Vec<Decision>, Fault> {
        let epoch = self.0.breaker.epoch();
        let (generation, mut connection) = self.0.link.connection(epoch).await?;
        match evaluate(&mut connection, kind, call, false).await {
            Err(error) if error.is_connection_dropped() => {
                self.0.link.discard(generation);
                if kind == LogKind::List {
                    return Err(error.into());
                }
                let (_, mut connection) = self.0.link.connection(epoch).await?;
                Ok(evaluate(&mut connection, kind, call, true).await?)
            }
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly) => {
                // The server was demoted. A new connection may reach the new primary.
                self.0.link.discard(generation);
                Err(error.into())
            }
            answer => Ok(answer?),
        }
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
            match self.within_deadline("~probe", &limits, 1).await {
                Ok(_) => break,
                Err(fault) => tracing::debug!(%fault, "Redis still does not decide"),
            }
        }
        self.0.breaker.close();
        tracing::info!("Redis decides again");
    }
}

/// The first one of a queue. However it ends, those who came meanwhile are seen to.
struct Turn<'a> {
    store: &'a RedisStore,
    key: &'a KeyId,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.store.0.queues.has_waiting(self.key) {
            tokio::spawn(self.store.clone().serve_queue(self.key.clone()));
        }
    }
}

/// Scripts can vanish from a server at any time. Whole, this one is as good as by its hash.
async fn evaluate(
    connection: &mut MultiplexedConnection,
    kind: LogKind,
    call: &Call<'_>,
    repeated: bool,
) -> Result<Vec<Decision>, RedisError> {
    let by_hash = call.command("EVALSHA", script::hash(kind), repeated);
    let reply = match send(connection, &by_hash).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            send(connection, &call.command("EVAL", script::source(kind), repeated)).await?
        }
        reply => reply?,
    };
    let numbers: Vec<i64> = redis::from_redis_value(reply)?;
    let wrong = || (ErrorKind::UnexpectedReturnType, "the script's reply has another form").into();
    call.decisions(&numbers).ok_or_else(wrong)
}

/// redis-rs hands a server's error out as a value.
async fn send(connection: &mut MultiplexedConnection, command: &Cmd) -> Result<Value, RedisError> {
    connection.send_packed_command(command).await?.extract_error()
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
