//! Streams of events: where one stands, and what may be said in it between two events. Pure.
//!
//! Server-sent events end with an empty line, and a line ends with LF, CR or CRLF (WHATWG HTML §9.2.6). The objects of
//! NDJSON end with their line. Only between two events can anything be said that its reader understands, and only in
//! the words of its own API: SDKs ignore the errors of others and break on the comments of others.

use bytes::Bytes;
use hyper::{
    HeaderMap,
    header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE},
};

use crate::dialect::{Dialect, ErrorBody};

/// An event stream that may be spoken in, as far as it has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EventStream {
    format: Format,
    begun: bool,
    /// The last bytes. Those before the first are taken for ends of lines.
    tail: [u8; 3],
}

/// Whose events they are, and so what ours look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    /// OpenAI and everything that copies it, chat completions above all.
    Openai,
    /// OpenAI's Responses API, whose events have names.
    Responses,
    Anthropic,
    Gemini,
    /// One JSON object a line.
    Ollama,
}

/// The event that ends a stream which broke off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorEvent {
    /// All lines of the event.
    pub event: Bytes,
    /// The end of a line that makes them one.
    pub end: Bytes,
}

impl EventStream {
    /// The stream that an answer with this head begins. Nothing if it is none, or one that nothing can be put into: it is
    /// compressed, or its length is declared.
    pub fn of_answer(head: &HeaderMap, dialect: Dialect, path: &str) -> Option<Self> {
        let is_closed = head.contains_key(CONTENT_ENCODING) || head.contains_key(CONTENT_LENGTH);
        let media_type = head.get(CONTENT_TYPE).filter(|_| !is_closed)?.as_bytes();
        let is = |name: &str| {
            let (start, rest) = media_type.split_at_checked(name.len()).unwrap_or_default();
            start.eq_ignore_ascii_case(name.as_bytes()) && matches!(rest.first(), None | Some(b';' | b' '))
        };
        let format = if is("text/event-stream") {
            Format::of_events(dialect, path)
        } else if is("application/x-ndjson") && dialect == Dialect::Ollama {
            Format::Ollama
        } else {
            return None;
        };
        Some(Self { format, begun: false, tail: *b"\n\n\n" })
    }

    /// Takes note of bytes that pass.
    pub fn passed(&mut self, bytes: &[u8]) {
        let [_, b, c] = self.tail;
        self.tail = match *bytes {
            [] => return,
            [x] => [b, c, x],
            [x, y] => [c, x, y],
            [.., x, y, z] => [x, y, z],
        };
        self.begun = true;
    }

    /// Whether all that passed are whole events. Between the CR and the LF of an empty line it is not known yet.
    fn is_between_events(&self) -> bool {
        match self.format {
            Format::Ollama => self.tail.ends_with(b"\n"),
            _ => matches!(self.tail, [_, b'\n', b'\n'] | [_, b'\r', b'\r'] | [b'\n' | b'\r', b'\r', b'\n']),
        }
    }

    /// How the stream ends its lines.
    fn line_end(&self) -> &'static str {
        match self.tail {
            [_, b'\r', b'\n'] => "\r\n",
            [.., b'\r'] => "\r",
            _ => "\n",
        }
    }

    /// The error event that its SDKs raise on. Nothing in the middle of an event, and nothing before the first byte: no
    /// word of ours comes before the upstream's first.
    pub fn error_event(&self, error: &ErrorBody<'_>) -> Option<ErrorEvent> {
        if !self.begun || !self.is_between_events() {
            return None;
        }
        let end = self.line_end();
        let event = match self.format {
            Format::Openai => format!("data: {}{end}", Dialect::Openai.error_body(error)),
            Format::Responses => format!("event: error{end}data: {}{end}", error.in_responses()),
            Format::Anthropic => {
                format!("event: error{end}data: {}{end}", Dialect::Anthropic.error_body(error))
            }
            Format::Gemini => format!("data: {}{end}", Dialect::Gemini.error_body(error)),
            Format::Ollama => Dialect::Ollama.error_body(error),
        };
        Some(ErrorEvent { event: event.into(), end: Bytes::from_static(end.as_bytes()) })
    }

    /// What tells its readers that it is alive, and nothing else. Nothing in the middle of an event, or where there are no
    /// words for it.
    pub fn keepalive(&self) -> Option<Bytes> {
        if !self.is_between_events() {
            return None;
        }
        let end = self.line_end();
        let words = match self.format {
            // A comment without an empty line behind it: for some SDKs of OpenAI that line would end an event.
            Format::Openai | Format::Responses => format!(": k{end}"),
            Format::Anthropic => format!("event: ping{end}data: {{\"type\": \"ping\"}}{end}{end}"),
            // Google's SDKs break on comments, and skip empty lines.
            Format::Gemini => format!("{end}{end}"),
            Format::Ollama => return None,
        };
        Some(words.into())
    }
}

impl Format {
    fn of_events(dialect: Dialect, path: &str) -> Self {
        match dialect {
            Dialect::Anthropic => Self::Anthropic,
            Dialect::Gemini => Self::Gemini,
            // Ollama's own API streams NDJSON; its events are a copy of OpenAI's.
            Dialect::Openai | Dialect::Ollama => {
                let is_responses = path.split('/').any(|segment| segment == "responses");
                if is_responses { Self::Responses } else { Self::Openai }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::header::{HeaderName, HeaderValue};

    use super::*;
    use crate::dialect::ErrorKind;

    const PATHS: [(&str, Dialect); 5] = [
        ("/v1/chat/completions", Dialect::Openai),
        ("/v1/responses", Dialect::Openai),
        ("/v1/messages", Dialect::Anthropic),
        ("/v1beta/models/g:streamGenerateContent", Dialect::Gemini),
        ("/v1/chat/completions", Dialect::Ollama),
    ];

    fn head(fields: &[(HeaderName, &'static str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (name.clone(), HeaderValue::from_static(value))).collect()
    }

    fn stream(media_type: &'static str, path: &str, dialect: Dialect) -> EventStream {
        EventStream::of_answer(&head(&[(CONTENT_TYPE, media_type)]), dialect, path).unwrap()
    }

    fn said(stream: &EventStream) -> Option<String> {
        let error =
            ErrorBody { status: 502, kind: ErrorKind::Unavailable, message: "it broke", request_id: "r1" };
        let words = stream.error_event(&error)?;
        Some(String::from_utf8([words.event, words.end].concat()).unwrap())
    }

    /// What a parser has of an event that is not complete, byte by byte as the standard has it: fields that no empty line
    /// has ended, or a line without its end.
    #[derive(Default)]
    struct Parser {
        in_line: bool,
        has_fields: bool,
        after_cr: bool,
    }

    impl Parser {
        fn byte(&mut self, byte: u8) {
            let goes_on = std::mem::replace(&mut self.after_cr, byte == b'\r');
            match byte {
                b'\n' if goes_on => {}
                b'\n' | b'\r' => {
                    self.has_fields &= self.in_line;
                    self.in_line = false;
                }
                _ => (self.in_line, self.has_fields) = (true, true),
            }
        }

        fn is_between_events(&self) -> bool {
            !self.in_line && !self.has_fields
        }
    }

    #[test]
    fn it_is_known_where_a_stream_stands_however_its_bytes_come() {
        for text in [
            "data: one\n\ndata: two\n\n",
            "data: one\r\n\r\nid: 7\r\ndata: two\r\n\r\n",
            "data: one\r\rdata: two\r\r",
            "\u{feff}data: one\n\n",
            "event: x\ndata: {\ndata: }\n\n\n\n\ndata: [DONE]\n\n",
            "data: \u{1f600}\r\n\ndata: two\n\r\ndata: three\r\r\n",
        ] {
            let bytes = text.as_bytes();
            for end in 0..=bytes.len() {
                let mut parser = Parser::default();
                bytes[..end].iter().for_each(|byte| parser.byte(*byte));
                // Until the next byte it may be half of a CRLF.
                let may_go_on = end > 1 && bytes[..end].ends_with(b"\n\r");
                for split in 0..=end {
                    for second in split..=end {
                        let mut stream = stream("text/event-stream", "/", Dialect::Openai);
                        for piece in [&bytes[..split], &bytes[split..second], &bytes[second..end]] {
                            stream.passed(piece);
                        }
                        let expected = parser.is_between_events() && !may_go_on;
                        assert_eq!(stream.is_between_events(), expected, "{:?}", &text.as_bytes()[..end]);
                        assert_eq!(said(&stream).is_some(), expected && end > 0);
                    }
                }
            }
        }
    }

    #[test]
    fn words_have_the_shape_of_the_stream_and_its_ends_of_lines() {
        let shapes = [
            "data: {\"error\":{",
            "event: error\ndata: {",
            "event: error\ndata: {\"error\":{",
            "data: {\"error\":{\"code\":502",
            "data: {\"error\":{",
        ];
        for ((path, dialect), shape) in PATHS.into_iter().zip(shapes) {
            for end in ["\n", "\r\n", "\r"] {
                let mut stream = stream("text/event-stream; charset=utf-8", path, dialect);
                assert_eq!(said(&stream), None, "nothing comes before the first byte");
                stream.passed(format!("data: {{}}{end}{end}").as_bytes());
                let words = said(&stream).unwrap();
                assert!(words.starts_with(&shape.replace('\n', end)), "{words:?}");
                assert!(words.ends_with(&format!("}}{end}{end}")), "{words:?}");
                assert!(words.contains("it broke"));
                let data = words.split(end).find_map(|line| line.strip_prefix("data: ")).unwrap();
                let value: serde_json::Value = serde_json::from_str(data).unwrap();
                assert_eq!(value["error"]["message"], "it broke", "what SDKs raise on");
                stream.passed(b"data: {");
                assert_eq!(said(&stream), None);
            }
        }
    }

    #[test]
    fn a_line_of_its_own_ends_ndjson() {
        let mut stream = stream("application/x-ndjson", "/api/chat", Dialect::Ollama);
        stream.passed(b"{\"done\":false}");
        assert_eq!(said(&stream), None);
        stream.passed(b"\n");
        assert_eq!(said(&stream).unwrap(), "{\"error\":\"it broke\"}\n");
        assert_eq!(stream.keepalive(), None);
    }

    #[test]
    fn a_keepalive_is_one_that_the_sdks_of_its_path_pass_over() {
        let ping = "event: ping\ndata: {\"type\": \"ping\"}\n\n";
        for ((path, dialect), expected) in PATHS.into_iter().zip([": k\n", ": k\n", ping, "\n\n", ": k\n"]) {
            let mut stream = stream("text/event-stream", path, dialect);
            assert_eq!(stream.keepalive().unwrap(), expected, "also before the first byte");
            stream.passed(b"data: one");
            assert_eq!(stream.keepalive(), None);
            stream.passed(b"\n");
            assert_eq!(stream.keepalive(), None);
            stream.passed(b"\n");
            assert_eq!(stream.keepalive().unwrap(), expected);
            stream.passed(b"data: two\r\n\r\n");
            assert_eq!(stream.keepalive().unwrap(), expected.replace('\n', "\r\n"));
        }
    }

    #[test]
    fn what_nothing_can_be_put_into_is_no_event_stream() {
        let begins = |fields: &[(HeaderName, &'static str)], dialect| {
            EventStream::of_answer(&head(fields), dialect, "/v1/x").is_some()
        };
        for media_type in ["text/event-stream", "Text/Event-Stream;charset=utf-8", "text/event-stream ; x"] {
            assert!(begins(&[(CONTENT_TYPE, media_type)], Dialect::Openai), "{media_type}");
        }
        for media_type in ["text/event-streams", "text/event", "application/json", "application/x-ndjson"] {
            assert!(!begins(&[(CONTENT_TYPE, media_type)], Dialect::Openai), "{media_type}");
        }
        for field in [(CONTENT_ENCODING, "gzip"), (CONTENT_LENGTH, "100")] {
            assert!(!begins(&[(CONTENT_TYPE, "text/event-stream"), field], Dialect::Openai));
        }
        assert!(!begins(&[], Dialect::Anthropic));
    }
}
