//! The configuration, typed and complete: every default applied, every reference checked. Nothing behind it checks again.

mod callers;
mod certificates;
mod cors;
mod environment;
mod field;
mod file;
pub mod problems;
mod redis;
mod secret;
mod source;
mod table;
mod units;
mod upstreams;

use std::{
    net::SocketAddr,
    num::{NonZeroU32, NonZeroUsize},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use jiff::Timestamp;
use toml::de::DeTable;

pub use self::upstreams::{
    Connection, Credential, Endpoint, HeaderRules, Match, Proxy, Proxying, Retry, RetryOn, Upstream,
};
use self::{
    problems::{Problem, Problems},
    source::Source,
    table::TableReader,
};
use crate::{
    cors::Cors,
    keys::{KeyHash, KeyId},
    limit::{Limit, LogKind, redis::topology::Topology},
    media::SizeBounds,
    uncounted::Uncounted,
};

/// Reads the configuration file, with this process' environment.
pub fn load(path: &Path) -> Result<Config, Problems> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let message = format!("can't read it: {error}; --config or TOLLGATE_CONFIG says where the file is");
        Problems::new(path, vec![Problem { at: None, message }])
    })?;
    parse(&text, path, &|name| std::env::var(name).ok())
}

/// Decodes the text of the configuration file at `path`: paths in it are relative to its folder. `environment` gives the
/// variables; files with secrets are read.
pub fn parse(
    text: &str,
    path: &Path,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Config, Problems> {
    let (root, errors) = DeTable::parse_recoverable(text);
    let source = Source::new(text, path, environment, &errors);
    let config = file::config(&source, TableReader::new(&source, root.get_ref(), root.span()));
    source.verdict(config)
}

/// All of `proxy.toml`.
#[derive(Clone, Debug)]
pub struct Config {
    /// `[server]`: the listeners and what they put up with.
    pub server: Server,
    /// `[admin]`: the listener for probes and metrics, where it is on.
    pub admin: Option<Admin>,
    /// `[log]`.
    pub log: Log,
    /// `[cors]`: which web pages may call, where any may.
    pub cors: Option<Cors>,
    /// `[limiter]`: where the counts live.
    pub limiter: Limiter,
    /// `[tiers.*]`, by name.
    pub tiers: Vec<Tier>,
    /// `[[keys]]`.
    pub keys: Vec<Key>,
    /// `[[upstreams]]`.
    pub upstreams: Vec<Upstream>,
}

/// `[server]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// `listen`: one address or several. Default `[::]:8443`.
    pub listen: Vec<SocketAddr>,
    /// `workers`: threads, each with its own runtime, upstream pool and Redis connection. Default: one for each core.
    pub workers: NonZeroUsize,
    /// `drain_timeout`: how long open streams may go on after SIGTERM. Default 600 s.
    pub drain_timeout: Duration,
    /// `max_body_size` of a request, default 64 MiB, and `max_file_size` of one that is no text, default 512 MiB; 0: no
    /// bound. What an upstream says itself comes first.
    pub body_sizes: SizeBounds,
    /// `public_url`: where clients find this, without a slash at its end. Nothing, or where a `match` asks for hosts: under
    /// the `Host` that each sends.
    pub public_url: Option<String>,
    /// `[server.tls]`.
    pub tls: Tls,
    /// The bounds of the edge, one key each in `[server]`.
    pub bounds: Bounds,
}

/// What a client may cost before it is cut off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// `max_connections`, over all workers. Default 10 000.
    pub max_connections: usize,
    /// `max_connections_per_ip` (IPv6: for each /64). Default 1000; 0: no such bound.
    pub max_connections_per_ip: usize,
    /// `max_streams` at a time on one HTTP/2 connection. Default 100.
    pub max_streams: u32,
    /// `max_header_size` of a request. Default 64 KiB.
    pub max_header_size: u32,
    /// `max_headers`: fields of a request's head. Default 256.
    pub max_headers: usize,
    /// `model_lookahead`: how much of a body is kept back at most while its model is looked for. Default 8 MiB.
    pub model_lookahead: u64,
    /// `handshake_timeout` of TLS. Default 10 s.
    pub handshake_timeout: Duration,
    /// `header_timeout`: from a request head's first byte to its last, and from the handshake to the first request. Default 10 s.
    pub header_timeout: Duration,
    /// `idle_timeout`: between requests on a connection. Default 75 s for HTTP/1.1; HTTP/2 gets four times as long.
    pub idle_timeout: Duration,
    /// `body_timeout`: between two pieces of a request's body. Default 120 s.
    pub body_timeout: Duration,
    /// `write_timeout`: how long a client may take nothing of an answer that waits. Default 60 s.
    pub write_timeout: Duration,
}

/// `[server.tls]`: both PEM. Where neither file exists, a development certificate is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// `certificate`: the chain. Default `certs/server.crt`.
    pub certificate: PathBuf,
    /// `private_key`. Default `certs/server.key`.
    pub private_key: PathBuf,
    /// `client_ca_file`: clients must show a certificate of these authorities (PEM). None if left out.
    pub client_ca_file: Option<PathBuf>,
}

/// `[admin]`. `enabled = false` switches it off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// `listen`. Default `127.0.0.1:9090`.
    pub listen: SocketAddr,
    /// `key_labels`: put key ids on the request metrics. Default false, for the number of series would grow with the keys.
    pub key_labels: bool,
}

/// `[log]`. Command line and environment come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// `level`: `error`, `warn`, `info`, `debug` or `trace`. Default `info`.
    pub level: String,
    /// `format`: `text` or `json`. Default `text`.
    pub format: LogFormat,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// `[limiter]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limiter {
    /// `store`: `memory` (default) or `redis`.
    pub store: Store,
    /// `on_store_failure`: `allow`, `deny` or `local` (default).
    pub on_store_failure: OnStoreFailure,
    /// `replicas`: how many processes share a limit; under `local` each counts against its share. Nothing: they count
    /// themselves, by heartbeats in Redis.
    pub replicas: Option<NonZeroU32>,
    /// `uncounted`: what uses up no limit. Default: counting tokens.
    pub uncounted: Uncounted,
}

/// Where the counts live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Store {
    /// In this process.
    Memory,
    /// In Redis, shared by all replicas.
    Redis(Redis),
}

/// `[limiter.redis]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// `url`, `cluster` or `sentinel`, with `username` and `password` or `password_file` in it, which `Debug` does not show.
    pub topology: Topology,
    /// `ca_file`: trust these certificates (PEM) and not the system's.
    pub ca_file: Option<PathBuf>,
    /// `client_certificate` and `client_key`: for servers that ask who speaks to them.
    pub client_certificate: Option<ClientCertificate>,
    /// `log`: `sorted-set` or `list`; nothing: a list where a limit is above 1000.
    pub log: Option<LogKind>,
    /// `timeout`: the deadline of a decision, after which `on_store_failure` decides. Default 50 ms.
    pub timeout: Duration,
}

/// A certificate to show to a server. Both files are PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The chain.
    pub certificate: PathBuf,
    /// Its key.
    pub private_key: PathBuf,
}

/// What to do with a request when the store can't decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStoreFailure {
    /// Let it pass.
    Allow,
    /// Answer 503.
    Deny,
    /// Count in this process, against its share of the limit.
    Local,
}

/// `[tiers.NAME]`.
#[derive(Clone, Debug)]
pub struct Tier {
    /// The name.
    pub name: Arc<str>,
    /// `limits`: all hold at once. None: no limit.
    pub limits: Vec<Limit>,
}

/// `[[keys]]`.
#[derive(Clone, Debug)]
pub struct Key {
    /// `id`: the public name.
    pub id: KeyId,
    /// `hash` of the secret.
    pub hash: KeyHash,
    /// `tier`, as an index into the tiers.
    pub tier: usize,
    /// `limits`: in place of the tier's.
    pub limits: Option<Vec<Limit>>,
    /// `expires`: from then on the key is refused.
    pub expires: Option<Timestamp>,
    /// `disabled`: refused now.
    pub disabled: bool,
}
