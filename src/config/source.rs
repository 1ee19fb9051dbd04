//! The file while it is read: what its readers need at every value, and the problems that they find.

use std::{
    cell::RefCell,
    collections::{HashMap, hash_map::Entry},
    hash::Hash,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{
    environment::Environment,
    field::Field,
    problems::{Position, Problem, Problems},
};

/// One file, shared by all readers of its tables.
pub(super) struct Source<'a> {
    text: &'a str,
    path: &'a Path,
    pub(super) environment: Environment<'a>,
    intact: usize,
    found: RefCell<Vec<Problem>>,
}

impl<'a> Source<'a> {
    /// A file whose syntax has these errors.
    pub(super) fn new(
        text: &'a str,
        path: &'a Path,
        environment: Environment<'a>,
        errors: &[toml::de::Error],
    ) -> Self {
        let mut source = Self { text, path, environment, intact: usize::MAX, found: RefCell::default() };
        for error in errors {
            source.take_syntax_error(error);
        }
        source
    }

    /// Behind a syntax error the parser guesses, so what it made of the rest is not judged. A duplicate does no harm: the
    /// parser keeps the first. Only the message is taken, for the error's `Display` quotes the line.
    fn take_syntax_error(&mut self, error: &toml::de::Error) {
        let offset = error.span().map_or(self.text.len(), |span| span.start);
        let message = if error.message() == "duplicate key" {
            "this name stands twice; a table or key is written once".to_owned()
        } else {
            self.intact = self.intact.min(offset);
            format!("not TOML: {}", error.message())
        };
        self.push(offset, message);
    }

    /// Notes a problem with what stands at `span`.
    pub(super) fn report(&self, span: Range<usize>, message: String) {
        if span.end < self.intact {
            self.push(span.start, message);
        }
    }

    /// Notes that something is nowhere in the file. It is not judged after a syntax error, which may have swallowed it.
    pub(super) fn report_absence(&self, span: Range<usize>, message: String) {
        if self.intact == usize::MAX {
            self.push(span.start, message);
        }
    }

    fn push(&self, offset: usize, message: String) {
        let problem = Problem { at: Some(Position::of(self.text, offset)), message };
        self.found.borrow_mut().push(problem);
    }

    /// A path as the file means it: relative to the file's folder.
    pub(super) fn resolve(&self, path: &str) -> PathBuf {
        self.path.parent().map_or_else(|| PathBuf::from(path), |folder| folder.join(path))
    }

    /// What was read, if nothing is wrong with it.
    pub(super) fn verdict<T>(self, read: T) -> Result<T, Problems> {
        let found = self.found.into_inner();
        if found.is_empty() { Ok(read) } else { Err(Problems::new(self.path, found)) }
    }
}

/// Refuses the second of two equal values.
pub(super) struct Unique<T> {
    what: &'static str,
    remedy: &'static str,
    first: HashMap<T, usize>,
}

impl<T: Eq + Hash> Unique<T> {
    /// `what` the values are and what to do about a second one, both for the message.
    pub(super) fn new(what: &'static str, remedy: &'static str) -> Self {
        Self { what, remedy, first: HashMap::new() }
    }

    /// Takes the value, or reports at the field that it is taken. Tells whether it was free.
    pub(super) fn claim(&mut self, value: T, field: Field<'_>) -> bool {
        match self.first.entry(value) {
            Entry::Vacant(free) => {
                free.insert(field.span().start);
                true
            }
            Entry::Occupied(taken) => {
                let line = Position::of(field.source().text, *taken.get()).line;
                field.report(format!("this {} already stands on line {line}; {}", self.what, self.remedy));
                false
            }
        }
    }
}
