//! What an upstream is told of its clients, and what its answers do not tell them.

use crate::{
    config::{field::Field, table::TableReader},
    headers::{FieldPattern, Hidden},
};

/// Rules for header fields. By default nothing is told and nothing hidden.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderRules {
    /// `forwarded`: tell it the client's address and host in `X-Forwarded-For`, `-Host` and `-Proto`.
    pub forwarded: bool,
    /// `via`: name Tollgate in `Via`, both ways.
    pub via: bool,
    /// `hide`: fields of its answers that no client gets.
    pub hide: Hidden,
}

impl HeaderRules {
    /// Whether an upstream gets to know how its client reached Tollgate.
    pub fn tell_upstream(&self) -> bool {
        self.forwarded || self.via
    }
}

pub(super) fn header_rules(table: &mut TableReader<'_>) -> HeaderRules {
    HeaderRules {
        forwarded: table.read("forwarded", Field::flag).unwrap_or(false),
        via: table.read("via", Field::flag).unwrap_or(false),
        hide: table.read("hide", hidden).unwrap_or_default(),
    }
}

fn hidden(field: Field<'_>) -> Option<Hidden> {
    let items = field.items()?;
    Some(items.into_iter().filter_map(|item| item.parsed(str::parse::<FieldPattern>)).collect())
}
