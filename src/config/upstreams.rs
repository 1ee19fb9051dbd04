//! Where requests go: `[[upstreams]]`.

use std::{sync::Arc, time::Duration};

use hyper::{
    Uri,
    header::{HeaderName, HeaderValue},
};

use super::{
    Credential, Upstream, callers::check_name, field::Field, secret::secret_of_file, source::Unique,
    table::TableReader,
};
use crate::dialect::Dialect;

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

/// The upstreams, of which there is at least one.
pub(super) fn upstreams(root: &mut TableReader<'_>) -> Vec<Upstream> {
    const NONE: &str = "there is no upstream; write a table [[upstreams]] with `name` and `url = \"https://api.openai.com\"`";
    let Some(field) = root.field("upstreams") else {
        root.report_missing(NONE.to_owned());
        return Vec::new();
    };
    let Some(tables) = field.tables() else { return Vec::new() };
    if field.is_empty_array() {
        field.report(NONE.to_owned());
    }
    let mut seen = Seen {
        names: Unique::new("name", "every upstream has its own"),
        paths: Unique::new("prefix", "a path has one upstream; longer prefixes may branch off"),
    };
    let alone = tables.len() == 1;
    tables.into_iter().filter_map(|table| upstream(table, alone, &mut seen)).collect()
}

struct Seen {
    names: Unique<String>,
    paths: Unique<String>,
}

fn upstream(mut table: TableReader<'_>, alone: bool, seen: &mut Seen) -> Option<Upstream> {
    let name = table.require("name", "write `name = \"openai\"`", |field| name(field, &mut seen.names));
    let url = table.require("url", "write `url = \"https://api.openai.com\"`", |field| field.parsed(url));
    let paths = paths(&mut table, alone, &mut seen.paths);
    let dialect = table.read("dialect", dialect);
    let credential = table.read("credential", credential);
    let ca_file = table.read("ca_file", Field::path);
    let mut duration = |key, default| table.read(key, Field::duration).unwrap_or(default);
    let connect_timeout = duration("connect_timeout", Duration::from_secs(5));
    let first_byte_timeout = duration("first_byte_timeout", Duration::from_secs(600));
    let idle_timeout = duration("idle_timeout", Duration::from_secs(600));
    let pool_idle_timeout = duration("pool_idle_timeout", Duration::from_secs(10));
    table.finish();
    Some(Upstream {
        name: name?,
        url: url?,
        paths,
        dialect,
        credential,
        ca_file,
        connect_timeout,
        first_byte_timeout,
        idle_timeout,
        pool_idle_timeout,
    })
}

fn name(field: Field<'_>, names: &mut Unique<String>) -> Option<Arc<str>> {
    let name = field.text()?;
    check_name(&name, |message| field.report(message));
    names.claim(name.clone(), field);
    Some(name.into())
}

fn dialect(field: Field<'_>) -> Option<Dialect> {
    let options = Dialect::NAMES.map(|name| (name, name));
    field.choice(&options)?.parse().ok()
}

fn url(text: &str) -> Result<Uri, String> {
    check_url(text).map_err(|wrong| {
        format!("{wrong}; expected `http://` or `https://`, a host, and a path if need be, such as \"https://api.openai.com\"")
    })
}

/// A slash at the end is dropped: the path of a request begins with one.
fn check_url(text: &str) -> Result<Uri, &'static str> {
    if text.contains('#') {
        return Err("a fragment (`#…`) is never sent");
    }
    let url: Uri = text.trim_end_matches('/').parse().map_err(|_| "not a URL")?;
    let (Some(scheme), Some(authority)) = (url.scheme_str(), url.authority()) else {
        return Err("the scheme or the host is missing");
    };
    if !matches!(scheme, "http" | "https") {
        return Err("the scheme is unknown");
    }
    if authority.as_str().contains('@') {
        return Err("a user name or password doesn't belong here but into `credential`");
    }
    if url.query().is_some() {
        return Err("a query (`?…`) can't go before the path of a request");
    }
    let port = authority.as_str().strip_prefix(authority.host()).unwrap_or("");
    let good_port = port.is_empty() || url.port_u16().is_some_and(|port| port != 0);
    if authority.host().is_empty() || !good_port {
        return Err("the host or the port is wrong");
    }
    Ok(url)
}

fn paths(table: &mut TableReader<'_>, alone: bool, taken: &mut Unique<String>) -> Vec<String> {
    let Some(field) = table.field("paths") else {
        if !alone {
            table.report_missing(
                "`paths` is missing; with several upstreams each names its own, such as `paths = [\"/v1\"]`"
                    .to_owned(),
            );
        }
        return vec!["/".to_owned()];
    };
    let items = field.items().unwrap_or_default();
    if field.is_empty_array() {
        field.report("no request would come here; expected at least one prefix, such as \"/v1\"".to_owned());
    }
    let mut prefixes = Vec::new();
    for item in items {
        if let Some(prefix) = item.parsed(prefix) {
            taken.claim(prefix.clone(), item);
            prefixes.push(prefix);
        }
    }
    prefixes
}

/// A prefix without the slash at its end. It is compared with the path as it was sent, so what could be written in two
/// ways is refused.
fn prefix(text: &str) -> Result<String, &'static str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._~!$&'()*+,;=:@/".contains(c);
    if !text.starts_with('/') {
        return Err("a prefix begins with `/`, such as \"/v1\"");
    }
    if text.contains('%') {
        return Err("a prefix is compared with the path as it was sent; write it without `%`");
    }
    if !text.chars().all(plain) {
        return Err(
            "a prefix holds letters, digits and `-._~!$&'()*+,;=:@/`: no space, no query, no fragment",
        );
    }
    if text.contains("//") || text.split('/').any(|segment| matches!(segment, "." | "..")) {
        return Err("a prefix has no empty, `.` or `..` segments; write the path that they lead to");
    }
    let trimmed = text.trim_end_matches('/');
    Ok(if trimmed.is_empty() { "/".to_owned() } else { trimmed.to_owned() })
}

fn credential(field: Field<'_>) -> Option<Credential> {
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
    fn a_prefix_has_one_spelling() {
        for (text, expected) in [
            ("/", "/"),
            ("/v1", "/v1"),
            ("/v1/", "/v1"),
            ("/openai/v1/chat", "/openai/v1/chat"),
            ("/v1/models/x:y", "/v1/models/x:y"),
            ("/v1...", "/v1..."),
        ] {
            assert_eq!(prefix(text).as_deref(), Ok(expected), "{text}");
        }
        let wrong = [
            "",
            "v1",
            "http://x/",
            "/a?b",
            "/a#b",
            "/%2e%2e",
            "/a/../b",
            "/..",
            "/./a",
            "//",
            "/a//b",
            "/a//",
            "/a b",
            "/a\n",
            "/ä",
            "/a\\b",
            "/v1/*/{x}",
        ];
        for text in wrong {
            assert!(prefix(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_url_has_a_host_and_no_more_than_a_path() {
        for (text, expected) in [
            ("https://api.openai.com", "https://api.openai.com/"),
            ("https://api.openai.com/", "https://api.openai.com/"),
            ("http://127.0.0.1:11434/base/", "http://127.0.0.1:11434/base"),
            ("http://[::1]:8080", "http://[::1]:8080/"),
            ("HTTPS://example.com", "https://example.com/"),
        ] {
            assert_eq!(url(text).unwrap().to_string(), expected, "{text}");
        }
        let wrong = [
            "",
            "/",
            "/v1",
            "api.openai.com",
            "api.openai.com:443",
            "ftp://example.com",
            "https://",
            "https://:443",
            "https://example.com:0",
            "https://example.com:99999",
            "https://example.com:",
            "https://user:pw@example.com",
            "https://example.com?key=1",
            "https://example.com/#top",
            "https://exa mple.com",
            "https://[::1",
        ];
        for text in wrong {
            assert!(url(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_header_that_the_transport_owns_is_no_credential() {
        assert_eq!(header_name("Authorization").unwrap(), "authorization");
        for text in ["", "x api key", "Host", "transfer-encoding", "x:y"] {
            assert!(header_name(text).is_err(), "{text}");
        }
    }
}
