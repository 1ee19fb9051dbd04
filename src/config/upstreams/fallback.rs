//! Which upstream stands in for another one: `fallback`.

use std::collections::HashSet;

use super::Upstream;
use crate::config::{
    field::Field,
    table::{TableReader, nearest},
};

/// The names that stand at `fallback` anywhere. Such an upstream needs no `paths`, for requests reach it without.
pub(super) fn named(tables: &[TableReader<'_>]) -> HashSet<String> {
    tables.iter().filter_map(|table| table.glance("fallback")?.value().as_str().map(str::to_owned)).collect()
}

/// Resolves every fallback, and reports those that can't be. Where `complete` is false some upstreams could not be read.
pub(super) fn resolve(upstreams: &mut [Upstream], written: &[Option<Field<'_>>], complete: bool) {
    for (index, field) in written.iter().enumerate() {
        let Some(field) = field else { continue };
        upstreams[index].fallback = field.text().and_then(|name| find(&name, *field, upstreams, complete));
    }
    for (index, field) in written.iter().enumerate() {
        if let (Some(field), Some(fallback)) = (field, upstreams[index].fallback) {
            match mismatch(upstreams, index, fallback) {
                Some(message) => field.report(message),
                None => upstreams[fallback].stands_in = true,
            }
        }
    }
}

fn find(name: &str, field: Field<'_>, upstreams: &[Upstream], complete: bool) -> Option<usize> {
    let found = upstreams.iter().position(|upstream| &*upstream.name == name);
    if found.is_none() && complete {
        let names: Vec<_> = upstreams.iter().map(|upstream| &*upstream.name).collect();
        let hint = nearest(name, &names).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
        field.report_absence(format!("there is no upstream of this name{hint}"));
    }
    found
}

/// Why this upstream can't stand in for that one.
fn mismatch(upstreams: &[Upstream], index: usize, fallback: usize) -> Option<String> {
    let (this, other) = (&upstreams[index], &upstreams[fallback]);
    if closes_circle(upstreams, index) {
        return Some(
            "this leads in a circle back to this upstream; take one `fallback` of it out".to_owned(),
        );
    }
    if let (Some(ours), Some(theirs)) = (this.dialect, other.dialect)
        && ours != theirs
    {
        return Some(format!(
            "its dialect is another one; `{}` gets the same requests, so both speak the same",
            other.name
        ));
    }
    if this.header_rules != other.header_rules {
        return Some(format!(
            "`forwarded`, `via` and `hide` are not those of `{}`; write the same ones",
            other.name
        ));
    }
    match (this.has_credential(), other.has_credential()) {
        (true, false) => Some(format!("`{}` needs a `credential`, for this upstream has one", other.name)),
        (false, true) => Some(format!(
            "this upstream needs a `credential`, for `{}` has one: what clients bring for the one is not for the other",
            other.name
        )),
        _ => None,
    }
}

/// Whether the way from here leads back here. One circle is told of once, at its first upstream.
fn closes_circle(upstreams: &[Upstream], start: usize) -> bool {
    let mut next = upstreams[start].fallback;
    for _ in 0..upstreams.len() {
        match next {
            Some(index) if index == start => return true,
            Some(index) if index > start => next = upstreams[index].fallback,
            _ => return false,
        }
    }
    false
}
