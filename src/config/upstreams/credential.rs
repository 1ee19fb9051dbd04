//! What an upstream knows Tollgate by: `credential`.

use hyper::header::{HeaderName, HeaderValue};

use crate::config::{field::Field, secret::secret_of_file};

/// Headers that a credential can't be: the proxy or the transport sets them.
const RESERVED_HEADERS: [&str; 9] = [
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// `credential = { header, value | value_file, prefix }`. The value is marked sensitive.
#[derive(Clone, Debug, PartialEq)]
pub struct Credential {
    /// `header`, such as `authorization` or `x-api-key`.
    pub header: HeaderName,
    /// The whole value; its `Debug` shows nothing.
    pub value: HeaderValue,
}

pub(super) fn credential(field: Field<'_>) -> Option<Credential> {
    let mut table = field.table()?;
    let header =
        table.require("header", "write `header = \"authorization\"`", |field| field.parsed(header_name));
    let prefix = table.read("prefix", Field::text).unwrap_or_default();
    let value = match (table.field("value"), table.field("value_file")) {
        (Some(value), None) => value.text().and_then(|secret| header_value(value, &prefix, &secret)),
        (None, Some(file)) => secret_of_file(file).and_then(|secret| header_value(file, &prefix, &secret)),
        (Some(_), Some(file)) => file.wrong("expected `value` or `value_file`, not both".to_owned()),
        (None, None) => {
            table.report_missing(
                "the value is missing; write `value = \"${NAME}\"`, or `value_file` for a Docker secret"
                    .to_owned(),
            );
            None
        }
    };
    table.finish();
    Some(Credential { header: header?, value: value? })
}

fn header_name(text: &str) -> Result<HeaderName, &'static str> {
    let name: HeaderName =
        text.parse().map_err(|_| "not the name of a header; expected one such as \"authorization\"")?;
    if RESERVED_HEADERS.contains(&name.as_str()) {
        return Err(
            "the proxy sets this header itself; expected one such as \"authorization\" or \"x-api-key\"",
        );
    }
    Ok(name)
}

/// The value of the header, which no output shows. An empty secret is one that was forgotten: `NAME=` in an `.env` file.
fn header_value(field: Field<'_>, prefix: &str, secret: &str) -> Option<HeaderValue> {
    let whole = format!("{prefix}{secret}");
    if secret.is_empty() || whole.trim() != whole {
        return field
            .wrong("the secret is empty, or has a space or a line break at its start or end".to_owned());
    }
    let carried = whole.chars().all(|c| c.is_ascii() && !c.is_control());
    let Some(mut value) = HeaderValue::from_str(&whole).ok().filter(|_| carried) else {
        return field.wrong(
            "no header carries this value: a character in it is not ASCII, or is a line break".to_owned(),
        );
    };
    value.set_sensitive(true);
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_that_the_transport_owns_is_no_credential() {
        assert_eq!(header_name("Authorization").unwrap(), "authorization");
        for text in ["", "x api key", "Host", "transfer-encoding", "x:y"] {
            assert!(header_name(text).is_err(), "{text}");
        }
    }
}
