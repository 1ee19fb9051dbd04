//! Which paths go to an upstream: `paths`.

use crate::config::{source::Unique, table::TableReader};

pub(super) fn paths(table: &mut TableReader<'_>, alone: bool, taken: &mut Unique<String>) -> Vec<String> {
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
}
