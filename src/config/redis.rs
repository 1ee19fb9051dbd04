//! The schema of `[limiter.redis]`.

use std::time::Duration;

use super::{Redis, certificates::certificates, field::Field, secret::secret_of_file, table::TableReader};
use crate::limit::{
    LogKind,
    redis::topology::{Endpoint, InvalidServer, Login, Server, Topology},
};

const LOG_KINDS: [(&str, LogKind); 2] = [("sorted-set", LogKind::SortedSet), ("list", LogKind::List)];

/// The section is checked even while the other store is in use; only then may it lack the address.
pub(super) fn redis(mut table: TableReader<'_>, in_use: bool) -> Option<Redis> {
    let timeout = table.read("timeout", Field::duration).unwrap_or(Duration::from_millis(50));
    let log = table.read("log", |field| field.choice(&LOG_KINDS));
    let topology = topology(&mut table, in_use);
    let topology = log_in(&mut table, topology);
    let encrypted = topology.as_ref().is_none_or(Topology::is_encrypted);
    let (ca_file, client_certificate) =
        certificates(&mut table, encrypted, "addresses that begin with rediss://");
    table.finish();
    Some(Redis { topology: topology?, ca_file, client_certificate, log, timeout })
}

/// One of three keys says where Redis is, and by that, as what it is deployed.
fn topology(table: &mut TableReader<'_>, in_use: bool) -> Option<Topology> {
    let [url, cluster, sentinel] = ["url", "cluster", "sentinel"].map(|key| table.field(key));
    let there: Vec<_> = [url, cluster, sentinel].into_iter().flatten().collect();
    if there.is_empty() && in_use {
        table.report_missing(
            "`url` is missing; write `url = \"redis://127.0.0.1:6379\"`, or `cluster` or `sentinel` in its place"
                .to_owned(),
        );
    }
    for surplus in there.iter().skip(1) {
        surplus.report_key("`url`, `cluster` and `sentinel` exclude each other; keep one of them".to_owned());
    }
    let single = url.and_then(server).map(Topology::Single);
    let nodes = cluster.and_then(nodes_of_cluster).map(Topology::Cluster);
    let watched = sentinel.and_then(watched_by_sentinels);
    single.or(nodes).or(watched)
}

/// Only the form is looked at: whether somebody is there shows later.
fn server(field: Field<'_>) -> Option<Server> {
    field.parsed(|text| text.parse::<Server>())
}

/// At least one address, all of them over the network and all or none in TLS.
fn nodes(
    field: Field<'_>,
    parse: fn(&str) -> Result<Server, InvalidServer>,
) -> Option<Vec<(Field<'_>, Server)>> {
    let items = field.items()?;
    if items.is_empty() {
        return field.wrong("expected at least one address, such as \"redis://host:6379\"".to_owned());
    }
    let mut all = Vec::with_capacity(items.len());
    for item in &items {
        let server = item.parsed(parse)?;
        if matches!(server.endpoint, Endpoint::Unix(_)) {
            return item.wrong("expected a host and a port here, not a socket".to_owned());
        }
        if all.first().is_some_and(|(_, first): &(_, Server)| first.is_encrypted() != server.is_encrypted()) {
            return item.wrong("all of these are spoken to in TLS (rediss://), or none".to_owned());
        }
        all.push((*item, server));
    }
    Some(all)
}

fn nodes_of_cluster(field: Field<'_>) -> Option<Vec<Server>> {
    let nodes = nodes(field, str::parse)?;
    let (_, first) = nodes.first()?;
    for (item, node) in &nodes {
        if node.login.database != 0 {
            return item.wrong("a cluster has no databases; write the address without one".to_owned());
        }
        if node.login != first.login {
            return item.wrong(
                "the nodes of a cluster have one login; write it the same in each address, or once as `username` \
                 and `password_file`"
                    .to_owned(),
            );
        }
    }
    Some(nodes.into_iter().map(|(_, node)| node).collect())
}

fn watched_by_sentinels(field: Field<'_>) -> Option<Topology> {
    let mut table = field.table()?;
    let primary = table.require(
        "master",
        "write `master = \"mymaster\"`, the name that the Sentinels watch",
        |field| {
            field.parsed(|text| {
                if text.is_empty() {
                    Err("expected a name, such as \"mymaster\"")
                } else {
                    Ok(text.to_owned())
                }
            })
        },
    );
    let sentinels = table.require("nodes", "write `nodes = [\"redis://sentinel:26379\"]`", |field| {
        nodes(field, Server::sentinel)
    });
    let database = table.read("database", |field| field.whole_number::<u32>(0..=1_000_000)).unwrap_or(0);
    table.finish();
    Some(Topology::Sentinel {
        primary: primary?.into(),
        sentinels: sentinels?.into_iter().map(|(_, node)| node).collect(),
        login: Login { database: database.into(), ..Login::default() },
    })
}

/// A login that stands in keys of its own, in place of the one in the address.
fn log_in(table: &mut TableReader<'_>, topology: Option<Topology>) -> Option<Topology> {
    let username = table.field("username");
    let password = match (table.field("password"), table.field("password_file")) {
        (Some(_), Some(file)) => file.wrong("expected `password` or `password_file`, not both".to_owned()),
        (Some(password), None) => password.text().map(|secret| (password, secret)),
        (None, file) => file.and_then(|file| Some((file, secret_of_file(file)?))),
    };
    let name = username.and_then(|field| field.text().map(|name| (field, name)));
    let topology = topology?;
    let mut login = topology.login().clone();
    if let Some((field, secret)) = password {
        if login.password.is_some() {
            return field.wrong("the address has a password already; keep one of them".to_owned());
        }
        if secret.is_empty() {
            return field.wrong("the password is empty".to_owned());
        }
        login.password = Some(secret);
    }
    if let Some((field, name)) = name {
        if login.username.is_some() {
            return field.wrong("the address has a user already; keep one of them".to_owned());
        }
        if login.password.is_none() {
            return field.wrong(
                "a user has a password; write `password_file`, or `password = \"${NAME}\"`".to_owned(),
            );
        }
        login.username = Some(name);
    }
    Some(topology.with_login(&login))
}
