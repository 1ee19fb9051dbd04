//! The store that replicas share: one script in Redis decides and records, in one round trip.

mod aside;
mod check;
mod cooldowns;
mod dial;
mod errors;
mod heartbeat;
mod link;
mod queue;
pub mod script;
mod sentinel;
mod servers;
mod slots;
pub mod topology;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::time::Instant;
use uuid::Uuid;

pub use self::{
    cooldowns::{Cooldowns, Pauses},
    heartbeat::Heartbeat,
    servers::Deployment,
};
use self::{
    dial::Connection,
    errors::is_of_the_connection,
    queue::{Place, Queues},
    script::Call,
    servers::{Next, Node, Servers},
};
use super::{
    Decision, Limit, LogKind,
    breaker::Change,
    denied::Denied,
    fault::{Fault, FaultKind},
};
use crate::keys::KeyId;

/// A probe is a decision for a key id that nobody can have: it needs the same commands and permissions as a real one.
const PROBE_TAG: &str = "~probe";

/// A hash tag that no probe had before. Once a script has removed something it may write to a server whose memory is full,
/// so with the remains of another probe in its log such a server would seem to decide.
fn probe_tag() -> String {
    format!("{PROBE_TAG}{:08x}-", Uuid::new_v4().as_fields().0)
}

/// How often a request may be sent on by the servers of a cluster, and how often it waits for a slot that moves.
const MOST_DETOURS: u32 = 6;

/// A slot on its way settles about as fast as that.
const SLOT_PAUSE: Duration = Duration::from_millis(5);

/// How often a store that was given up is tried again. Recovery takes at most this and one call.
const PROBE_INTERVAL: Duration = Duration::from_millis(250);

/// Faults that concern single requests are logged no more often than this.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// Sliding-window logs in Redis. Each worker has one, with its own connections; what is known of the servers is shared.
#[derive(Clone, Debug)]
pub struct RedisStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    servers: Arc<Servers>,
    /// Where nothing is said, the limits decide.
    log: Option<LogKind>,
    timeout: Duration,
    denied: Denied,
    queues: Queues,
    began: Instant,
    /// Whole seconds after `began`, plus one.
    complained_at: AtomicU64,
}

impl RedisStore {
    /// A store that connects when it is first asked. Every answer comes within `timeout`.
    pub fn new(deployment: &Arc<Deployment>, timeout: Duration, log: Option<LogKind>) -> Self {
        Self(Arc::new(Inner {
            servers: Arc::new(Servers::new(deployment.clone())),
            log,
            timeout,
            denied: Denied::default(),
            queues: Queues::default(),
            began: Instant::now(),
            complained_at: AtomicU64::new(0),
        }))
    }

    /// Decides on one request of `key` and records it. What is known to be refused is refused without asking.
    pub async fn decide(&self, key: &KeyId, limits: &[Limit]) -> Result<Decision, Fault> {
        if let Some(refusal) = self.0.denied.recall(key, limits, Instant::now()) {
            return Ok(refusal);
        }
        if self.0.servers.deciding(key.as_str()).breaker.is_open() {
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
                // A crowd behind one silent call has to open the breaker as well as that many calls.
                Err(_elapsed) => {
                    let fault = Fault::from(FaultKind::Timeout);
                    self.note(key, &fault, &self.0.servers.deciding(key.as_str()));
                    Err(fault)
                }
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
        let mut server = self.0.servers.deciding(key.as_str());
        let answer = self.within_deadline(key.as_str(), limits, requests, &mut server).await;
        let asking = asked..Instant::now();
        match &answer {
            Ok(decisions) => {
                server.breaker.succeeded();
                // The first ones are admitted, so the last one tells whether there is more room.
                decisions.iter().last().inspect(|last| self.0.denied.remember(key, limits, asking, last));
            }
            Err(fault) => self.note(key, fault, &server),
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

    fn note(&self, key: &KeyId, fault: &Fault, server: &Arc<Node>) {
        // A slot that is nowhere at the moment is no fault of the server that says so.
        let is_of_slot = fault.kind() == FaultKind::Cluster && self.0.servers.is_cluster();
        if is_of_slot || fault.kind().is_of_one_request() {
            self.complain(key, fault);
        } else if fault.kind().is_of_the_whole_store() {
            self.0.servers.refresh();
            if server.breaker.failed() == Change::Opened {
                self.give_up(fault, server);
            }
        }
    }

    /// `server` is the one to ask, and afterwards the one that was asked last.
    async fn within_deadline(
        &self,
        key_id: &str,
        limits: &[Limit],
        requests: usize,
        server: &mut Arc<Node>,
    ) -> Result<Vec<Decision>, Fault> {
        let kind = self.0.log.unwrap_or_else(|| LogKind::fit_for(limits));
        let call = Call::new(key_id, limits, requests);
        let answer = tokio::time::timeout(self.0.timeout, self.run(key_id, kind, &call, server)).await;
        if let Ok(answer) = answer {
            server.link.was_answered();
            return answer;
        }
        server.link.was_silent();
        Err(Fault::from(FaultKind::Timeout))
    }

    /// Runs the script. A lost answer may mean recorded requests, so the repetition carries the same members, which a
    /// sorted set counts once. A list knows no members, and nothing else is repeated but what provably did not run.
    async fn run(
        &self,
        key_id: &str,
        kind: LogKind,
        call: &Call<'_>,
        server: &mut Arc<Node>,
    ) -> Result<Vec<Decision>, Fault> {
        let (mut repeated, mut asking, mut detours) = (false, false, 0);
        loop {
            let (generation, connection) = server.link.connection(server.breaker.epoch()).await?;
            let mut connection = if asking { connection.asking() } else { connection };
            let error = match evaluate(&mut connection, kind, call, repeated).await {
                Ok(decisions) => return Ok(decisions),
                Err(error) => error,
            };
            // Lost, or cut in mid-answer, or of no sense: all the same, the decision may have been made.
            let is_lost = error.is_unrecoverable_error();
            if is_lost || is_of_the_connection(&error) {
                server.link.discard(generation);
            }
            if is_lost && !repeated && kind != LogKind::List {
                repeated = true;
                continue;
            }
            let next = self.0.servers.after(&error, connection.endpoint()).filter(|_| detours < MOST_DETOURS);
            asking = matches!(next, Some(Next::Asking(_)));
            match next {
                Some(Next::To(other) | Next::Asking(other)) => *server = other,
                Some(Next::Again) => {
                    tokio::time::sleep(SLOT_PAUSE).await;
                    *server = self.0.servers.deciding(key_id);
                }
                None => return Err(error.into()),
            }
            if server.breaker.is_open() && !key_id.starts_with(PROBE_TAG) {
                return Err(Fault::from(FaultKind::BreakerOpen));
            }
            detours += 1;
        }
    }

    /// Tells of a fault that is no outage, but not for every request that meets it.
    fn complain(&self, key: &KeyId, fault: &Fault) {
        let now = self.0.began.elapsed().as_secs() + 1;
        let last = self.0.complained_at.load(Relaxed);
        if last == 0 || now >= last + COMPLAINT_INTERVAL.as_secs() {
            self.0.complained_at.store(now, Relaxed);
            let remedy = fault.kind().remedy();
            tracing::error!(%key, %fault, remedy, "Redis did not decide on a request; on_store_failure applied");
        }
    }

    /// Tells the operator once, and tries in the background until the server decides again.
    fn give_up(&self, fault: &Fault, server: &Arc<Node>) {
        tracing::error!(%fault, remedy = fault.kind().remedy(), "{server} does not decide; on_store_failure applies");
        let (store, server, told) = (self.clone(), server.clone(), fault.kind());
        tokio::spawn(async move { store.probe(&server, told).await });
    }

    /// What the operator was `told` needs no repetition, but an outage can end in front of a lock.
    async fn probe(&self, server: &Arc<Node>, mut told: FaultKind) {
        let limits = [Limit::probe()];
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            self.0.servers.refresh();
            let Some(tag) = self.0.servers.tag_at(server, &probe_tag()) else {
                break tracing::info!("{server} has no part in the cluster any more");
            };
            server.breaker.renew_epoch();
            match self.within_deadline(&tag, &limits, 1, &mut server.clone()).await {
                Ok(_) => break tracing::info!("{server} decides again"),
                // It decides, though not on this, which requests will meet or not.
                Err(fault) if fault.kind().is_of_one_request() => {
                    break tracing::info!("{server} decides again");
                }
                Err(fault) if fault.kind().needs_a_person() && told != fault.kind() => {
                    told = fault.kind();
                    tracing::error!(%fault, remedy = told.remedy(), "{server} still does not decide, now for this reason");
                }
                Err(fault) => tracing::debug!(%fault, "{server} still does not decide"),
            }
        }
        server.breaker.close();
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
    connection: &mut Connection,
    kind: LogKind,
    call: &Call<'_>,
    repeated: bool,
) -> Result<Vec<Decision>, RedisError> {
    let by_hash = call.command("EVALSHA", script::hash(kind), repeated);
    let reply = match connection.send(&by_hash).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            connection.send(&call.command("EVAL", script::source(kind), repeated)).await?
        }
        reply => reply?,
    };
    let numbers: Vec<i64> = redis::from_redis_value(reply)?;
    let wrong = || (ErrorKind::UnexpectedReturnType, "the script's reply has another form").into();
    call.decisions(&numbers).ok_or_else(wrong)
}
