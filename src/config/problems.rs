//! What is wrong with a configuration file: everything at once, each with its place.

use std::{
    fmt,
    path::{Path, PathBuf},
};

/// Everything that is wrong with one file. Shown as one line each, in the order of the file, and a line with the count.
#[derive(Debug)]
pub struct Problems {
    file: PathBuf,
    list: Vec<Problem>,
}

/// One thing that is wrong. The message never holds a configured value that may be secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Where; nothing when it concerns the file as a whole.
    pub at: Option<Position>,
    /// What is wrong, and what would be right.
    pub message: String,
}

/// A place in a text, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

impl Position {
    /// The place of a byte of the text.
    pub fn of(text: &str, offset: usize) -> Self {
        let before = &text.as_bytes()[..offset.min(text.len())];
        let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |newline| newline + 1);
        let starts_character = |byte: &&u8| **byte & 0xC0 != 0x80;
        Self {
            line: before.iter().filter(|&&byte| byte == b'\n').count() + 1,
            column: before[line_start..].iter().filter(starts_character).count() + 1,
        }
    }
}

impl Problems {
    pub(super) fn new(file: &Path, mut list: Vec<Problem>) -> Self {
        list.sort_by_key(|problem| problem.at);
        Self { file: file.to_owned(), list }
    }

    /// All of them, in the order of the file.
    pub fn list(&self) -> &[Problem] {
        &self.list
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Problem { at, message } in &self.list {
            write!(f, "{}:", self.file.display())?;
            if let Some(Position { line, column }) = at {
                write!(f, "{line}:{column}:")?;
            }
            writeln!(f, " {message}")?;
        }
        let count = self.list.len();
        write!(f, "{count} {}", if count == 1 { "problem" } else { "problems" })
    }
}

impl std::error::Error for Problems {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_counts_characters() {
        let text = "a = 1\n\nüb = \"é\" x";
        let at = |needle| Position::of(text, text.find(needle).unwrap());
        assert_eq!(at("a"), Position { line: 1, column: 1 });
        assert_eq!(at("ü"), Position { line: 3, column: 1 });
        assert_eq!(at("x"), Position { line: 3, column: 10 });
        assert_eq!(Position::of(text, 1000), Position { line: 3, column: 11 });
        assert_eq!(Position::of("", 0), Position { line: 1, column: 1 });
    }

    #[test]
    fn problems_are_shown_in_the_order_of_the_file() {
        let problem = |line, message: &str| Problem {
            at: Some(Position { line, column: 2 }),
            message: message.to_owned(),
        };
        let two = Problems::new(Path::new("proxy.toml"), vec![problem(9, "late"), problem(3, "early")]);
        assert_eq!(two.to_string(), "proxy.toml:3:2: early\nproxy.toml:9:2: late\n2 problems");
        let whole = Problem { at: None, message: "can't be read".to_owned() };
        let one = Problems::new(Path::new("x"), vec![whole]);
        assert_eq!(one.to_string(), "x: can't be read\n1 problem");
    }
}
