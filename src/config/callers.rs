//! Who may call, and how often: `[tiers.*]` and `[[keys]]`.

use std::{num::NonZeroU32, sync::Arc};

use jiff::Timestamp;
use toml::de::DeValue;

use super::{
    Key, Tier,
    field::Field,
    source::Unique,
    table::{TableReader, suggest},
};
use crate::{
    keys::{KeyHash, KeyId},
    limit::{Limit, Window},
};

const UNSUPPORTED: &str = "not supported yet; this version limits requests";

/// Every tier with a name, even if its limits are wrong, so that keys find it.
pub(super) fn tiers(root: &mut TableReader<'_>) -> Vec<Tier> {
    let Some(tiers) = root.read("tiers", Field::table) else { return Vec::new() };
    tiers.named_fields().into_iter().map(tier).collect()
}

fn tier(field: Field<'_>) -> Tier {
    let name = field.key();
    check_name(name, |message| field.report_key(message));
    let mut limits_of_tier = None;
    if let Some(mut table) = field.table() {
        // A forgotten line must not open the gate.
        let hint = "write `limits = [{ requests = 10, per = \"1m\" }]`, or `limits = []` for no limit at all";
        limits_of_tier = table.require("limits", hint, limits);
        table.finish();
    }
    Tier { name: Arc::from(name), limits: limits_of_tier.unwrap_or_default() }
}

/// Reports a name that could not stand in a log line, a metric and a Redis key as it is.
pub(super) fn check_name(name: &str, report: impl FnOnce(String)) {
    if name.parse::<KeyId>().is_err() {
        report(
            "not a name: expected 1 to 64 letters, digits, `_`, `.` or `-`, the first a letter or digit"
                .to_owned(),
        );
    }
}

fn limits(field: Field<'_>) -> Option<Vec<Limit>> {
    let mut windows = Unique::new("window", "keep one of the two limits");
    Some(field.tables()?.into_iter().filter_map(|table| limit(table, &mut windows)).collect())
}

fn limit(mut table: TableReader<'_>, windows: &mut Unique<(Window, bool, bool)>) -> Option<Limit> {
    let unsupported = ["tokens", "concurrent"].map(|kind| table.refuse(kind, UNSUPPORTED)).contains(&true);
    let count_refused = table.read("count_refused", Field::flag).unwrap_or(false);
    let enforce = table.read("enforce", Field::flag).unwrap_or(true);
    let (requests, per) = if unsupported {
        (table.read("requests", requests), table.field("per"))
    } else {
        (
            table.require("requests", "write `requests = 10`", requests),
            table.require("per", "write `per = \"1m\"`", Some),
        )
    };
    let window = per.and_then(window);
    if let (Some(field), Some(window), false) = (per, window, unsupported) {
        windows.claim((window, count_refused, enforce), field);
    }
    table.finish();
    Some(Limit { requests: requests?, window: window?, count_refused, enforce })
}

fn requests(field: Field<'_>) -> Option<NonZeroU32> {
    if field.is_zero() {
        field.report(
            "a limit is at least 1; to refuse everything, set `disabled = true` on the key".to_owned(),
        );
        return None;
    }
    field.whole_number(1..=u32::MAX.into()).and_then(NonZeroU32::new)
}

fn window(field: Field<'_>) -> Option<Window> {
    match Window::new(field.duration()?) {
        Ok(window) => Some(window),
        Err(error) => field.wrong(error.to_string()),
    }
}

/// The keys. There may be none; then every caller is refused.
pub(super) fn keys(root: &mut TableReader<'_>, tiers: &[Tier]) -> Vec<Key> {
    let mut seen = Seen {
        ids: Unique::new("id", "every key has its own"),
        hashes: Unique::new("hash", "every key has its own secret"),
    };
    let tables = root.read("keys", Field::tables).unwrap_or_default();
    tables.into_iter().filter_map(|table| key(table, tiers, &mut seen)).collect()
}

struct Seen {
    ids: Unique<KeyId>,
    hashes: Unique<KeyHash>,
}

fn key(mut table: TableReader<'_>, tiers: &[Tier], seen: &mut Seen) -> Option<Key> {
    let id = table.require("id", "write `id = \"alice\"`", |field| {
        let id: KeyId = field.parsed(str::parse)?;
        seen.ids.claim(id.clone(), field);
        Some(id)
    });
    let hash = table.require("hash", "`tollgate key new` makes a key and its hash", |field| {
        let hash = hash(field)?;
        seen.hashes.claim(hash, field);
        Some(hash)
    });
    let tier = table.require("tier", "write `tier = \"free\"`", |field| tier_index(field, tiers));
    let limits = table.read("limits", limits);
    let expires = table.read("expires", instant);
    let disabled = table.read("disabled", Field::flag).unwrap_or(false);
    table.finish();
    Some(Key { id: id?, hash: hash?, tier: tier?, limits, expires, disabled })
}

fn hash(field: Field<'_>) -> Option<KeyHash> {
    let text = field.text()?;
    if text.starts_with("sk-") {
        return field.wrong(
            "this is a secret, not the hash of one: treat it as leaked; `tollgate key new` makes a key and its \
             hash, `tollgate key hash` the hash of a secret"
                .to_owned(),
        );
    }
    field.parsed(str::parse)
}

fn tier_index(field: Field<'_>, tiers: &[Tier]) -> Option<usize> {
    let name = field.text()?;
    let index = tiers.iter().position(|tier| *tier.name == *name);
    if index.is_none() {
        let names: Vec<_> = tiers.iter().map(|tier| &*tier.name).collect();
        let remedy =
            if names.is_empty() { "write a table [tiers.NAME]".to_owned() } else { suggest(&name, &names) };
        field.report_absence(format!("there is no tier of this name; {remedy}"));
    }
    index
}

/// An instant, as a TOML date-time or in a string. A date alone is the start of that day, UTC.
fn instant(field: Field<'_>) -> Option<Timestamp> {
    const FORM: &str = "write 2027-01-01T00:00:00Z, or 2027-01-01 for the start of that day, UTC";
    let text = if field.value().is_str() { field.text()? } else { String::new() };
    let in_string = DeValue::parse(&text).ok();
    let value = in_string.as_ref().map_or_else(|| field.value(), |value| value.get_ref());
    let Some(datetime) = value.as_datetime() else {
        return field.wrong(format!("not a date or time; {FORM}"));
    };
    let instant = match (datetime.date, datetime.time, datetime.offset) {
        (Some(_), None, None) => format!("{datetime}T00:00:00Z"),
        (Some(_), Some(_), None) => {
            return field.wrong(format!("a time without an offset is another instant elsewhere; {FORM}"));
        }
        _ => datetime.to_string(),
    };
    instant.parse().ok().or_else(|| field.wrong(format!("not an instant; {FORM}")))
}
