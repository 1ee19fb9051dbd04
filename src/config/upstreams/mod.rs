//! Where requests go: `[[upstreams]]`.

mod connection;
mod credential;
mod endpoints;
mod fallback;
mod headers;
mod matching;
mod paths;
mod proxy;
mod retry;
pub(super) mod url;

use std::{collections::HashSet, sync::Arc, time::Duration};

use self::paths::Unnamed;
pub use self::{
    connection::Connection,
    credential::Credential,
    endpoints::Endpoint,
    headers::HeaderRules,
    matching::Match,
    proxy::{Proxy, Proxying},
    retry::{Retry, RetryOn},
};
use super::{callers::check_name, field::Field, source::Unique, table::TableReader};
use crate::{dialect::Dialect, media::SizeBounds};

/// `[[upstreams]]`.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// `name`, in logs and metrics.
    pub name: Arc<str>,
    /// `paths`: prefixes, each `/` or without a slash at its end.
    pub paths: Vec<String>,
    /// `strip_prefix`: what is taken off a path before the upstream gets it; each of `paths` begins so. Has no slash at
    /// its end.
    pub strip_prefix: Option<String>,
    /// `match`: what else must hold for a request to come here.
    pub matches: Match,
    /// `max_body_size` and `max_file_size`. Default: those of `[server]`.
    pub body_sizes: SizeBounds,
    /// `dialect`; nothing: judged by each request's path.
    pub dialect: Option<Dialect>,
    /// Where its requests can go; at least one.
    pub endpoints: Vec<Endpoint>,
    /// What is told to it and hidden of its answers.
    pub header_rules: HeaderRules,
    /// `retry`; nothing: no request is tried again, but for one on a stale connection.
    pub retry: Option<Retry>,
    /// `fallback`: what is tried when nothing is left to try here, as an index into the upstreams. Never in a circle.
    pub fallback: Option<usize>,
    /// It is the `fallback` of another one.
    pub stands_in: bool,
    /// How connections to its endpoints are made and kept.
    pub connection: Connection,
    /// `first_byte_timeout`: from the request's last byte to the answer's head. Default 600 s.
    pub first_byte_timeout: Duration,
    /// `idle_timeout`: between two pieces of an answer. Default 600 s.
    pub idle_timeout: Duration,
    /// `total_timeout`: from the start of a request to the last byte of its answer. Default: none.
    pub total_timeout: Option<Duration>,
    /// `keepalive`: after so much silence of an event stream its client is told that it lives. Default: never.
    pub keepalive: Option<Duration>,
    /// `websocket`: whether a client may switch to it. Default true.
    pub websocket: bool,
    /// `websocket_idle_timeout`: how long both sides of a WebSocket may be silent. Default 3600 s.
    pub websocket_idle_timeout: Duration,
}

impl Upstream {
    /// Whether Tollgate shows a credential of its own there: at all endpoints, or at none.
    pub fn has_credential(&self) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.credential.is_some())
    }
}

/// The upstreams, of which there is at least one.
pub(super) fn upstreams(root: &mut TableReader<'_>, body_sizes: SizeBounds) -> Vec<Upstream> {
    const NONE: &str = "there is no upstream; write a table [[upstreams]] with `name` and `url = \"https://api.openai.com\"`";
    let Some(field) = root.field("upstreams") else {
        root.report_missing(NONE.to_owned());
        return Vec::new();
    };
    let Some(tables) = field.tables() else { return Vec::new() };
    if field.is_empty_array() {
        field.report(NONE.to_owned());
    }
    let mut seen = Seen {
        names: Unique::new("name", "every upstream has its own"),
        routes: Unique::new(
            "prefix",
            "upstreams that share one differ in `match`, and longer prefixes may branch off",
        ),
    };
    let fallbacks = fallback::named(&tables);
    let count = tables.len();
    let (mut upstreams, fallback_fields): (Vec<_>, Vec<_>) = tables
        .into_iter()
        .filter_map(|table| upstream(table, count, body_sizes, &fallbacks, &mut seen))
        .unzip();
    let complete = upstreams.len() == count;
    fallback::resolve(&mut upstreams, &fallback_fields, complete);
    upstreams
}

struct Seen {
    names: Unique<String>,
    routes: Unique<paths::Claim>,
}

/// An upstream, and what it says of its fallback, which may follow it in the file. `count`: how many there are.
fn upstream<'a>(
    mut table: TableReader<'a>,
    count: usize,
    body_sizes: SizeBounds,
    fallbacks: &HashSet<String>,
    seen: &mut Seen,
) -> Option<(Upstream, Option<Field<'a>>)> {
    let name = table.require("name", "write `name = \"openai\"`", |field| name(field, &mut seen.names));
    let endpoints = endpoints::endpoints(&mut table);
    let unnamed = if name.as_deref().is_some_and(|name| fallbacks.contains(name)) {
        Unnamed::Nothing
    } else if count == 1 + fallbacks.len() || count == 1 {
        Unnamed::Everything
    } else {
        Unnamed::Wrong
    };
    let place = table.field("match");
    let matches = place.map_or_else(|| Some(Match::default()), matching::matches);
    let paths = paths::paths(&mut table, unnamed, (place, matches.as_ref()), &mut seen.routes);
    let strip_prefix = table.read("strip_prefix", |field| paths::strip_prefix(field, &paths));
    let body_sizes = self::body_sizes(&mut table, body_sizes);
    let dialect = table.read("dialect", dialect);
    let header_rules = headers::header_rules(&mut table);
    let urls: Vec<_> = endpoints.iter().flatten().map(|endpoint| &endpoint.url).collect();
    let connection = connection::connection(&mut table, &urls);
    let websocket = table.read("websocket", Field::flag).unwrap_or(true);
    let mut duration = |key, default| table.read(key, Field::duration).unwrap_or(default);
    let first_byte_timeout = duration("first_byte_timeout", Duration::from_secs(600));
    let idle_timeout = duration("idle_timeout", Duration::from_secs(600));
    let websocket_idle_timeout = duration("websocket_idle_timeout", Duration::from_secs(3600));
    let total_timeout = table.read("total_timeout", Field::duration);
    let keepalive = table.read("keepalive", |field| keepalive(field, idle_timeout));
    let retry = table.read("retry", retry::retry);
    let fallback = table.field("fallback");
    table.finish();
    let endpoints = endpoints?;
    // Where there is a choice, it is made use of.
    let has_choice = endpoints.len() > 1 || fallback.is_some();
    let upstream = Upstream {
        name: name?,
        paths,
        strip_prefix,
        matches: matches?,
        body_sizes,
        dialect,
        endpoints,
        header_rules,
        retry: retry.or_else(|| has_choice.then(Retry::default)),
        fallback: None,
        stands_in: false,
        connection,
        first_byte_timeout,
        idle_timeout,
        total_timeout,
        keepalive,
        websocket,
        websocket_idle_timeout,
    };
    Some((upstream, fallback))
}

/// A silent upstream is cut at its `idle_timeout`, so that a longer silence never comes.
fn keepalive(field: Field<'_>, idle_timeout: Duration) -> Option<Duration> {
    let after = field.duration()?;
    if after >= idle_timeout {
        return field.wrong("no stream is silent for so long; write less than `idle_timeout`".to_owned());
    }
    Some(after)
}

/// `max_body_size` and `max_file_size`.
pub(super) fn body_sizes(table: &mut TableReader<'_>, default: SizeBounds) -> SizeBounds {
    SizeBounds {
        text: table.read("max_body_size", Field::size_bound).unwrap_or(default.text),
        file: table.read("max_file_size", Field::size_bound).unwrap_or(default.file),
    }
}

/// The name of an upstream or an endpoint, which no other one may have.
fn name(field: Field<'_>, names: &mut Unique<String>) -> Option<Arc<str>> {
    let name = field.text()?;
    check_name(&name, |message| field.report(message));
    names.claim(name.clone(), field);
    Some(name.into())
}

fn dialect(field: Field<'_>) -> Option<Dialect> {
    let options = Dialect::NAMES.map(|name| (name, name));
    field.choice(&options)?.parse().ok()
}
