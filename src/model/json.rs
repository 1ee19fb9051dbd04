//! The member `model` of a JSON object, without reading the object as a whole.
//!
//! Not a validator: text that is no JSON names no model or some, and its reader will say what is wrong with it. Where the
//! member stands twice, the first counts, for what follows may be far away.

use std::ops::ControlFlow;

use super::MAX_NAME_BYTES;

/// The longest way to write a character in a string is `\u006d`.
const LONGEST_ESCAPE: usize = 6;

/// Where it is, and what it has collected there.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    place: Place,
    /// How many brackets are open.
    depth: usize,
    /// The raw text of a string that matters, without its quotes.
    text: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Before the object.
    #[default]
    Start,
    /// In the object, before a key or its end.
    Key,
    /// In a string, behind a backslash or not.
    String { role: Role, escaped: bool },
    /// Behind a key.
    Colon { is_model: bool },
    /// Before the value that is looked for.
    Model,
    /// In any other value.
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Key,
    Model,
    Other,
}

impl Scanner {
    pub(super) fn feed(&mut self, piece: &[u8]) -> ControlFlow<Option<String>> {
        let mut rest = piece;
        while let [byte, behind @ ..] = rest {
            rest = behind;
            if self.place == (Place::String { role: Role::Other, escaped: false })
                && !matches!(byte, b'"' | b'\\')
            {
                // Nearly all of a long body is this.
                let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')).unwrap_or(rest.len());
                rest = &rest[end..];
                continue;
            }
            self.place = self.step(*byte)?;
        }
        ControlFlow::Continue(())
    }

    fn step(&mut self, byte: u8) -> ControlFlow<Option<String>, Place> {
        let is_space = matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        ControlFlow::Continue(match (self.place, byte) {
            (Place::String { role, escaped }, _) => return self.step_in_string(role, escaped, byte),
            (Place::Start | Place::Key | Place::Colon { .. } | Place::Model, _) if is_space => self.place,
            (Place::Start, b'{') => {
                self.depth = 1;
                Place::Key
            }
            (Place::Key, b',') => Place::Key,
            (Place::Key, b'"') => self.string(Role::Key),
            (Place::Colon { is_model: true }, b':') => Place::Model,
            (Place::Colon { is_model: false }, b':') => Place::Value,
            (Place::Model, b'"') => self.string(Role::Model),
            (Place::Value, _) => return self.step_in_value(byte),
            (Place::Start | Place::Key | Place::Colon { .. } | Place::Model, _) => {
                return ControlFlow::Break(None);
            }
        })
    }

    fn string(&mut self, role: Role) -> Place {
        self.text.clear();
        Place::String { role, escaped: false }
    }

    fn step_in_value(&mut self, byte: u8) -> ControlFlow<Option<String>, Place> {
        match byte {
            b'"' => return ControlFlow::Continue(self.string(Role::Other)),
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth -= 1,
            b',' if self.depth == 1 => return ControlFlow::Continue(Place::Key),
            _ => {}
        }
        if self.depth == 0 { ControlFlow::Break(None) } else { ControlFlow::Continue(Place::Value) }
    }

    fn step_in_string(&mut self, role: Role, escaped: bool, byte: u8) -> ControlFlow<Option<String>, Place> {
        if byte == b'"' && !escaped {
            return self.end_of_string(role);
        }
        let most = match role {
            Role::Key => "model".len() * LONGEST_ESCAPE + 1,
            Role::Model => MAX_NAME_BYTES * LONGEST_ESCAPE,
            Role::Other => 0,
        };
        if self.text.len() < most {
            self.text.push(byte);
        } else if role == Role::Model {
            return ControlFlow::Break(None);
        }
        ControlFlow::Continue(Place::String { role, escaped: byte == b'\\' && !escaped })
    }

    fn end_of_string(&self, role: Role) -> ControlFlow<Option<String>, Place> {
        match role {
            Role::Key => ControlFlow::Continue(Place::Colon {
                is_model: decoded(&self.text).as_deref() == Some("model"),
            }),
            Role::Model => {
                let named = |name: &String| (1..=MAX_NAME_BYTES).contains(&name.len());
                ControlFlow::Break(decoded(&self.text).filter(named))
            }
            Role::Other => ControlFlow::Continue(Place::Value),
        }
    }
}

/// What a string means. A key that was cut short decodes to none or to one that is too long to be `model`.
fn decoded(raw: &[u8]) -> Option<String> {
    serde_json::from_slice(&[b"\"", raw, b"\""].concat()).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    /// Nothing: more is wanted.
    fn scan<'p>(pieces: impl IntoIterator<Item = &'p [u8]>) -> Option<Option<String>> {
        let mut scanner = Scanner::default();
        pieces.into_iter().find_map(|piece| match scanner.feed(piece) {
            ControlFlow::Break(found) => Some(found),
            ControlFlow::Continue(()) => None,
        })
    }

    #[test]
    fn the_member_is_found_wherever_it_stands_and_however_it_is_cut() {
        let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
        for (text, expected) in [
            (r#"{"model":"m"}"#, Some(Some("m"))),
            (" {\n\t\"model\" :\r \"m\" , ", Some(Some("m"))),
            (
                r#"{"messages":[{"model":"no","x":"}\"]"}],"n":-1.5e3,"t":true,"u":null,"model":"m""#,
                Some(Some("m")),
            ),
            (r#"{"a":"\\","b":"\\\"model\":\"no\"","model":"m"}"#, Some(Some("m"))),
            (r#"{"m\u006fdel":"\u006d\n\ud83d\ude00\/"}"#, Some(Some("m\n😀/"))),
            (r#"{"model":"first","model":"second"}"#, Some(Some("first"))),
            (
                r#"{"Model":"no","model ":"no","mode":"no","models":"no","":"no","model":"m"}"#,
                Some(Some("m")),
            ),
            (&format!(r#"{{"x":{deep},"model":"m"}}"#), Some(Some("m"))),
            (&format!(r#"{{"{}":1,"model":"m"}}"#, "model".repeat(99)), Some(Some("m"))),
            // None, and nothing that follows can change that.
            (r#"{"x":{"model":"no"}}"#, Some(None)),
            ("{}", Some(None)),
            (r#"{"model":5}"#, Some(None)),
            (r#"{"model":null,"model":"m"}"#, Some(None)),
            (r#"{"model":{"model":"no"}}"#, Some(None)),
            (r#"{"model":""}"#, Some(None)),
            (r#"{"model":"\x"}"#, Some(None)),
            (r#"{"model":"\ud800"}"#, Some(None)),
            ("{\"model\":\"a\nb\"}", Some(None)),
            (r#"[{"model":"no"}]"#, Some(None)),
            (r#""model""#, Some(None)),
            (r#"{model:"no"}"#, Some(None)),
            ("model=no", Some(None)),
            ("\u{feff}{}", Some(None)),
            // More is wanted.
            ("", None),
            (r#"{"model":"m"#, None),
            (r#"{"messages":["#, None),
        ] {
            let expected = expected.map(|model| model.map(str::to_owned));
            assert_eq!(scan([text.as_bytes()]), expected, "{text}");
            assert_eq!(scan(text.as_bytes().chunks(1)), expected, "{text}, byte by byte");
            if text.len() < 200 {
                for cut in 0..text.len() {
                    let (one, other) = text.as_bytes().split_at(cut);
                    assert_eq!(scan([one, other]), expected, "{text}, cut at {cut}");
                }
            }
        }
    }

    #[test]
    fn a_name_has_a_bound_in_whichever_spelling() {
        let name = "x".repeat(MAX_NAME_BYTES);
        let spelled = "\\u0078".repeat(MAX_NAME_BYTES);
        for text in [&name, &spelled] {
            let found = |text: &str| scan([format!(r#"{{"model":"{text}"}}"#).as_bytes()]);
            assert_eq!(found(text), Some(Some(name.clone())));
            assert_eq!(found(&format!("{text}y")), Some(None));
        }
        let endless = format!(r#"{{"model":"{}"#, "x".repeat(MAX_NAME_BYTES * LONGEST_ESCAPE + 1));
        assert_eq!(scan([endless.as_bytes()]), Some(None), "it does not wait for an end that may never come");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            "[\"\\\\{}\\[\\],:a-z\u{e9}\u{1f600}\n]{0,12}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 4, |inner| {
            let key = prop_oneof![Just("model".to_owned()), "[\"\\\\a-z]{0,6}"];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::hash_map(key, inner, 0..4).prop_map(|members| json!(members)),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_agrees_with_a_whole_parser(value in any_json(), pretty: bool, size in 1..40_usize) {
            let text = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) };
            let expected = value.get("model").and_then(Value::as_str).filter(|name| !name.is_empty());
            // A number or a word alone has no end that can be seen, and names nothing from its first byte on.
            prop_assert_eq!(scan(text.unwrap().as_bytes().chunks(size)), Some(expected.map(str::to_owned)));
        }

        #[test]
        fn no_bytes_upset_it(bytes: Vec<u8>, size in 1..9_usize) {
            let _ = scan(bytes.chunks(size));
            let _ = scan([&b"{\"a\":"[..], &bytes]);
        }
    }
}
