//! What stands between Tollgate and an upstream: `proxy`, or what the environment says.

use std::net::IpAddr;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use hyper::{
    Uri,
    header::HeaderValue,
    http::uri::{Authority, Scheme},
};
use hyper_util::client::proxy::matcher::Matcher;
use percent_encoding::percent_decode_str;

use crate::config::table::TableReader;

/// An HTTP proxy that is asked for a tunnel by CONNECT (RFC 9110 §9.3.6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Where it listens, port included.
    pub authority: Authority,
    /// The value of `Proxy-Authorization`, where it wants one; its `Debug` shows nothing.
    pub authorization: Option<HeaderValue>,
}

/// `proxy`: how an upstream's endpoints are reached.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Proxying {
    /// `"none"`: without a proxy, whatever the environment says.
    #[default]
    Direct,
    /// Through this one, wherever an endpoint is.
    Through(Proxy),
    /// Left out: as `HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY` and `NO_PROXY` say.
    Environment(EnvironmentProxies),
}

/// The proxies that the environment names. Lower-case names come first, and a variable that is set and empty means none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentProxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    exceptions: String,
}

impl Proxying {
    /// The proxy on the way to this URL.
    pub fn toward(&self, url: &Uri) -> Option<&Proxy> {
        match self {
            Self::Direct => None,
            Self::Through(proxy) => Some(proxy),
            Self::Environment(proxies) if is_excepted(url, &proxies.exceptions) => None,
            Self::Environment(proxies) if url.scheme() == Some(&Scheme::HTTPS) => proxies.https.as_ref(),
            Self::Environment(proxies) => proxies.http.as_ref(),
        }
    }
}

/// What `proxy` says for these URLs. A variable of the environment that is wrong is reported only where it would be used.
pub(super) fn proxying(table: &mut TableReader<'_>, urls: &[&Uri]) -> Proxying {
    let environment = table.source().environment;
    if let Some(field) = table.field("proxy") {
        return field.parsed(written).unwrap_or_default();
    }
    let first_of =
        |names: [&'static str; 2]| names.into_iter().find_map(|name| Some((name, environment(name)?)));
    let exceptions = first_of(["no_proxy", "NO_PROXY"]).map(|(_, value)| value).unwrap_or_default();
    let named = |scheme: Scheme, names| {
        let (name, value) = first_of(names).or_else(|| first_of(["all_proxy", "ALL_PROXY"]))?;
        let is_used = |url: &&Uri| url.scheme() == Some(&scheme) && !is_excepted(url, &exceptions);
        match proxy(value.trim()) {
            _ if value.trim().is_empty() || !urls.iter().any(is_used) => None,
            Ok(proxy) => Some(proxy),
            Err(wrong) => {
                table.report_missing(format!(
                    "{wrong}, but that is what the environment variable `{name}` holds; write `proxy` here, or `proxy = \
                     \"none\"` to go without"
                ));
                None
            }
        }
    };
    let http = named(Scheme::HTTP, ["http_proxy", "HTTP_PROXY"]);
    let https = named(Scheme::HTTPS, ["https_proxy", "HTTPS_PROXY"]);
    Proxying::Environment(EnvironmentProxies { http, https, exceptions })
}

/// Whether `NO_PROXY` names the URL's host, by the rules of curl. This machine is always meant by it: its loopback
/// addresses are another machine's on the other side of a proxy.
fn is_excepted(url: &Uri, exceptions: &str) -> bool {
    let host = url.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    let is_loopback = match address {
        Ok(address) => address.is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    };
    let matcher = Matcher::builder().all("http://any").no(exceptions).build();
    is_loopback || matcher.intercept(url).is_none()
}

fn written(text: &str) -> Result<Proxying, String> {
    match text {
        "" | "none" => Ok(Proxying::Direct),
        text => proxy(text)
            .map(Proxying::Through)
            .map_err(|wrong| format!("{wrong}; write \"http://proxy.example:3128\", or \"none\" for none")),
    }
}

/// A proxy as everybody writes it. The text may hold a password, so no message repeats it.
fn proxy(text: &str) -> Result<Proxy, &'static str> {
    const FORM: &str =
        "expected the address of an HTTP proxy, its user and password percent-encoded where need be";
    let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
    if !scheme.eq_ignore_ascii_case("http") {
        return Err(
            "the proxy is spoken to in plain HTTP (`http://`), within which TLS stays between the two ends",
        );
    }
    let (login, place) = match rest.trim_end_matches('/').rsplit_once('@') {
        Some((login, place)) => (Some(login), place),
        None => (None, rest.trim_end_matches('/')),
    };
    let authority: Authority = place.parse().map_err(|_| FORM)?;
    if authority.host().is_empty() {
        return Err(FORM);
    }
    let port = authority.as_str().strip_prefix(authority.host()).unwrap_or_default();
    let authority = match authority.port_u16() {
        Some(1..) => authority,
        None if port.is_empty() => format!("{authority}:80").parse().map_err(|_| FORM)?,
        _ => return Err(FORM),
    };
    Ok(Proxy { authority, authorization: login.map(basic).transpose()? })
}

/// The Basic scheme (RFC 7617) of `user:password`.
fn basic(login: &str) -> Result<HeaderValue, &'static str> {
    let (user, password) = login.split_once(':').unwrap_or((login, ""));
    let mut whole = String::new();
    for part in [user, ":", password] {
        let decoded = percent_decode_str(part).decode_utf8();
        let decoded = decoded.map_err(|_| "the proxy's user or password is not UTF-8")?;
        whole.push_str(&decoded);
    }
    let mut value = String::from("Basic ");
    BASE64_STANDARD.encode_string(whole, &mut value);
    let mut value = HeaderValue::try_from(value).expect("base64 is visible ASCII");
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Option<(String, Option<String>)> {
        let proxy = proxy(text).ok()?;
        let authorization = proxy.authorization.map(|value| value.to_str().unwrap().to_owned());
        Some((proxy.authority.to_string(), authorization))
    }

    #[test]
    fn a_proxy_is_written_as_everybody_writes_it() {
        let basic = |login: &str| Some(format!("Basic {}", BASE64_STANDARD.encode(login)));
        for (text, authority, authorization) in [
            ("http://proxy.example:3128", "proxy.example:3128", None),
            ("HTTP://proxy.example:3128/", "proxy.example:3128", None),
            ("proxy.example:3128", "proxy.example:3128", None),
            ("http://proxy.example", "proxy.example:80", None),
            ("http://[::1]:3128", "[::1]:3128", None),
            ("http://ada:pw@10.0.0.1:3128", "10.0.0.1:3128", basic("ada:pw")),
            ("http://ada@10.0.0.1:3128", "10.0.0.1:3128", basic("ada:")),
            ("http://a%40b:p%3Aw%2F%C3%A9@10.0.0.1:1", "10.0.0.1:1", basic("a@b:p:w/é")),
            ("http://ada:p@ss@10.0.0.1:1", "10.0.0.1:1", basic("ada:p@ss")),
        ] {
            assert_eq!(shown(text), Some((authority.to_owned(), authorization)), "{text}");
        }
        for text in [
            "http://",
            "http://:3128",
            "http://h:0",
            "http://h:x",
            "http://h:1/path",
            "https://h:1",
            "socks5://h:1",
            "http://a b:1",
            "http://%ff@h:1",
        ] {
            assert_eq!(shown(text), None, "{text}");
        }
    }

    #[test]
    fn no_output_shows_a_password() {
        let proxy = proxy("http://ada:PLANTED@proxy.example:3128").unwrap();
        let encoded = BASE64_STANDARD.encode("ada:PLANTED");
        let shown = format!("{proxy:?}");
        assert!(!shown.contains("PLANTED") && !shown.contains(&encoded), "{shown}");
    }

    fn environment(exceptions: &str) -> Proxying {
        Proxying::Environment(EnvironmentProxies {
            http: proxy("plain:1").ok(),
            https: proxy("secure:2").ok(),
            exceptions: exceptions.to_owned(),
        })
    }

    fn toward(proxying: &Proxying, url: &str) -> Option<String> {
        proxying.toward(&url.parse().unwrap()).map(|proxy| proxy.authority.to_string())
    }

    #[test]
    fn the_environment_names_a_proxy_for_each_scheme_and_none_for_this_machine() {
        let proxying = environment("");
        assert_eq!(toward(&proxying, "https://api.example/v1").as_deref(), Some("secure:2"));
        assert_eq!(toward(&proxying, "http://api.example:8080").as_deref(), Some("plain:1"));
        for url in ["http://localhost:1", "https://LOCALHOST", "http://127.0.0.7:1", "https://[::1]:1"] {
            assert_eq!(toward(&proxying, url), None, "{url}");
        }
        let asked_for = Proxying::Through(proxy("asked:3").unwrap());
        assert_eq!(toward(&asked_for, "http://localhost:1").as_deref(), Some("asked:3"));
        assert_eq!(toward(&Proxying::Direct, "https://api.example"), None);
    }

    #[test]
    fn exceptions_are_hosts_domains_and_networks() {
        let proxying = environment("example.com, .internal,10.0.0.0/8,[::2],2001:db8::/32");
        for (url, direct) in [
            ("https://example.com", true),
            ("https://api.EXAMPLE.com:444", true),
            ("https://notexample.com", false),
            ("http://vllm.internal", true),
            ("http://10.1.2.3:8000", true),
            ("http://11.1.2.3:8000", false),
            ("http://[2001:db8::5]", true),
        ] {
            assert_eq!(toward(&proxying, url).is_none(), direct, "{url}");
        }
        assert_eq!(toward(&environment("*"), "https://api.example"), None);
    }
}
