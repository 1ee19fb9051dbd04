//! The process: workers, what they share, and how it all ends.
//!
//! Each worker is a thread with a runtime of its own, its own listening sockets, upstream connections and Redis
//! connection. A client's connection lives on one worker, and nothing in the path of a request waits for another.

mod open_files;
mod pauses;
mod signals;
mod workers;

use std::{io, net::SocketAddr, num::NonZeroU32, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use jiff::Timestamp;
use tokio::{net::TcpListener, sync::watch};

use self::{
    open_files::affordable_connections,
    signals::{Signals, Wish},
    workers::{Workers, current_thread_runtime},
};
use crate::{
    admin::Admin,
    config::{self, Config, OnStoreFailure, Store, problems::Problems},
    cut::{Cut, Reason},
    limit::{
        Fallback, Limiter,
        fault::FaultKind,
        memory::MemoryStore,
        redis::{Cooldowns, Deployment, Heartbeat, RedisStore},
        replicas::Replicas,
    },
    metrics::{KnownLabels, Metrics},
    policy::Policy,
    proxy::{Proxy, Shared},
    reload::{self, ReloadError},
    server::{self, Admission, Phase, Server},
    tls::{self, Certificate, TlsError},
    upstream::{Connections, EndpointStates},
};

/// A certificate that ends within this is warned about.
const EXPIRY_WARNING: Duration = Duration::from_secs(7 * 86_400);

/// Why the process could not begin.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] Problems),
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// An address is taken, for example.
    #[error(transparent)]
    Bind(#[from] server::BindError),
    /// The operating system refused a thread or a runtime.
    #[error("can't start: {0}")]
    System(#[from] io::Error),
}

/// How the process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Everything that had begun was finished.
    Drained,
    /// The time to drain ran out, and what was left was cut.
    Cut,
    /// A second signal cut everything short.
    Stopped,
}

/// Where a process listens, once it does.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// For clients.
    pub server: Vec<SocketAddr>,
    /// For probes and metrics.
    pub admin: Option<SocketAddr>,
}

/// Serves until signals end it. `load` reads the configuration, once more at every SIGHUP; `ready` is called once,
/// when connections are accepted.
pub fn run(
    load: impl Fn() -> Result<Config, Problems>,
    ready: impl FnOnce(&Addresses),
) -> Result<Ending, StartError> {
    let config = &load()?;
    let (tls, certificate) = tls::server_config(&config.server.tls)?;
    announce_certificate(&certificate, &config.server.tls);
    let tls = Arc::new(ArcSwap::from(tls));
    let shared = shared(config)?;
    let bounds = &shared.bounds;
    let admission =
        Admission::new(affordable_connections(bounds.max_connections), bounds.max_connections_per_ip);
    let store = deployment(&config.limiter.store)?;
    let phase = watch::Sender::new(Phase::Serving);
    let cut = Cut::default();

    let control = current_thread_runtime()?;
    let _entered = control.enter();
    let signals = Signals::install()?;
    let listeners = server::bind(&config.server.listen, config.server.workers)?;
    let admin = config.admin.as_ref().map(|admin| bind_admin(admin.listen)).transpose()?;
    let addresses = Addresses {
        server: listeners.addresses.clone(),
        admin: admin.as_ref().map(TcpListener::local_addr).transpose()?,
    };
    let replicas = Replicas::new(config.limiter.replicas.unwrap_or(NonZeroU32::MIN));
    let limiters = limiters(&config.limiter, config.server.workers.get(), store.as_ref(), &replicas);
    let heartbeat = store.as_ref().and_then(|store| heartbeat(&config.limiter, store));
    let cooldowns = store.as_ref().map(Cooldowns::new);
    let check = store.as_ref().and_then(|store| check(&config.limiter.store, store));
    let servers = limiters.into_iter().map(|limiter| Server {
        proxy: Arc::new(Proxy { shared: shared.clone(), limiter, connections: Connections::default() }),
        tls: tls.clone(),
        admission: admission.clone(),
        cut: cut.clone(),
        phase: phase.subscribe(),
    });
    let workers = Workers::spawn(servers, listeners)?;
    if let Some(listener) = admin {
        control.spawn(
            Admin {
                metrics: shared.metrics.clone(),
                endpoints: shared.endpoints.clone(),
                store,
                replicas: replicas.clone(),
                phase: phase.subscribe(),
            }
            .serve(listener),
        );
    }
    heartbeat.map(|heartbeat| control.spawn(heartbeat.teach(replicas)));
    cooldowns.map(|cooldowns| control.spawn(cooldowns.share(shared.endpoints.clone())));
    check.map(|check| control.spawn(check));
    announce_addresses(&addresses);
    ready(&addresses);
    let reload = || {
        let published =
            load().map_err(ReloadError::from).and_then(|new| reload::publish(config, &new, &shared, &tls));
        announce_reload(published);
    };
    Ok(control.block_on(supervise(
        signals,
        Lever { phase, cut },
        workers,
        config.server.drain_timeout,
        reload,
    )))
}

/// What all workers share.
fn shared(config: &Config) -> Result<Arc<Shared>, TlsError> {
    let key_labels = config.admin.as_ref().is_some_and(|admin| admin.key_labels);
    let metrics = Arc::new(Metrics::new(key_labels, &known_labels()));
    let endpoints = EndpointStates::new(metrics.clone());
    let policy = ArcSwap::from_pointee(Policy::compile(config, &endpoints)?);
    if config.keys.is_empty() {
        tracing::warn!(
            "no [[keys]] are configured, so everybody is answered 401; `tollgate key new` makes one"
        );
    }
    Ok(Arc::new(Shared {
        policy,
        metrics,
        bounds: config.server.bounds.clone(),
        endpoints,
        public_url: config.server.public_url.clone(),
    }))
}

/// Reloads when it is told to, waits for the wish to end, lets the workers drain, and cuts them short when time or
/// patience run out.
async fn supervise(
    mut signals: Signals,
    lever: Lever,
    mut workers: Workers,
    drain: Duration,
    reload: impl Fn(),
) -> Ending {
    loop {
        tokio::select! {
            wish = signals.next() => match wish {
                Wish::Reload => reload(),
                Wish::End => break tracing::info!("draining; a second signal ends at once"),
            },
            () = workers.ended() => break tracing::error!("the workers ended by themselves"),
        }
    }
    lever.phase.send_replace(Phase::Draining);
    let ending = tokio::select! {
        () = workers.ended() => Ending::Drained,
        () = tokio::time::sleep(drain) => Ending::Cut,
        () = signals.end() => Ending::Stopped,
    };
    lever.cut.because(Reason::Stopping);
    lever.phase.send_replace(Phase::Stopping);
    workers.join();
    match ending {
        Ending::Drained => tracing::info!("drained"),
        Ending::Cut => tracing::warn!(after = ?drain, "the time to drain ran out; what was left was cut"),
        Ending::Stopped => tracing::warn!("stopped at once"),
    }
    ending
}

/// What the workers are told of the end by.
struct Lever {
    phase: watch::Sender<Phase>,
    cut: Cut,
}

/// What all workers know of Redis, where it is the store.
fn deployment(store: &Store) -> Result<Option<Arc<Deployment>>, TlsError> {
    let Store::Redis(redis) = store else { return Ok(None) };
    let tls = redis.topology.is_encrypted().then(|| tls::store_config(redis)).transpose()?;
    Ok(Some(Arc::new(Deployment::new(redis.topology.clone(), tls))))
}

/// One limiter for each worker. Memory is shared by all; connections to Redis are each one's own.
fn limiters(
    config: &config::Limiter,
    workers: usize,
    deployment: Option<&Arc<Deployment>>,
    replicas: &Replicas,
) -> Vec<Limiter> {
    let memory = Arc::new(MemoryStore::new());
    let fallback = match config.on_store_failure {
        OnStoreFailure::Allow => Fallback::Allow,
        OnStoreFailure::Deny => Fallback::Deny,
        OnStoreFailure::Local => Fallback::Local(memory.clone(), replicas.clone()),
    };
    let limiter = || match (&config.store, deployment) {
        (Store::Redis(redis), Some(deployment)) => {
            Limiter::Redis(RedisStore::new(deployment, redis.timeout, redis.log), fallback.clone())
        }
        _ => Limiter::Memory(memory.clone()),
    };
    (0..workers).map(|_| limiter()).collect()
}

/// Counts the processes, where that matters and nobody has said it.
fn heartbeat(config: &config::Limiter, store: &Arc<Deployment>) -> Option<Heartbeat> {
    let matters = config.on_store_failure == OnStoreFailure::Local && config.replicas.is_none();
    matters.then(|| Heartbeat::new(store))
}

/// Looks at Redis and warns, without anybody waiting for it.
fn check(store: &Store, deployment: &Arc<Deployment>) -> Option<impl Future<Output = ()> + 'static> {
    let Store::Redis(redis) = store else { return None };
    let store = RedisStore::new(deployment, redis.timeout, redis.log);
    Some(async move { store.check().await })
}

fn known_labels() -> KnownLabels {
    KnownLabels {
        faults: FaultKind::ALL.map(FaultKind::label).into(),
        policies: Fallback::LABELS.into(),
        refusals: server::refusal_labels(),
        expiries: server::expiry_labels(),
    }
}

fn bind_admin(address: SocketAddr) -> Result<TcpListener, StartError> {
    let one = std::num::NonZeroUsize::MIN;
    let listeners = server::bind(&[address], one)?;
    let socket =
        listeners.of_workers.into_iter().flatten().next().expect("one address was bound for one worker");
    Ok(TcpListener::from_std(socket)?)
}

fn announce_certificate(certificate: &Certificate, files: &config::Tls) {
    let file = files.certificate.display();
    if certificate.development {
        tracing::warn!(
            "a self-signed development certificate is in use; clients trust it with SSL_CERT_FILE={file} (Python), \
             NODE_EXTRA_CA_CERTS={file} (Node), curl --cacert {file}"
        );
    }
    let left = certificate.expires_in(Timestamp::now());
    if left < EXPIRY_WARNING {
        tracing::warn!(not_after = %certificate.not_after, "the certificate in {file} expires soon");
    }
}

fn announce_addresses(addresses: &Addresses) {
    for address in &addresses.server {
        tracing::info!(%address, "listening");
    }
    if let Some(address) = addresses.admin {
        tracing::info!(%address, "admin listening");
    }
}

fn announce_reload(published: Result<Vec<&'static str>, ReloadError>) {
    match published {
        Ok(waiting) if waiting.is_empty() => tracing::info!("reloaded"),
        Ok(waiting) => {
            tracing::warn!(sections = waiting.join(" "), "reloaded, but changes here wait for the next start")
        }
        Err(error) => tracing::error!(%error, "not reloaded; what was in force stays in force"),
    }
}
