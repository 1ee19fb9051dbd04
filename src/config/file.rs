//! The schema of `proxy.toml`: one function for each table, the defaults in them.

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    num::{NonZeroU32, NonZeroUsize},
    thread,
    time::Duration,
};

use super::{
    Admin, Bounds, Config, Limiter, Log, LogFormat, OnStoreFailure, Server, Store, Tls, callers, cors,
    field::Field,
    redis::redis,
    source::{Source, Unique},
    table::TableReader,
    upstreams,
};
use crate::{
    media::SizeBounds,
    uncounted::{PathPattern, Uncounted},
};

const DEFAULT_LISTEN: SocketAddr = SocketAddr::new(std::net::IpAddr::V6(Ipv6Addr::UNSPECIFIED), 8443);
const DEFAULT_ADMIN: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

const STORES: [(&str, bool); 2] = [("memory", false), ("redis", true)];
const FAILURE_POLICIES: [(&str, OnStoreFailure); 3] =
    [("allow", OnStoreFailure::Allow), ("deny", OnStoreFailure::Deny), ("local", OnStoreFailure::Local)];
const LOG_FORMATS: [(&str, LogFormat); 2] = [("text", LogFormat::Text), ("json", LogFormat::Json)];
const LOG_LEVELS: [(&str, &str); 5] =
    [("error", "error"), ("warn", "warn"), ("info", "info"), ("debug", "debug"), ("trace", "trace")];

/// The whole file. Where a part is wrong, something stands in for it: it is reported, and the result not used.
pub(super) fn config(source: &Source<'_>, mut root: TableReader<'_>) -> Config {
    let server = root.table("server", |table| server(source, table));
    let admin = root.table("admin", |table| admin(table, &server.listen));
    let log = root.table("log", log);
    let cors = cors::cors(&mut root);
    let limiter = root.table("limiter", limiter);
    let tiers = callers::tiers(&mut root);
    let keys = callers::keys(&mut root, &tiers);
    let upstreams = upstreams::upstreams(&mut root, server.body_sizes);
    root.finish();
    Config { server, admin, log, cors, limiter, tiers, keys, upstreams }
}

fn server(source: &Source<'_>, table: &mut TableReader<'_>) -> Server {
    let cores = || thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    Server {
        listen: table.read("listen", listen).unwrap_or_else(|| vec![DEFAULT_LISTEN]),
        workers: table
            .read("workers", |field| field.whole_number(1..=1024))
            .and_then(NonZeroUsize::new)
            .unwrap_or_else(cores),
        drain_timeout: table.read("drain_timeout", Field::duration_or_zero).unwrap_or(seconds(600)),
        body_sizes: upstreams::body_sizes(table, SizeBounds { text: 64 * MIB, file: 512 * MIB }),
        public_url: table.read("public_url", |field| field.parsed(public_url)),
        tls: table.table("tls", |table| tls(source, table)),
        bounds: bounds(table),
    }
}

/// An origin, which may stand behind a path of another server's.
fn public_url(text: &str) -> Result<String, String> {
    upstreams::url::url(text).map(|url| url.to_string().trim_end_matches('/').to_owned())
}

fn listen(field: Field<'_>) -> Option<Vec<SocketAddr>> {
    let mut addresses = Unique::new("address", "listen at it once");
    let mut all = Vec::new();
    for item in field.items_or_one() {
        let Some(address) = item.address() else { continue };
        // Port 0 is a different port each time.
        if address.port() != 0 {
            addresses.claim(address, item);
        }
        all.push(address);
    }
    if field.is_empty_array() {
        return field.wrong("expected at least one address, such as \"[::]:8443\"".to_owned());
    }
    Some(all)
}

fn tls(source: &Source<'_>, table: &mut TableReader<'_>) -> Tls {
    Tls {
        certificate: table
            .read("certificate", Field::path)
            .unwrap_or_else(|| source.resolve("certs/server.crt")),
        private_key: table
            .read("private_key", Field::path)
            .unwrap_or_else(|| source.resolve("certs/server.key")),
        client_ca_file: table.read("client_ca_file", Field::path),
    }
}

fn bounds(table: &mut TableReader<'_>) -> Bounds {
    const MANY: u64 = 10_000_000;
    let max_connections = table.read("max_connections", |field| field.whole_number(1..=MANY));
    let per_ip = table.read("max_connections_per_ip", |field| field.whole_number(0..=MANY));
    let max_streams = table.read("max_streams", |field| field.whole_number(1..=MANY));
    // hyper's HTTP/1 parser needs a buffer of 8 KiB.
    let max_header_size = table.read("max_header_size", |field| field.size(8 * KIB..=16 * MIB));
    let max_headers = table.read("max_headers", |field| field.whole_number(16..=10_000));
    let model_lookahead = table.read("model_lookahead", |field| field.size(KIB..=1024 * MIB));
    let mut duration = |key, default| table.read(key, Field::duration).unwrap_or(default);
    Bounds {
        max_connections: max_connections.unwrap_or(10_000),
        max_connections_per_ip: per_ip.unwrap_or(1000),
        max_streams: max_streams.unwrap_or(100),
        max_header_size: max_header_size.unwrap_or((64 * KIB) as u32),
        max_headers: max_headers.unwrap_or(256),
        model_lookahead: model_lookahead.unwrap_or(8 * MIB),
        handshake_timeout: duration("handshake_timeout", seconds(10)),
        header_timeout: duration("header_timeout", seconds(10)),
        idle_timeout: duration("idle_timeout", seconds(75)),
        body_timeout: duration("body_timeout", seconds(120)),
        write_timeout: duration("write_timeout", seconds(60)),
    }
}

/// The admin listener speaks plain HTTP without keys, so it never shares an address with the proxy's own.
fn admin(table: &mut TableReader<'_>, taken: &[SocketAddr]) -> Option<Admin> {
    let enabled = table.read("enabled", Field::flag).unwrap_or(true);
    let key_labels = table.read("key_labels", Field::flag).unwrap_or(false);
    let field = table.field("listen");
    let listen = field.and_then(Field::address).unwrap_or(DEFAULT_ADMIN);
    if enabled && listen.port() != 0 && taken.contains(&listen) {
        let message = format!("[server] listens at {listen} already; give `listen` of [admin] its own");
        match field {
            Some(field) => field.report(message),
            None => table.report_missing(message),
        }
    }
    enabled.then_some(Admin { listen, key_labels })
}

fn log(table: &mut TableReader<'_>) -> Log {
    Log {
        level: table.read("level", |field| field.choice(&LOG_LEVELS)).unwrap_or("info").to_owned(),
        format: table.read("format", |field| field.choice(&LOG_FORMATS)).unwrap_or(LogFormat::Text),
    }
}

fn limiter(table: &mut TableReader<'_>) -> Limiter {
    let store = table.field("store");
    let shared = store.and_then(|field| field.choice(&STORES)).unwrap_or(false);
    let section = table.field("redis");
    let redis = section.and_then(Field::table).and_then(|section| redis(section, shared));
    if let (Some(store), true, None) = (store, shared, section) {
        store.report(
            "this store needs a table [limiter.redis] with `url = \"redis://127.0.0.1:6379\"`".to_owned(),
        );
    }
    Limiter {
        store: redis.filter(|_| shared).map_or(Store::Memory, Store::Redis),
        on_store_failure: table
            .read("on_store_failure", |field| field.choice(&FAILURE_POLICIES))
            .unwrap_or(OnStoreFailure::Local),
        replicas: table.read("replicas", |field| field.whole_number(1..=10_000)).and_then(NonZeroU32::new),
        uncounted: table.read("uncounted", uncounted).unwrap_or_default(),
    }
}

fn uncounted(field: Field<'_>) -> Option<Uncounted> {
    Some(field.items()?.into_iter().filter_map(|item| item.parsed(str::parse::<PathPattern>)).collect())
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}
