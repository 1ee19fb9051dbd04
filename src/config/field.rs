//! One value of the file, read as what it should be. Every reader reports what is wrong and then gives nothing.

use std::{net::SocketAddr, ops::Range, ops::RangeInclusive, path::PathBuf, time::Duration};

use toml::{
    Spanned,
    de::{DeInteger, DeString, DeValue},
};

use super::{
    environment::expand,
    source::Source,
    table::{TableReader, list, nearest},
    units,
};
use crate::{media::UNBOUNDED, size::Size};

const LONGEST: Duration = Duration::from_secs(366 * 86_400);

/// A value, and the key it stands under; items of an array have none.
#[derive(Clone, Copy)]
pub(super) struct Field<'a> {
    source: &'a Source<'a>,
    key: Option<&'a Spanned<DeString<'a>>>,
    value: &'a Spanned<DeValue<'a>>,
}

impl<'a> Field<'a> {
    /// The value under a key.
    pub(super) fn named(
        source: &'a Source<'a>,
        key: &'a Spanned<DeString<'a>>,
        value: &'a Spanned<DeValue<'a>>,
    ) -> Self {
        Self { source, key: Some(key), value }
    }

    /// The file.
    pub(super) fn source(self) -> &'a Source<'a> {
        self.source
    }

    /// The value as the parser gives it.
    pub(super) fn value(self) -> &'a DeValue<'a> {
        self.value.get_ref()
    }

    /// The key; empty for an item of an array.
    pub(super) fn key(self) -> &'a str {
        self.key.map_or("", |key| key.get_ref())
    }

    /// Where the value stands.
    pub(super) fn span(self) -> Range<usize> {
        self.value.span()
    }

    /// Where the key stands.
    pub(super) fn key_span(self) -> Range<usize> {
        self.key.map_or_else(|| self.value.span(), Spanned::span)
    }

    /// Reports a problem with the value.
    pub(super) fn report(self, message: String) {
        self.source.report(self.span(), message);
    }

    /// Reports that what the value names is not in the file.
    pub(super) fn report_absence(self, message: String) {
        self.source.report_absence(self.span(), message);
    }

    /// Reports a problem with the key.
    pub(super) fn report_key(self, message: String) {
        self.source.report(self.key_span(), message);
    }

    /// A string, its variables replaced.
    pub(super) fn text(self) -> Option<String> {
        let Some(text) = self.value().as_str() else {
            return self.mistyped("a string");
        };
        match expand(text, self.source.environment) {
            Ok(text) => Some(text),
            Err(error) => self.wrong(error.to_string()),
        }
    }

    /// A string that `parse` accepts. It tells what is wrong without repeating the text, which may be a secret.
    pub(super) fn parsed<T, E: std::fmt::Display>(
        self,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Option<T> {
        match parse(&self.text()?) {
            Ok(value) => Some(value),
            Err(error) => self.wrong(error.to_string()),
        }
    }

    /// One of several words, as what it stands for.
    pub(super) fn choice<T: Copy>(self, options: &[(&str, T)]) -> Option<T> {
        let text = self.text()?;
        if let Some((_, value)) = options.iter().find(|(name, _)| *name == text) {
            return Some(*value);
        }
        let names: Vec<_> = options.iter().map(|(name, _)| *name).collect();
        let hint = nearest(&text, &names).map(|name| format!("; did you mean `{name}`?")).unwrap_or_default();
        self.wrong(format!("expected {}{hint}", list(&names, "or")))
    }

    /// `true` or `false`.
    pub(super) fn flag(self) -> Option<bool> {
        let flag = self.value().as_bool();
        if flag.is_none() {
            return self.mistyped("`true` or `false`");
        }
        flag
    }

    /// Whether this is the whole number 0.
    pub(super) fn is_zero(self) -> bool {
        self.value().as_integer().and_then(number) == Some(0)
    }

    /// A whole number within bounds.
    pub(super) fn whole_number<T: TryFrom<u64>>(self, allowed: RangeInclusive<u64>) -> Option<T> {
        let Some(integer) = self.value().as_integer() else {
            return self.mistyped("a whole number");
        };
        let within = number(integer).filter(|number| allowed.contains(number));
        match within.and_then(|number| T::try_from(number).ok()) {
            Some(number) => Some(number),
            None => {
                self.wrong(format!("expected a whole number from {} to {}", allowed.start(), allowed.end()))
            }
        }
    }

    /// A duration from 1 ms to 366 days.
    pub(super) fn duration(self) -> Option<Duration> {
        let duration = self.duration_or_zero()?;
        if duration.is_zero() {
            return self.wrong("expected a duration of at least \"1ms\"".to_owned());
        }
        Some(duration)
    }

    /// A duration up to 366 days.
    pub(super) fn duration_or_zero(self) -> Option<Duration> {
        if let Some(bare) = self.value().as_integer() {
            let shown = number(bare).unwrap_or(30);
            return self.wrong(format!("a duration has a unit; write \"{shown}s\""));
        }
        if !self.value().is_str() {
            return self.mistyped(units::DURATION_FORM);
        }
        match units::duration(&self.text()?) {
            Some(duration) if duration <= LONGEST => Some(duration),
            Some(_) => self.wrong("expected a duration of at most \"366d\"".to_owned()),
            None => self.wrong(format!("expected {}", units::DURATION_FORM)),
        }
    }

    /// A size in bytes within bounds.
    pub(super) fn size<T: TryFrom<u64>>(self, allowed: RangeInclusive<u64>) -> Option<T> {
        let bytes = match self.value() {
            DeValue::Integer(integer) => number(integer),
            DeValue::String(_) => units::size(&self.text()?),
            _ => return self.mistyped(units::SIZE_FORM),
        };
        let Some(bytes) = bytes else {
            return self.wrong(format!("expected {}", units::SIZE_FORM));
        };
        match allowed.contains(&bytes).then(|| T::try_from(bytes).ok()).flatten() {
            Some(bytes) => Some(bytes),
            None => {
                let [least, most] = [*allowed.start(), *allowed.end()].map(Size);
                self.wrong(format!("expected a size from {least} to {most}"))
            }
        }
    }

    /// The most bytes of something; 0 is any number.
    pub(super) fn size_bound(self) -> Option<u64> {
        let most = self.size(0..=u64::MAX)?;
        Some(if most == 0 { UNBOUNDED } else { most })
    }

    /// One address to listen at. Names are not looked up: what they mean differs between machines.
    pub(super) fn address(self) -> Option<SocketAddr> {
        if let Some(port) = self.value().as_integer() {
            return self.wrong(format!("expected an address and a port; write \"[::]:{port}\""));
        }
        let text = self.text()?;
        if let Ok(address) = text.parse() {
            return Some(address);
        }
        let port = text.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        self.wrong(match (text.split(':').next(), port) {
            (Some("localhost"), Some(port)) => {
                format!("names are not looked up; write \"127.0.0.1:{port}\" or \"[::1]:{port}\"")
            }
            (Some("" | "*"), Some(port)) => {
                format!("the address is missing; write \"[::]:{port}\" for every interface")
            }
            _ => "expected an IP address and a port, such as \"0.0.0.0:8443\" or \"[::]:8443\"".to_owned(),
        })
    }

    /// A path, relative to the file's folder.
    pub(super) fn path(self) -> Option<PathBuf> {
        let text = self.text()?;
        if text.is_empty() || text.contains('\0') {
            return self.wrong("expected the path of a file".to_owned());
        }
        Some(self.source.resolve(&text))
    }

    /// The path as the file writes it, for messages: a variable in it may hold what is not for them.
    pub(super) fn shown_path(self) -> PathBuf {
        self.source.resolve(self.value().as_str().unwrap_or_default())
    }

    /// Whether this is an array without items.
    pub(super) fn is_empty_array(self) -> bool {
        self.value().as_array().is_some_and(|items| items.is_empty())
    }

    /// The items of an array.
    pub(super) fn items(self) -> Option<Vec<Self>> {
        let Some(items) = self.value().as_array() else {
            return self.mistyped("an array");
        };
        Some(items.iter().map(|value| Self { source: self.source, key: None, value }).collect())
    }

    /// The items of an array, or the value itself where it is a single one.
    pub(super) fn items_or_one(self) -> Vec<Self> {
        if self.value().is_array() { self.items().unwrap_or_default() } else { vec![self] }
    }

    /// A table.
    pub(super) fn table(self) -> Option<TableReader<'a>> {
        match self.value() {
            DeValue::Table(entries) => Some(TableReader::new(self.source, entries, self.span())),
            DeValue::Array(items) if items.first().is_some_and(|item| item.get_ref().is_table()) => {
                self.wrong("there is only one of this table; write it with single brackets".to_owned())
            }
            _ => self.mistyped("a table"),
        }
    }

    /// An array of tables.
    pub(super) fn tables(self) -> Option<Vec<TableReader<'a>>> {
        if self.value().is_table() {
            let key = self.key();
            return self.wrong(format!(
                "there may be several of these; write the header in double brackets, or `{key} = [{{ … }}]`"
            ));
        }
        Some(self.items()?.into_iter().filter_map(Self::table).collect())
    }

    /// Reports the value and gives nothing, so that a reader can end with it.
    pub(super) fn wrong<T>(self, message: String) -> Option<T> {
        self.report(message);
        None
    }

    fn mistyped<T>(self, expected: &str) -> Option<T> {
        let found = match self.value() {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "a whole number",
            DeValue::Float(_) => "a decimal number",
            DeValue::Boolean(_) => "`true` or `false`",
            DeValue::Datetime(_) => "a date or time",
            DeValue::Array(_) => "an array",
            DeValue::Table(_) => "a table",
        };
        self.wrong(format!("expected {expected}, not {found}"))
    }
}

/// The number, if it is none below zero and fits.
fn number(integer: &DeInteger<'_>) -> Option<u64> {
    u64::from_str_radix(integer.as_str(), integer.radix()).ok()
}
