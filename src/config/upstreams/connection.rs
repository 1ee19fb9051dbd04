//! How connections to an upstream are made and kept.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use hyper::{Uri, http::uri::Scheme};

use super::proxy::{self, Proxying};
use crate::config::{ClientCertificate, certificates::certificates, field::Field, table::TableReader};

/// What holds for every connection to an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// `http2`: many requests share a connection. Over TLS, where the server chooses it (RFC 7301); else by prior
    /// knowledge (RFC 9113 §3.3). Default false.
    pub http2: bool,
    /// `ca_file`: trust these certificates (PEM) and not the system's.
    pub ca_file: Option<PathBuf>,
    /// `client_certificate` and `client_key`: for servers that ask who speaks to them.
    pub client_certificate: Option<ClientCertificate>,
    /// `server_name`: a DNS name or an IP address to ask for in TLS and to verify, in place of the URL's host.
    pub server_name: Option<String>,
    /// `proxy`.
    pub proxy: Proxying,
    /// `connect_timeout`: until a connection can be used, with all that it takes. Default 5 s.
    pub connect_timeout: Duration,
    /// `max_answer_header_size`: a larger head of an answer is not passed on. Default 64 KiB.
    pub max_answer_header_size: usize,
    /// `tls_timeout`: for the TLS handshake alone. Nothing: what `connect_timeout` leaves.
    pub tls_timeout: Option<Duration>,
    /// `pool_idle_timeout`: how long an unused connection is kept. Default 10 s.
    pub pool_idle_timeout: Duration,
}

impl Default for Connection {
    fn default() -> Self {
        Self {
            http2: false,
            ca_file: None,
            client_certificate: None,
            server_name: None,
            proxy: Proxying::Direct,
            connect_timeout: Duration::from_secs(5),
            max_answer_header_size: 64 << 10,
            tls_timeout: None,
            pool_idle_timeout: Duration::from_secs(10),
        }
    }
}

/// What the table says of connections to these URLs, which are those that could be read.
pub(super) fn connection(table: &mut TableReader<'_>, urls: &[&Uri]) -> Connection {
    const ENCRYPTED: &str = "URLs that begin with https://";
    let encrypted = urls.is_empty() || urls.iter().any(|url| url.scheme() == Some(&Scheme::HTTPS));
    let default = Connection::default();
    let (ca_file, client_certificate) = certificates(table, encrypted, ENCRYPTED);
    let [server_name, tls_timeout] = ["server_name", "tls_timeout"].map(|key| table.field(key));
    if !encrypted {
        for field in [server_name, tls_timeout].into_iter().flatten() {
            field.report_key(format!("`{}` is for {ENCRYPTED}", field.key()));
        }
    }
    let http2 = table.read("http2", Field::flag).unwrap_or(default.http2);
    let proxy = proxy::proxying(table, urls);
    // hyper's parser needs a buffer of 8 KiB.
    let max_answer_header_size = table
        .read("max_answer_header_size", |field| field.size(8 << 10..=1 << 20))
        .unwrap_or(default.max_answer_header_size);
    let mut duration = |key, default| table.read(key, Field::duration).unwrap_or(default);
    let connect_timeout = duration("connect_timeout", default.connect_timeout);
    let pool_idle_timeout = duration("pool_idle_timeout", default.pool_idle_timeout);
    Connection {
        http2,
        ca_file,
        client_certificate,
        server_name: server_name.and_then(|field| field.parsed(self::server_name)),
        proxy,
        connect_timeout,
        max_answer_header_size,
        tls_timeout: tls_timeout.and_then(|field| tls_timeout_within(connect_timeout, field)),
        pool_idle_timeout,
    }
}

/// A part is never longer than the whole.
fn tls_timeout_within(connect_timeout: Duration, field: Field<'_>) -> Option<Duration> {
    let timeout = field.duration()?;
    if timeout > connect_timeout {
        return field.wrong(format!(
            "the TLS handshake is a part of connecting; expected no more than `connect_timeout`, which is {connect_timeout:?}"
        ));
    }
    Some(timeout)
}

/// A name that a certificate can be for (RFC 5890 §2.3.1, and the `_` that some use), or an address without brackets.
fn server_name(text: &str) -> Result<String, &'static str> {
    let label = |label: &str| {
        let plain = label.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_');
        plain && (1..=63).contains(&label.len()) && !label.starts_with('-') && !label.ends_with('-')
    };
    let ends_in_number = text.rsplit('.').next().is_some_and(|last| last.bytes().all(|b| b.is_ascii_digit()));
    let is_name = text.len() <= 253 && text.split('.').all(label) && !ends_in_number;
    if is_name || text.parse::<IpAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    Err("expected a DNS name or an IP address, such as \"api.example.com\": no scheme, no port")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_name_is_one_that_a_certificate_can_be_for() {
        for text in [
            "api.example.com",
            "localhost",
            "a_b.example",
            "192.0.2.1",
            "2001:db8::1",
            "xn--bcher-kva.example",
        ] {
            assert_eq!(server_name(text).as_deref(), Ok(text));
        }
        for text in
            ["", ".", "a..b", "-a", "a-", "a b", "a:443", "https://a", "[::1]", "1.2.3", "*.example.com", "ä"]
        {
            assert!(server_name(text).is_err(), "{text}");
        }
    }
}
