//! The servers that decide: one, or those of a cluster, each with a connection and a breaker of its own.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use redis::{ErrorKind, RedisError, ServerErrorKind};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

use super::{
    dial::Dialer,
    link::{Destination, Link},
    sentinel::Sentinels,
    slots::{SlotMap, slot_of},
    topology::{Endpoint, Login, Server, Topology},
};
use crate::limit::{
    breaker::{Breaker, Breakers},
    fault::Fault,
};

/// The map of a cluster is asked for no more often than this.
const REFRESH_INTERVAL: Duration = Duration::from_millis(100);

/// A map that takes longer to come is asked for again.
const REFRESH_TIMEOUT: Duration = Duration::from_secs(1);

/// So many servers are asked for the map at a time; the first answer counts.
const ASKED: usize = 3;

/// The name of the one server, where there is one, and else of whichever of the configured ones can be reached.
const ENTRY: &str = "entry";

/// What all workers know of a Redis together.
#[derive(Debug)]
pub struct Deployment {
    topology: Topology,
    dialer: Dialer,
    breakers: Breakers,
    slots: ArcSwap<SlotMap>,
    refreshing: AtomicBool,
    refreshed: Mutex<Option<Instant>>,
    turn: AtomicUsize,
}

impl Deployment {
    /// Nothing is connected yet. `tls` is needed where the topology is encrypted.
    pub fn new(topology: Topology, tls: Option<Arc<rustls::ClientConfig>>) -> Self {
        Self {
            topology,
            dialer: Dialer::new(tls),
            breakers: Breakers::default(),
            slots: ArcSwap::default(),
            refreshing: AtomicBool::new(false),
            refreshed: Mutex::new(None),
            turn: AtomicUsize::new(0),
        }
    }

    /// Whether every server decides, as far as it is known.
    pub fn is_up(&self) -> bool {
        !self.breakers.any_is_open()
    }

    /// The breaker before the one server; of a cluster, before those that are configured, until they have told of the others.
    pub fn breaker(&self) -> Arc<Breaker> {
        self.breakers.before(&ENTRY.into())
    }

    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    fn entry(&self) -> Destination {
        match self.topology.clone() {
            Topology::Single(server) => Destination::AnyOf(vec![server]),
            Topology::Cluster(nodes) => Destination::AnyOf(nodes),
            Topology::Sentinel { primary, sentinels, login } => {
                Destination::Primary(Sentinels::new(primary, sentinels, login, &self.dialer))
            }
        }
    }
}

/// One server that decides, as a worker sees it.
#[derive(Debug)]
pub(super) struct Node {
    name: Arc<str>,
    pub(super) link: Link,
    pub(super) breaker: Arc<Breaker>,
}

impl std::fmt::Display for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if &*self.name == ENTRY { "Redis" } else { &self.name })
    }
}

/// Where a request goes that a server of a cluster did not serve.
pub(super) enum Next {
    /// To the server that has the slot now.
    To(Arc<Node>),
    /// To the server that the slot is moving to, this once.
    Asking(Arc<Node>),
    /// To the same again in a moment.
    Again,
}

/// The servers, with the connections of one worker.
#[derive(Debug)]
pub(super) struct Servers {
    shared: Arc<Deployment>,
    entry: Arc<Node>,
    nodes: Mutex<HashMap<Arc<str>, Arc<Node>>>,
}

impl Servers {
    pub(super) fn new(shared: Arc<Deployment>) -> Self {
        let name: Arc<str> = ENTRY.into();
        let entry = Arc::new(Node {
            link: Link::new(shared.dialer.clone(), Arc::new(shared.entry())),
            breaker: shared.breakers.before(&name),
            name,
        });
        Self { shared, entry, nodes: Mutex::default() }
    }

    pub(super) fn deployment(&self) -> &Arc<Deployment> {
        &self.shared
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.shared.topology, Topology::Cluster(_))
    }

    /// The server that decides on keys with this hash tag. While a cluster's map is not known, any server does: it tells
    /// where the slot is.
    pub(super) fn deciding(&self, tag: &str) -> Arc<Node> {
        if !self.is_cluster() {
            return self.entry.clone();
        }
        let slots = self.shared.slots.load();
        slots.primary(slot_of(tag)).map_or_else(|| self.entry.clone(), |name| self.node(name))
    }

    /// All servers that decide, as far as they are known.
    pub(super) fn all(&self) -> Vec<Arc<Node>> {
        let primaries = self.shared.slots.load().primaries();
        if primaries.is_empty() {
            return vec![self.entry.clone()];
        }
        primaries.iter().map(|name| self.node(name)).collect()
    }

    /// A hash tag on which this server decides. None, if it decides on nothing any more.
    pub(super) fn tag_at(&self, node: &Node, prefix: &str) -> Option<String> {
        if !self.is_cluster() {
            return Some(prefix.to_owned());
        }
        let slots = self.shared.slots.load();
        if &*node.name == ENTRY {
            // Once the map is known, the configured nodes have no part in it but to tell it.
            return slots.primaries().is_empty().then(|| prefix.to_owned());
        }
        slots.tag_at(&node.name, prefix)
    }

    /// Where to go after this error, if a cluster says by it that another server decides. `host` gave it.
    pub(super) fn after(self: &Arc<Self>, error: &RedisError, from: &Endpoint) -> Option<Next> {
        if !self.is_cluster() {
            return None;
        }
        if error.kind() == ErrorKind::Server(ServerErrorKind::TryAgain) {
            return Some(Next::Again);
        }
        if error.is_cluster_error() {
            self.refresh();
        }
        let (address, slot) = error.redirect_node()?;
        let name: Arc<str> = match (address.strip_prefix(':'), from) {
            // A server that does not know its host means the one it was asked under.
            (Some(port), Endpoint::Tcp { host, .. }) => format!("{host}:{port}").into(),
            _ => address.into(),
        };
        if error.kind() == ErrorKind::Server(ServerErrorKind::Ask) {
            return Some(Next::Asking(self.node(&name)));
        }
        self.shared.slots.rcu(|slots| slots.with_moved(slot, name.clone()));
        Some(Next::To(self.node(&name)))
    }

    fn node(&self, name: &Arc<str>) -> Arc<Node> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(node) = nodes.get(name) {
            return node.clone();
        }
        let shared = &self.shared;
        let destination = Destination::AnyOf(server_at(name, &shared.topology).into_iter().collect());
        let link = Link::new(shared.dialer.clone(), Arc::new(destination));
        let node = Arc::new(Node { name: name.clone(), link, breaker: shared.breakers.before(name) });
        nodes.insert(name.clone(), node.clone());
        node
    }

    /// Looks in the background which server has which slot, for something suggests that what is known is old.
    pub(super) fn refresh(self: &Arc<Self>) {
        let shared = &self.shared;
        let is_recent = |at: &Instant| at.elapsed() < REFRESH_INTERVAL;
        let recent =
            shared.refreshed.lock().unwrap_or_else(PoisonError::into_inner).as_ref().is_some_and(is_recent);
        if !self.is_cluster() || recent || shared.refreshing.swap(true, Relaxed) {
            return;
        }
        let servers = self.clone();
        tokio::spawn(async move {
            servers.renew_map().await;
            let shared = &servers.shared;
            *shared.refreshed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            shared.refreshing.store(false, Relaxed);
        });
    }

    /// Learns a cluster's map, if somebody tells it.
    pub(super) async fn renew_map(&self) {
        if let Ok(Some(map)) = timeout(REFRESH_TIMEOUT, self.ask_for_map()).await {
            self.forget_all_but(&map);
            self.shared.slots.store(Arc::new(map));
        }
    }

    /// Asks some servers at once, others each time, for one of them may be the one that is away.
    async fn ask_for_map(&self) -> Option<SlotMap> {
        let mut candidates = self.all();
        let first = self.shared.turn.fetch_add(1, Relaxed) % candidates.len();
        candidates.rotate_left(first);
        candidates.truncate(ASKED);
        candidates.push(self.entry.clone());
        let mut asked: JoinSet<_> = candidates.into_iter().map(map_of).collect();
        while let Some(answer) = asked.join_next().await {
            match answer {
                Ok(Ok(map)) if !map.primaries().is_empty() => return Some(map),
                Ok(Err(fault)) => tracing::debug!(%fault, "a server did not tell the cluster's slots"),
                Ok(Ok(_)) | Err(_) => {}
            }
        }
        None
    }

    fn forget_all_but(&self, map: &SlotMap) {
        let primaries = map.primaries();
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.retain(|name, _| primaries.contains(name));
    }
}

async fn map_of(node: Arc<Node>) -> Result<SlotMap, Fault> {
    let (generation, mut connection) = node.link.connection(node.breaker.epoch()).await?;
    let Endpoint::Tcp { host, .. } = connection.endpoint().clone() else {
        return Ok(SlotMap::default());
    };
    match connection.send(redis::cmd("CLUSTER").arg("SLOTS")).await {
        Ok(answer) => Ok(SlotMap::parse(answer, &host)?),
        Err(error) => {
            if error.is_connection_dropped() {
                node.link.discard(generation);
            }
            Err(Fault::from(error).at(&node))
        }
    }
}

/// The server that a cluster calls by this name. Its nodes share a login and a transport.
fn server_at(name: &str, topology: &Topology) -> Option<Server> {
    let (host, port) = name.rsplit_once(':')?;
    // A cluster bus port can follow after an `@`.
    let port = port.split('@').next()?.parse().ok()?;
    let login: &Login = topology.login();
    let endpoint = Endpoint::Tcp { host: host.into(), port, encrypted: topology.is_encrypted() };
    Some(Server { endpoint, login: login.clone() })
}
