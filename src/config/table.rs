//! Reading one table: hands out its fields, and tells of the keys that nobody asked for.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::{field::Field, source::Source};

/// A table of which each key is asked for once. `finish` reports the others.
pub(super) struct TableReader<'a> {
    source: &'a Source<'a>,
    entries: &'a DeTable<'a>,
    header: Range<usize>,
    known: Vec<&'static str>,
    refused: Vec<&'static str>,
}

impl<'a> TableReader<'a> {
    /// A reader of these entries; `header` is where a missing key is reported.
    pub(super) fn new(source: &'a Source<'a>, entries: &'a DeTable<'a>, header: Range<usize>) -> Self {
        Self { source, entries, header, known: Vec::new(), refused: Vec::new() }
    }

    /// The file.
    pub(super) fn source(&self) -> &'a Source<'a> {
        self.source
    }

    /// What stands under the key, if anything does.
    pub(super) fn field(&mut self, key: &'static str) -> Option<Field<'a>> {
        self.known.push(key);
        self.find(key)
    }

    /// The same, before its turn: it is asked for again.
    pub(super) fn glance(&self, key: &'static str) -> Option<Field<'a>> {
        self.find(key)
    }

    /// The value under the key. Nothing if it isn't there, or is wrong and reported.
    pub(super) fn read<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(Field<'a>) -> Option<T>,
    ) -> Option<T> {
        self.field(key).and_then(read)
    }

    /// The same for a key that must be there; `hint` tells what to write.
    pub(super) fn require<T>(
        &mut self,
        key: &'static str,
        hint: &str,
        read: impl FnOnce(Field<'a>) -> Option<T>,
    ) -> Option<T> {
        let field = self.field(key);
        if field.is_none() {
            self.report_missing(format!("`{key}` is missing; {hint}"));
        }
        field.and_then(read)
    }

    /// The table under the key, read by `read`; an empty one where the file has none, so that defaults stand in one place.
    pub(super) fn table<T>(&mut self, key: &'static str, read: impl FnOnce(&mut TableReader<'_>) -> T) -> T {
        if let Some(mut table) = self.read(key, Field::table) {
            let value = read(&mut table);
            table.finish();
            return value;
        }
        let nothing = DeTable::new();
        read(&mut TableReader::new(self.source, &nothing, self.header.clone()))
    }

    /// Reports a key that has no meaning here, whatever its value, and tells whether it stands here.
    pub(super) fn refuse(&mut self, key: &'static str, why: &str) -> bool {
        self.refused.push(key);
        let field = self.find(key);
        if let Some(field) = field {
            field.report_key(format!("`{key}` is {why}"));
        }
        field.is_some()
    }

    /// Where the table stands.
    pub(super) fn header(&self) -> Range<usize> {
        self.header.clone()
    }

    /// All fields, in the order of the file, where the keys are names that the file chooses.
    pub(super) fn named_fields(&self) -> Vec<Field<'a>> {
        let mut fields: Vec<_> =
            self.entries.iter().map(|(key, value)| Field::named(self.source, key, value)).collect();
        fields.sort_by_key(|field| field.key_span().start);
        fields
    }

    /// Reports something that the table lacks.
    pub(super) fn report_missing(&self, message: String) {
        self.source.report_absence(self.header.clone(), message);
    }

    /// Reports every key that nobody asked for.
    pub(super) fn finish(self) {
        for (key, value) in self.entries {
            let name = key.get_ref().as_ref();
            if self.known.contains(&name) || self.refused.contains(&name) {
                continue;
            }
            let kind = if is_table(value.get_ref()) { "table" } else { "key" };
            let suggestion = suggest(name, &self.known);
            self.source.report(key.span(), format!("unknown {kind} `{}`; {suggestion}", name.escape_debug()));
        }
    }

    fn find(&self, key: &str) -> Option<Field<'a>> {
        self.entries.get_key_value(key).map(|(key, value)| Field::named(self.source, key, value))
    }
}

fn is_table(value: &DeValue<'_>) -> bool {
    match value {
        DeValue::Table(_) => true,
        DeValue::Array(items) => items.first().is_some_and(|item| item.get_ref().is_table()),
        _ => false,
    }
}

/// What may have been meant: the nearest of the known names, or all of them where none is near.
pub(super) fn suggest(name: &str, known: &[&str]) -> String {
    match nearest(name, known) {
        Some(nearest) => format!("did you mean `{nearest}`?"),
        None => format!("known here: {}", list(known, "and")),
    }
}

/// The known name that is most like this one, if any is like it at all.
pub(super) fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    const NEAR: f64 = 0.8;
    let likeness = |candidate: &str| strsim::jaro_winkler(name, candidate);
    let nearest = known.iter().copied().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    nearest.filter(|nearest| likeness(nearest) >= NEAR)
}

/// Names as a sentence lists them: `a`, `b` or `c`.
pub(super) fn list(names: &[&str], conjunction: &str) -> String {
    let quoted: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    match quoted.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} {conjunction} {last}", others.join(", ")),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested() {
        let known = ["listen", "workers", "max_connections", "max_connections_per_ip"];
        assert_eq!(suggest("lissten", &known), "did you mean `listen`?");
        assert_eq!(suggest("max_conections", &known), "did you mean `max_connections`?");
        assert_eq!(suggest("colour", &known[..3]), "known here: `listen`, `workers` and `max_connections`");
    }

    #[test]
    fn names_are_listed_as_a_sentence_does() {
        assert_eq!(list(&["a"], "or"), "`a`");
        assert_eq!(list(&["a", "b"], "or"), "`a` or `b`");
        assert_eq!(list(&["a", "b", "c"], "or"), "`a`, `b` or `c`");
    }
}
