//! The field `model` of `multipart/form-data` (RFC 7578), without reading the form as a whole.

use std::ops::ControlFlow;

use super::MAX_NAME_BYTES;

/// The headers of a part are a few lines. A form with longer ones is not looked into.
const MAX_HEADER_BYTES: usize = 8 * 1024;

/// Where it is, and the bytes that it has not understood yet.
#[derive(Debug)]
pub(super) struct Scanner {
    /// CRLF, two dashes and the boundary.
    delimiter: Vec<u8>,
    place: Place,
    pending: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In what does not matter, up to the next delimiter.
    Skipped,
    /// Behind a delimiter: the headers of a part, or the end.
    Headers,
    /// In the value that is looked for.
    Model,
}

impl Scanner {
    pub(super) fn new(boundary: &str) -> Self {
        let delimiter = format!("\r\n--{boundary}").into_bytes();
        // The first delimiter has no line before it.
        Self { delimiter, place: Place::Skipped, pending: b"\r\n".to_vec() }
    }

    pub(super) fn feed(&mut self, piece: &[u8]) -> ControlFlow<Option<String>> {
        self.pending.extend_from_slice(piece);
        while self.advance()? {}
        ControlFlow::Continue(())
    }

    /// Whether a step was taken. Without one more bytes are wanted.
    fn advance(&mut self) -> ControlFlow<Option<String>, bool> {
        let taken = match self.place {
            Place::Skipped => self.skip(),
            Place::Headers => self.headers()?,
            Place::Model => self.model()?,
        };
        ControlFlow::Continue(taken)
    }

    fn skip(&mut self) -> bool {
        let found = find(&self.pending, &self.delimiter);
        let end = match found {
            Some(at) => at + self.delimiter.len(),
            // A delimiter may have begun in the last bytes.
            None => self.pending.len().saturating_sub(self.delimiter.len() - 1),
        };
        self.pending.drain(..end);
        if found.is_some() {
            self.place = Place::Headers;
        }
        found.is_some()
    }

    fn headers(&mut self) -> ControlFlow<Option<String>, bool> {
        if self.pending.starts_with(b"--") {
            return ControlFlow::Break(None);
        }
        let Some(end) = find(&self.pending, b"\r\n\r\n") else {
            return if self.pending.len() > MAX_HEADER_BYTES {
                ControlFlow::Break(None)
            } else {
                ControlFlow::Continue(false)
            };
        };
        self.place = if is_model(&self.pending[..end]) { Place::Model } else { Place::Skipped };
        // The line break before an empty part's delimiter is the one behind its headers.
        self.pending.drain(..end + if self.place == Place::Model { 4 } else { 2 });
        ControlFlow::Continue(true)
    }

    fn model(&self) -> ControlFlow<Option<String>, bool> {
        let Some(end) = find(&self.pending, &self.delimiter) else {
            return if self.pending.len() > MAX_NAME_BYTES + self.delimiter.len() {
                ControlFlow::Break(None)
            } else {
                ControlFlow::Continue(false)
            };
        };
        let name = str::from_utf8(&self.pending[..end]).ok();
        let name = name.filter(|name| (1..=MAX_NAME_BYTES).contains(&name.len()));
        ControlFlow::Break(name.map(str::to_owned))
    }
}

/// Whether these are the headers of a field that is called so, and of no file.
fn is_model(headers: &[u8]) -> bool {
    let Ok(headers) = str::from_utf8(headers) else { return false };
    let disposition = headers.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    });
    let mut parameters = disposition.unwrap_or_default().split(';').map(str::trim);
    parameters.any(|parameter| matches!(parameter, "name=\"model\"" | "name=model"))
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing: more is wanted.
    fn scan<'p>(pieces: impl IntoIterator<Item = &'p [u8]>) -> Option<Option<String>> {
        let mut scanner = Scanner::new("xyz");
        pieces.into_iter().find_map(|piece| match scanner.feed(piece) {
            ControlFlow::Break(found) => Some(found),
            ControlFlow::Continue(()) => None,
        })
    }

    fn part(disposition: &str, value: &str) -> String {
        format!("--xyz\r\nContent-Disposition: form-data; {disposition}\r\nX-More: 1\r\n\r\n{value}\r\n")
    }

    #[test]
    fn the_field_is_found_wherever_it_stands_and_however_it_is_cut() {
        let file = part("name=\"file\"; filename=\"model\"", "\0--xyz\r\n\r\n--xy name=\"model\"\r\n\r\nno");
        let (model, empty) = (part("name=\"model\"", "whisper-1"), part("name=\"empty\"", ""));
        let end = "--xyz--\r\n";
        for (text, expected) in [
            (format!("{model}{file}{end}"), Some(Some("whisper-1"))),
            (format!("{file}{empty}{model}{end}"), Some(Some("whisper-1"))),
            (format!("preamble\r\n{empty}{empty}{model}{end}"), Some(Some("whisper-1"))),
            (part("name=model", "m").replace("Content-D", "content-d") + end, Some(Some("m"))),
            (format!("{file}{empty}{end}{model}"), Some(None)),
            (part("name=\"models\"", "no") + end, Some(None)),
            (part("name=\"model\"", "") + end, Some(None)),
            (part("name=\"model\"", &"x".repeat(MAX_NAME_BYTES + 1)) + end, Some(None)),
            (format!("--xyz\r\n{}", "x".repeat(MAX_HEADER_BYTES + 1)), Some(None)),
            (file, None),
            ("no form at all".to_owned(), None),
            (String::new(), None),
        ] {
            let expected = expected.map(|model| model.map(str::to_owned));
            assert_eq!(scan([text.as_bytes()]), expected, "{text}");
            assert_eq!(scan(text.as_bytes().chunks(1)), expected, "{text}, byte by byte");
            for cut in 0..text.len().min(400) {
                let (one, other) = text.as_bytes().split_at(cut);
                assert_eq!(scan([one, other]), expected, "{text}, cut at {cut}");
            }
        }
    }

    #[test]
    fn what_is_skipped_is_not_kept() {
        let mut scanner = Scanner::new("xyz");
        assert!(scanner.feed(part("name=\"file\"", "").as_bytes()).is_continue());
        for _ in 0..100 {
            assert!(scanner.feed(&[0; 10_000]).is_continue());
            assert!(scanner.pending.len() < 10, "{}", scanner.pending.len());
        }
    }
}
