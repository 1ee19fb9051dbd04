//! Words with a wildcard: what an upstream's `match` compares hosts and models with. Pure.

use std::str::FromStr;

/// A word that is met as it stands, or, with one `*` at its start or end, by everything that ends or begins so.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pattern {
    wildcard: Option<Wildcard>,
    text: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Wildcard {
    AtStart,
    AtEnd,
}

/// The text is no pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAPattern {
    /// There is nothing to compare with.
    #[error("an empty text matches nothing; leave it out, or write \"*\"")]
    Empty,
    /// A `*` is in the middle, or there are two.
    #[error("a `*` stands for anything at the start or at the end, once")]
    Wildcards,
}

impl Pattern {
    /// Whether this word is meant. Capital letters count; hosts are compared in lower case.
    pub fn matches(&self, word: &str) -> bool {
        match self.wildcard {
            None => word == self.text,
            Some(Wildcard::AtStart) => word.ends_with(&self.text),
            Some(Wildcard::AtEnd) => word.starts_with(&self.text),
        }
    }

    /// Greater where it says more: a whole word more than a wildcard, a long one more than a short one.
    pub fn specificity(&self) -> (bool, usize) {
        (self.wildcard.is_none(), self.text.len())
    }
}

impl FromStr for Pattern {
    type Err = NotAPattern;

    fn from_str(text: &str) -> Result<Self, NotAPattern> {
        let (wildcard, rest) = match (text.strip_prefix('*'), text.strip_suffix('*')) {
            (Some(rest), _) => (Some(Wildcard::AtStart), rest),
            (None, Some(rest)) => (Some(Wildcard::AtEnd), rest),
            (None, None) => (None, text),
        };
        if text.is_empty() {
            return Err(NotAPattern::Empty);
        }
        if rest.contains('*') {
            return Err(NotAPattern::Wildcards);
        }
        Ok(Self { wildcard, text: rest.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(text: &str) -> Pattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_star_stands_for_anything_at_one_end() {
        for (text, met, not_met) in [
            ("claude-*", &["claude-", "claude-opus-4"][..], &["claude", "my-claude-x", "Claude-x"][..]),
            ("*.example.com", &["a.example.com", "a.b.example.com"], &["example.com", "example.com.evil"]),
            ("gpt-4o", &["gpt-4o"], &["gpt-4o-mini", "", "gpt-4"]),
            ("*", &["", "x"], &[]),
        ] {
            assert!(met.iter().all(|word| pattern(text).matches(word)), "{text}");
            assert!(!not_met.iter().any(|word| pattern(text).matches(word)), "{text}");
        }
        assert_eq!("".parse::<Pattern>(), Err(NotAPattern::Empty));
        for text in ["**", "a*b", "*a*", "a**"] {
            assert_eq!(text.parse::<Pattern>(), Err(NotAPattern::Wildcards), "{text}");
        }
    }

    #[test]
    fn whole_words_say_more_than_wildcards_and_longer_ones_more_than_shorter() {
        let order = ["x", "claude-opus-*", "claude-*", "*"].map(|text| pattern(text).specificity());
        assert!(order.is_sorted_by(|a, b| a > b), "{order:?}");
    }
}
