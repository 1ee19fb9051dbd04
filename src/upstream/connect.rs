//! Making a connection to an upstream: TCP, TLS where the URL says so, HTTP/1.1.

use std::{io, sync::Arc, time::Duration};

use hyper::{Uri, client::conn::http1};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use super::{
    SendError,
    pool::Connection,
    socket::{Heard, Socket},
};
use crate::config;

/// An answer passes in pieces of at most so much. A client must take each within its `write_timeout`, and the memory of
/// a client who does not is a few pieces.
const MAX_PIECE_BYTES: usize = 64 * 1024;

/// Where an upstream listens, and how it is trusted.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    host: String,
    port: u16,
    trust: Option<Arc<ClientConfig>>,
    connect_timeout: Duration,
    /// A larger head of an answer is not read.
    pub(super) max_head: usize,
    /// How long an unused connection is kept.
    pub(super) pool_idle_timeout: Duration,
}

impl Origin {
    pub(super) fn new(url: &Uri, trust: Option<Arc<ClientConfig>>, connection: &config::Connection) -> Self {
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let well_known = if trust.is_some() { 443 } else { 80 };
        let port = url.port_u16().unwrap_or(well_known);
        let config::Connection { connect_timeout, pool_idle_timeout, max_answer_header_size, .. } =
            *connection;
        let (host, max_head) = (host.to_owned(), max_answer_header_size);
        Self { host, port, trust, connect_timeout, max_head, pool_idle_timeout }
    }

    pub(super) async fn connect(&self) -> Result<Connection, SendError> {
        match tokio::time::timeout(self.connect_timeout, self.open()).await {
            Ok(connected) => connected,
            Err(_elapsed) => Err(SendError::ConnectTimeout),
        }
    }

    async fn open(&self) -> Result<Connection, SendError> {
        let socket = self.dial().await.map_err(SendError::Connect)?;
        match &self.trust {
            None => speak_http(socket, self.max_head).await,
            Some(trust) => {
                let name = ServerName::try_from(self.host.clone()).map_err(|error| {
                    SendError::Connect(io::Error::new(io::ErrorKind::InvalidInput, error))
                })?;
                let connector = TlsConnector::from(trust.clone());
                let socket = connector.connect(name, socket).await.map_err(SendError::Connect)?;
                speak_http(socket, self.max_head).await
            }
        }
    }

    async fn dial(&self) -> io::Result<TcpStream> {
        let socket = TcpStream::connect((&*self.host, self.port)).await?;
        socket.set_nodelay(true)?;
        let keepalive =
            TcpKeepalive::new().with_time(Duration::from_secs(60)).with_interval(Duration::from_secs(15));
        SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
        Ok(socket)
    }
}

async fn speak_http<T>(io: T, max_head: usize) -> Result<Connection, SendError>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let heard = Heard::default();
    let io = TokioIo::new(Socket::new(io, heard.clone()));
    let handshake = http1::Builder::new()
        .max_header_size(max_head)
        .max_buf_size(max_head.max(MAX_PIECE_BYTES))
        .handshake(io)
        .await;
    let (sender, driver) = handshake.map_err(SendError::Exchange)?;
    // The driver ends when its connection is dropped or broken; whoever uses the connection sees the error too.
    tokio::spawn(driver);
    Ok(Connection { sender, heard })
}
