//! The schema of `[cors]`.

use std::time::Duration;

use super::{field::Field, table::TableReader};
use crate::cors::{Cors, OriginPattern};

/// Off where there is no such table.
pub(super) fn cors(root: &mut TableReader<'_>) -> Option<Cors> {
    let mut table = root.read("cors", Field::table)?;
    let origins = table.require("origins", "write `origins = [\"https://app.example.com\"]`", origins);
    let max_age = table.read("max_age", Field::duration_or_zero).unwrap_or(Duration::from_secs(600));
    let credentials = table.field("credentials");
    let allows_credentials = credentials.and_then(Field::flag).unwrap_or(false);
    table.finish();
    let origins = origins?;
    if let Some(field) = credentials.filter(|_| allows_credentials && origins.contains(&OriginPattern::Any)) {
        field.report("with `*` among `origins`, browsers allow no credentials; name the origins".to_owned());
    }
    Some(Cors { origins, max_age, credentials: allows_credentials })
}

fn origins(field: Field<'_>) -> Option<Vec<OriginPattern>> {
    if field.is_empty_array() {
        return field.wrong("no page could call; name at least one origin, or leave [cors] out".to_owned());
    }
    Some(field.items()?.into_iter().filter_map(|item| item.parsed(str::parse::<OriginPattern>)).collect())
}
