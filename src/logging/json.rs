//! A log line as one JSON object, written in one pass: `{"timestamp", "level", "fields": {…}, "target"}`.
//!
//! There is a line for every request, so what a line costs is part of what a request costs.

use std::{
    cell::RefCell,
    fmt::{self, Write as _},
};

use jiff::Timestamp;
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    registry::LookupSpan,
};

/// Formats events, without the spans around them: there are none.
#[derive(Clone, Copy, Debug)]
pub(super) struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        LINE.with_borrow_mut(|line| {
            line.clear();
            write!(
                line,
                "{{\"timestamp\":\"{:.6}\",\"level\":\"{}\",\"fields\":{{",
                Timestamp::now(),
                metadata.level()
            )?;
            let mut fields = Fields { line: &mut *line, separator: "" };
            event.record(&mut fields);
            line.push_str("},\"target\":");
            string(line, metadata.target());
            line.push_str("}\n");
            writer.write_str(line)
        })
    }
}

thread_local! {
    static LINE: RefCell<String> = RefCell::new(String::with_capacity(1024));
    /// What values look like that are formatted before they are escaped.
    static VALUE: RefCell<String> = RefCell::default();
}

struct Fields<'a> {
    line: &'a mut String,
    separator: &'static str,
}

impl Fields<'_> {
    fn name(&mut self, field: &Field) {
        self.line.push_str(self.separator);
        self.separator = ",";
        string(self.line, field.name());
        self.line.push(':');
    }
}

impl Visit for Fields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.name(field);
        string(self.line, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field);
        self.line.push_str(itoa::Buffer::new().format(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.name(field);
        self.line.push_str(itoa::Buffer::new().format(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.name(field);
        self.line.push_str(if value { "true" } else { "false" });
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.name(field);
        if value.is_finite() {
            // Writing to a string can't fail.
            let _ = write!(self.line, "{value}");
        } else {
            self.line.push_str("null");
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.name(field);
        VALUE.with_borrow_mut(|text| {
            text.clear();
            let _ = write!(text, "{value:?}");
            string(self.line, text);
        });
    }
}

/// Appends a JSON string (RFC 8259 §7). Control characters are escaped, so that no value can begin a line of its own.
fn string(line: &mut String, text: &str) {
    line.push('"');
    let mut plain = 0;
    for (at, byte) in text.bytes().enumerate() {
        if byte >= b' ' && byte != b'"' && byte != b'\\' && byte != 0x7f {
            continue;
        }
        line.push_str(&text[plain..at]);
        plain = at + 1;
        match byte {
            b'"' => line.push_str("\\\""),
            b'\\' => line.push_str("\\\\"),
            _ => drop(write!(line, "\\u{byte:04x}")),
        }
    }
    line.push_str(&text[plain..]);
    line.push('"');
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use proptest::prelude::*;
    use tracing_subscriber::{fmt::MakeWriter, prelude::*};

    use super::*;

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Lines {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    fn logged(log: impl FnOnce()) -> Vec<serde_json::Value> {
        let lines = Lines::default();
        let layer = tracing_subscriber::fmt::layer().event_format(JsonLines).with_writer(lines.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
        let bytes = lines.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn an_event_is_an_object_and_each_field_has_its_type() {
        let lines = logged(|| {
            tracing::warn!(number = 7_u64, below = -3, share = 0.5, yes = true, none = None::<u64>, some = Some("x"), shown = %"y z", "it is said");
        });
        let [line] = &lines[..] else { panic!("one line: {lines:?}") };
        assert_eq!(line["level"], "WARN");
        assert_eq!(line["target"], module_path!());
        assert!(line["timestamp"].as_str().unwrap().parse::<Timestamp>().is_ok());
        let expected = serde_json::json!({
            "message": "it is said", "number": 7, "below": -3, "share": 0.5, "yes": true, "some": "x", "shown": "y z",
        });
        assert_eq!(line["fields"], expected);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_survives_and_stays_on_its_line(text in any::<String>()) {
            let mut line = String::new();
            string(&mut line, &text);
            prop_assert!(!line.chars().any(|c| c.is_ascii_control()));
            prop_assert_eq!(serde_json::from_str::<String>(&line).unwrap(), text);
        }
    }
}
