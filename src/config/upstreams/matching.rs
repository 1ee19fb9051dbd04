//! What else than its path brings a request to an upstream: `match`.

use crate::{config::field::Field, pattern::Pattern};

/// `match = { host, model }`, each one pattern or several. Nothing: whatever it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// `host`, in lower case, of which one must fit.
    pub hosts: Vec<Pattern>,
    /// `model`, of which one must fit.
    pub models: Vec<Pattern>,
}

impl Match {
    /// Every host with every model; one of nothing where there are none.
    pub fn each(&self) -> impl Iterator<Item = (Option<&Pattern>, Option<&Pattern>)> {
        each_or_nothing(&self.hosts)
            .flat_map(|host| each_or_nothing(&self.models).map(move |model| (host, model)))
    }
}

fn each_or_nothing(patterns: &[Pattern]) -> impl Iterator<Item = Option<&Pattern>> {
    patterns.iter().map(Some).chain(patterns.is_empty().then_some(None))
}

pub(super) fn matches(field: Field<'_>) -> Option<Match> {
    let mut table = field.table()?;
    let [hosts, models] = ["host", "model"].map(|key| table.field(key));
    table.finish();
    if hosts.is_none() && models.is_none() {
        return field.wrong("it matches everything; write `host` or `model`, or leave it out".to_owned());
    }
    let hosts = patterns(hosts, "\"eu.example.com\"", |field| field.parsed(host));
    let models = patterns(models, "\"claude-*\"", |field| field.parsed(str::parse));
    Some(Match { hosts: hosts?, models: models? })
}

/// All of one key; nothing if one is wrong.
fn patterns(
    field: Option<Field<'_>>,
    example: &str,
    read: impl Fn(Field<'_>) -> Option<Pattern>,
) -> Option<Vec<Pattern>> {
    let Some(field) = field else { return Some(Vec::new()) };
    if field.is_empty_array() {
        return field.wrong(format!("nothing would match; expected at least one, such as {example}"));
    }
    // All of them are read, so that all that is wrong is told.
    let read: Vec<_> = field.items_or_one().into_iter().map(read).collect();
    read.into_iter().collect()
}

fn host(text: &str) -> Result<Pattern, String> {
    let pattern: Pattern =
        text.to_ascii_lowercase().parse().map_err(|wrong: crate::pattern::NotAPattern| wrong.to_string())?;
    let is_address = text.starts_with('[') && text.ends_with(']');
    let has_port = text.contains(':') && !is_address;
    let plain =
        |c: char| c.is_ascii_alphanumeric() || "-._*".contains(c) || (is_address && "[]:".contains(c));
    if has_port || !text.chars().all(plain) || text.ends_with('.') {
        return Err(
            "expected a host without scheme, port or path, such as \"eu.example.com\" or \"*.example.com\""
                .to_owned(),
        );
    }
    Ok(pattern)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_no_port_and_no_capitals() {
        assert!(host("EU.Example.com").unwrap().matches("eu.example.com"));
        assert!(host("*.example.com").unwrap().matches("a.example.com"));
        assert!(host("[::1]").unwrap().matches("[::1]"));
        for text in ["", "a:443", "https://a", "a/b", "a*b*c", "a b", "b\u{fc}cher.example", "a.", "::1"] {
            assert!(host(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_host_goes_with_every_model() {
        let patterns = |words: &[&str]| words.iter().map(|word| word.parse().unwrap()).collect();
        let count = |hosts: &[&str], models: &[&str]| {
            Match { hosts: patterns(hosts), models: patterns(models) }.each().count()
        };
        assert_eq!([count(&[], &[]), count(&["a"], &[]), count(&["a", "b"], &["c", "d", "e"])], [1, 1, 6]);
    }
}
