//! Who ended it: said by whoever ends requests from this side, so that the log does not blame their clients.

use std::sync::{Arc, OnceLock};

/// Why requests are ended from this side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The process ends, by a second signal or because the time to drain ran out.
    Stopping,
    /// The client took nothing of an answer that waited for it.
    Unread,
}

/// What is said of the process holds for its connections, and what is said of a connection for its streams.
#[derive(Clone, Debug, Default)]
pub struct Cut(Arc<Word>);

#[derive(Debug, Default)]
struct Word {
    said: OnceLock<Reason>,
    around: Option<Cut>,
}

impl Cut {
    /// A part, for which holds what is said of the whole.
    #[must_use]
    pub fn part(&self) -> Self {
        Self(Arc::new(Word { said: OnceLock::new(), around: Some(self.clone()) }))
    }

    /// Says why, before anything is ended. What was said first holds.
    pub fn because(&self, reason: Reason) {
        let _ = self.0.said.set(reason);
    }

    /// Why this was ended, if it was ended from this side.
    pub fn reason(&self) -> Option<Reason> {
        self.0.said.get().copied().or_else(|| self.0.around.as_ref()?.reason())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_of_the_whole_holds_for_its_parts() {
        let process = Cut::default();
        let (one, other) = (process.part(), process.part());
        let stream = one.part();
        stream.because(Reason::Unread);
        assert_eq!((one.reason(), other.reason()), (None, None));
        process.because(Reason::Stopping);
        assert_eq!((one.reason(), other.reason()), (Some(Reason::Stopping), Some(Reason::Stopping)));
        assert_eq!(stream.reason(), Some(Reason::Unread), "the first word holds");
    }
}
