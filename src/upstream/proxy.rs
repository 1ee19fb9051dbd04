//! A tunnel through an outbound HTTP proxy, by CONNECT (RFC 9110 §9.3.6).

use bytes::Bytes;
use http_body_util::Empty;
use hyper::{
    Method, Request, StatusCode, Uri,
    client::conn::http1,
    header::{HOST, PROXY_AUTHORIZATION},
    http::uri::Authority,
};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::{dial::dial, with_causes};
use crate::config::Proxy;

/// Why there is no tunnel.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    /// The proxy could not be reached.
    #[error("it can't be reached: {0}")]
    Unreachable(#[source] std::io::Error),
    /// It answered, and opened no tunnel.
    #[error("it answered {}", .0.as_u16())]
    Refused(StatusCode),
    /// It did not answer as an HTTP proxy does.
    #[error("it does not answer as a proxy does: {}", with_causes(.0))]
    NoProxy(#[source] hyper::Error),
    /// Something came through the tunnel before anybody was asked anything.
    #[error("it sent more than its answer")]
    Unasked,
}

/// A connection to `destination`, which the proxy looks up. Its port is said, whichever it is.
pub(super) async fn tunnel(proxy: &Proxy, destination: &Authority) -> Result<TcpStream, ProxyError> {
    let host = proxy.authority.host().trim_start_matches('[').trim_end_matches(']');
    let port = proxy.authority.port_u16().unwrap_or(80);
    let socket = dial(host, port).await.map_err(ProxyError::Unreachable)?;
    let (mut sender, driver) = http1::handshake(TokioIo::new(socket)).await.map_err(ProxyError::NoProxy)?;
    // It ends with the tunnel's opening, or with its sender.
    tokio::spawn(driver.with_upgrades());
    let answer = sender.send_request(connect(proxy, destination)).await.map_err(ProxyError::NoProxy)?;
    if !answer.status().is_success() {
        return Err(ProxyError::Refused(answer.status()));
    }
    let opened = hyper::upgrade::on(answer).await.map_err(ProxyError::NoProxy)?;
    let parts = opened.downcast::<TokioIo<TcpStream>>().expect("what was handed in comes back");
    if parts.read_buf.is_empty() { Ok(parts.io.into_inner()) } else { Err(ProxyError::Unasked) }
}

fn connect(proxy: &Proxy, destination: &Authority) -> Request<Empty<Bytes>> {
    let mut request = Request::new(Empty::new());
    *request.method_mut() = Method::CONNECT;
    let host = destination.as_str().parse().expect("an authority is visible ASCII");
    request.headers_mut().insert(HOST, host);
    if let Some(authorization) = &proxy.authorization {
        request.headers_mut().insert(PROXY_AUTHORIZATION, authorization.clone());
    }
    *request.uri_mut() = Uri::from(destination.clone());
    request
}
