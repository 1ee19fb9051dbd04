//! Words with a wildcard, as the configuration names hosts, models, header fields, paths and origins with. Pure.

use std::str::FromStr;

/// A word that is met as it stands, or, with one `*`, by everything that begins and ends alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    /// What stands before the `*`; all of it where there is none.
    before: String,
    /// What stands behind the `*`, where there is one.
    behind: Option<String>,
}

/// The text is no pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAPattern {
    /// There is nothing to compare with.
    #[error("an empty text matches nothing; leave it out, or write \"*\"")]
    Empty,
    /// There are several `*`.
    #[error("a `*` stands for anything, once")]
    Wildcards,
}

impl Pattern {
    /// Whether this word is meant. Capital letters count; hosts and names of fields are compared in lower case.
    pub fn matches(&self, word: &str) -> bool {
        self.star(word).is_some()
    }

    /// What the `*` stands for in a word that is meant: nothing at all where the pattern has none.
    pub fn star<'w>(&self, word: &'w str) -> Option<&'w str> {
        match &self.behind {
            None => (word == self.before).then_some(""),
            Some(behind) => word.strip_prefix(&*self.before)?.strip_suffix(&**behind),
        }
    }

    /// The one word that is meant, where there is no `*`.
    pub fn word(&self) -> Option<&str> {
        self.behind.is_none().then_some(&*self.before)
    }

    /// What stands behind the `*`, where there is one.
    pub fn behind(&self) -> Option<&str> {
        self.behind.as_deref()
    }

    /// Greater where it says more: a whole word more than a wildcard, a long one more than a short one.
    pub fn specificity(&self) -> (bool, usize) {
        (self.behind.is_none(), self.before.len() + self.behind.as_ref().map_or(0, String::len))
    }
}

impl FromStr for Pattern {
    type Err = NotAPattern;

    fn from_str(text: &str) -> Result<Self, NotAPattern> {
        if text.is_empty() {
            return Err(NotAPattern::Empty);
        }
        let (before, behind) = match text.split_once('*') {
            Some((before, behind)) => (before, Some(behind.to_owned())),
            None => (text, None),
        };
        if behind.as_deref().is_some_and(|behind| behind.contains('*')) {
            return Err(NotAPattern::Wildcards);
        }
        Ok(Self { before: before.to_owned(), behind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_star_stands_for_anything_once() {
        for (text, met, not_met) in [
            ("claude-*", &["claude-", "claude-opus-4"][..], &["claude", "my-claude-x", "Claude-x"][..]),
            ("*.example.com", &["a.example.com", "a.b.example.com"], &["example.com", "example.com.evil"]),
            ("gpt-*-mini", &["gpt-4o-mini", "gpt--mini"], &["gpt-mini", "gpt-4o", "my-gpt-4o-mini"]),
            ("gpt-4o", &["gpt-4o"], &["gpt-4o-mini", "", "gpt-4"]),
            ("*", &["", "x"], &[]),
        ] {
            assert!(met.iter().all(|word| pattern(text).matches(word)), "{text}");
            assert!(!not_met.iter().any(|word| pattern(text).matches(word)), "{text}");
        }
        assert_eq!(pattern("gpt-*-mini").star("gpt-4o-mini"), Some("4o"));
        assert_eq!((pattern("x").star("x"), pattern("x").star("y")), (Some(""), None));
        assert_eq!("".parse::<Pattern>(), Err(NotAPattern::Empty));
        for text in ["**", "*a*", "a**", "a*b*c"] {
            assert_eq!(text.parse::<Pattern>(), Err(NotAPattern::Wildcards), "{text}");
        }
    }

    #[test]
    fn whole_words_say_more_than_wildcards_and_longer_ones_more_than_shorter() {
        let order =
            ["x", "claude-opus-*", "claude-*x", "claude-*", "*"].map(|text| pattern(text).specificity());
        assert!(order.is_sorted_by(|a, b| a > b), "{order:?}");
    }
}
