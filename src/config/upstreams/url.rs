//! Where an endpoint listens: `url`.

use hyper::Uri;

pub(in crate::config) fn url(text: &str) -> Result<Uri, String> {
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
