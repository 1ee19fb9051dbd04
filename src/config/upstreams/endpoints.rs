//! Where the requests of an upstream can go: `url`, or several `[[upstreams.endpoints]]`.

use std::{num::NonZeroU32, sync::Arc};

use hyper::Uri;

use super::{Credential, credential, name, url};
use crate::config::{field::Field, source::Unique, table::TableReader};

const URL_HINT: &str = "write `url = \"https://api.openai.com\"`, or a table [[upstreams.endpoints]] with a `url` for each of several";

/// One place that serves an upstream's requests.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// `name` in logs, metrics and Redis, unique in its upstream. Default: the URL's authority, with `#2` for a second of it.
    pub name: Arc<str>,
    /// `url`: scheme `http` or `https`, authority, and a path that goes before the request's: `/` or without a slash at its end.
    pub url: Uri,
    /// `credential` set in place of the client's, the upstream's where it has none of its own; nothing: what is no Tollgate
    /// key passes. All endpoints of an upstream have one, or none has.
    pub credential: Option<Credential>,
    /// `weight`: its part of the requests, beside those of the others. Default 1.
    pub weight: NonZeroU32,
}

/// The endpoints of an upstream. None, if something is wrong with one of them.
pub(super) fn endpoints(table: &mut TableReader<'_>) -> Option<Vec<Endpoint>> {
    let credential = table.field("credential");
    let read = credential.and_then(credential::credential);
    let endpoints = match table.field("endpoints") {
        Some(field) => {
            if table.field("url").is_some() {
                field.report_key("`url` and `endpoints` exclude each other; keep one of them".to_owned());
            }
            several(field, read.as_ref())
        }
        None => {
            let url = table.require("url", URL_HINT, |field| field.parsed(url::url));
            url.map(|url| vec![only(url, read.clone())])
        }
    };
    // A credential that is wrong is not one that is missing.
    endpoints.filter(|_| credential.is_some() == read.is_some())
}

fn only(url: Uri, credential: Option<Credential>) -> Endpoint {
    Endpoint { name: authority(&url).into(), url, credential, weight: NonZeroU32::MIN }
}

fn several(field: Field<'_>, inherited: Option<&Credential>) -> Option<Vec<Endpoint>> {
    let tables = field.tables()?;
    if field.is_empty_array() {
        return field.wrong("expected at least one table with a `url`".to_owned());
    }
    let mut names = Unique::new("name", "every endpoint of an upstream has its own");
    let (count, mut read) = (tables.len(), Vec::with_capacity(tables.len()));
    let mut bare = Vec::new();
    for mut table in tables {
        let endpoint = endpoint(&mut table, inherited, &read, &mut names);
        let is_bare = endpoint.as_ref().is_some_and(|endpoint| endpoint.credential.is_none());
        read.extend(endpoint);
        bare.extend(is_bare.then(|| table.header()));
        table.finish();
    }
    if bare.len() < read.len() {
        // What the client sent would be a key for one of them, and shown to all.
        for header in bare {
            field.source().report(
                header,
                "`credential` is missing; the other endpoints of this upstream have one, so write one here or for \
                 the whole upstream"
                    .to_owned(),
            );
        }
    }
    (read.len() == count).then_some(read)
}

fn endpoint(
    table: &mut TableReader<'_>,
    inherited: Option<&Credential>,
    others: &[Endpoint],
    names: &mut Unique<String>,
) -> Option<Endpoint> {
    let url =
        table.require("url", "write `url = \"https://api.openai.com\"`", |field| field.parsed(url::url));
    let credential = table.field("credential");
    let own = credential.and_then(credential::credential);
    let weight = table.read("weight", |field| field.whole_number(1..=1000)).and_then(NonZeroU32::new);
    let written = table.read("name", |field| name(field, names));
    if credential.is_some() && own.is_none() {
        return None;
    }
    let url = url?;
    Some(Endpoint {
        name: written.unwrap_or_else(|| free_name(&url, others)),
        url,
        credential: own.or_else(|| inherited.cloned()),
        weight: weight.unwrap_or(NonZeroU32::MIN),
    })
}

fn authority(url: &Uri) -> &str {
    url.authority().map_or("", |authority| authority.as_str())
}

/// The authority, which two endpoints share that differ in their credentials or paths. A name that is written holds no `#`.
fn free_name(url: &Uri, others: &[Endpoint]) -> Arc<str> {
    let first = authority(url);
    let is_free = |name: &str| others.iter().all(|other| &*other.name != name);
    let mut numbered = (2..).map(|n| format!("{first}#{n}"));
    if is_free(first) {
        return first.into();
    }
    numbered.find(|name| is_free(name)).expect("there are more numbers than endpoints").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_of_one_host_are_numbered() {
        let mut endpoints: Vec<Endpoint> = Vec::new();
        for url in ["http://a:1/x", "http://a:1/y", "http://b", "http://a:1/x"] {
            let url: Uri = url.parse().unwrap();
            let name = free_name(&url, &endpoints);
            endpoints.push(Endpoint { name, url, credential: None, weight: NonZeroU32::MIN });
        }
        let names: Vec<_> = endpoints.iter().map(|endpoint| &*endpoint.name).collect();
        assert_eq!(names, ["a:1", "a:1#2", "b", "a:1#3"]);
    }
}
