//! What an upstream is told of where a request came from, and both sides of what it came through.

use std::net::IpAddr;

use hyper::{
    HeaderMap, Version,
    header::{HeaderName, HeaderValue, VIA},
};

use super::{X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO};

/// How the client reached Tollgate.
#[derive(Clone, Debug)]
pub struct Downstream {
    /// Its address.
    pub client: IpAddr,
    /// The host that it asked for, where it named one.
    pub host: Option<HeaderValue>,
    /// What it spoke.
    pub version: Version,
}

/// Sets the three `X-Forwarded-*` fields. The client's address goes behind those that stand there, so the last one is
/// true whatever a client wrote before it. Nothing is left that an upstream could take for one of them, for a client can
/// write that as it likes.
pub fn set_forwarded(headers: &mut HeaderMap, downstream: &Downstream) {
    let before: Vec<_> = headers.get_all(X_FORWARDED_FOR).iter().map(HeaderValue::as_bytes).collect();
    let client = downstream.client.to_canonical().to_string();
    let chain = [before, vec![client.as_bytes()]].concat().join(&b", "[..]);
    let rivals: Vec<HeaderName> = headers.keys().filter(|name| tells_an_origin(name)).cloned().collect();
    rivals.iter().for_each(|name| drop(headers.remove(name)));
    let chain = HeaderValue::from_bytes(&chain).expect("parts of valid values make a valid value");
    headers.insert(X_FORWARDED_FOR, chain);
    headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("https"));
    if let Some(host) = &downstream.host {
        headers.insert(X_FORWARDED_HOST, host.clone());
    }
}

/// Some servers read `_` and `.` in a name as `-`.
fn tells_an_origin(name: &HeaderName) -> bool {
    let name = name.as_str().replace(['_', '.'], "-");
    name.starts_with("x-forwarded-") || ["forwarded", "x-real-ip"].contains(&&*name)
}

/// Adds Tollgate to what a message came through (RFC 9110 §7.6.3), by a name that tells nothing of its machine. `version`
/// is what it was received in.
pub fn append_via(headers: &mut HeaderMap, version: Version) {
    let via = match version {
        Version::HTTP_10 => "1.0 tollgate",
        Version::HTTP_2 => "2 tollgate",
        _ => "1.1 tollgate",
    };
    headers.append(VIA, HeaderValue::from_static(via));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarded(client: &str, sent: &[(&'static str, &'static str)]) -> Vec<(String, String)> {
        let mut headers = HeaderMap::new();
        for (name, value) in sent {
            headers.append(*name, HeaderValue::from_static(value));
        }
        let host = Some(HeaderValue::from_static("llm.example:8443"));
        set_forwarded(
            &mut headers,
            &Downstream { client: client.parse().unwrap(), host, version: Version::HTTP_2 },
        );
        let text = |value: &HeaderValue| value.to_str().unwrap().to_owned();
        let mut fields: Vec<_> =
            headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
        fields.sort();
        fields
    }

    fn ours(chain: &str) -> Vec<(String, String)> {
        let fields =
            [("for", chain), ("host", "llm.example:8443"), ("proto", "https")].map(|(name, value)| {
                let name = format!("x-forwarded-{name}");
                (name, value.to_owned())
            });
        fields.into()
    }

    #[test]
    fn the_clients_address_is_the_last() {
        assert_eq!(forwarded("192.0.2.1", &[]), ours("192.0.2.1"));
        assert_eq!(forwarded("::ffff:192.0.2.1", &[]), ours("192.0.2.1"));
        let sent = [("x-forwarded-for", "1.1.1.1, 2.2.2.2"), ("x-forwarded-for", "3.3.3.3")];
        assert_eq!(forwarded("2001:db8::1", &sent), ours("1.1.1.1, 2.2.2.2, 3.3.3.3, 2001:db8::1"));
    }

    #[test]
    fn nothing_else_tells_where_a_request_came_from() {
        let sent = [
            ("x-forwarded-host", "evil"),
            ("x-forwarded-proto", "http"),
            ("x-forwarded-prefix", "/evil"),
            ("x_forwarded_for", "6.6.6.6"),
            ("x.real.ip", "6.6.6.6"),
            ("x-real-ip", "6.6.6.6"),
            ("forwarded", "for=6.6.6.6"),
        ];
        assert_eq!(forwarded("192.0.2.1", &sent), ours("192.0.2.1"));
    }

    #[test]
    fn every_proxy_on_the_way_is_kept() {
        let mut headers = HeaderMap::new();
        headers.insert(VIA, HeaderValue::from_static("1.1 front"));
        for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
            append_via(&mut headers, version);
        }
        let all: Vec<_> = headers.get_all(VIA).iter().collect();
        assert_eq!(all, ["1.1 front", "1.0 tollgate", "1.1 tollgate", "2 tollgate"]);
    }
}
