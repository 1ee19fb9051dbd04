//! Making a connection to an upstream: TCP or a tunnel through a proxy, TLS where the URL says so, HTTP.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use hyper::{
    Uri,
    client::conn::http1,
    header::HOST,
    http::{
        Version,
        request::Parts,
        uri::{Authority, Scheme},
    },
};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{
    SendError,
    dial::dial,
    http2,
    pool::{Connection, Sender},
    proxy::{self, ProxyError},
    socket::{Heard, Socket},
    with_causes,
};
use crate::{
    config::{self, Proxy},
    tls::{self, TlsError},
};

/// An answer passes in pieces of at most so much. A client must take each within its `write_timeout`, and the memory of
/// a client who does not is a few pieces.
const MAX_PIECE_BYTES: usize = 64 * 1024;

/// Why there is no connection to an upstream.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Its name is unknown, or nobody answers.
    #[error("{0}")]
    Dial(#[source] io::Error),
    /// The proxy on the way did not let us through.
    #[error("the proxy at {proxy} is in the way: {source}")]
    Proxy {
        /// Where the proxy listens.
        proxy: Authority,
        /// Why.
        source: ProxyError,
    },
    /// It does not prove that it is who it should be.
    #[error(
        "the certificate of {name} is not accepted: {source}; `ca_file` says whom to trust, and `server_name` whom to expect"
    )]
    Certificate {
        /// Whom its certificate should be for.
        name: String,
        /// What is wrong with it.
        source: io::Error,
    },
    /// It speaks no TLS that we speak, or wants a certificate of ours.
    #[error("the TLS handshake with {name} failed: {source}")]
    Tls {
        /// Whom it was spoken to as.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// It was to be spoken to in HTTP/2 and does not know it.
    #[error("it does not speak HTTP/2; leave `http2` out")]
    NotHttp2,
    /// HTTP/1.1 could not begin.
    #[error("{}", with_causes(.0))]
    Http(#[source] hyper::Error),
}

/// Where an upstream listens, and how it is reached.
#[derive(Clone, Debug)]
pub(super) struct Origin {
    scheme: Scheme,
    /// As the URL has it: what requests are addressed to.
    authority: Authority,
    host: String,
    port: u16,
    tls: Option<Tls>,
    proxy: Option<Proxy>,
    /// Whether HTTP/2 is wanted.
    http2: bool,
    /// Whether the latest connection speaks it; before there is one, whether that is wanted.
    shares: Arc<AtomicBool>,
    /// For all that connecting takes.
    pub(super) connect_timeout: Duration,
    /// A larger head of an answer is not read.
    pub(super) max_head: usize,
    /// How long an unused connection is kept.
    pub(super) pool_idle_timeout: Duration,
}

/// How an upstream is spoken to in TLS.
#[derive(Clone, Debug)]
struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    timeout: Option<Duration>,
}

impl Origin {
    /// Reads the certificates that the upstream is judged by.
    pub(super) fn new(url: &Uri, connection: &config::Connection) -> Result<Self, TlsError> {
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let scheme = url.scheme().cloned().unwrap_or(Scheme::HTTP);
        let encrypted = scheme == Scheme::HTTPS;
        let well_known = if encrypted { 443 } else { 80 };
        Ok(Self {
            authority: url.authority().expect("the configuration's URLs have one").clone(),
            host: host.to_owned(),
            port: url.port_u16().unwrap_or(well_known),
            tls: encrypted.then(|| Tls::new(host, connection)).transpose()?,
            proxy: connection.proxy.toward(url).cloned(),
            http2: connection.http2,
            shares: Arc::new(AtomicBool::new(connection.http2)),
            connect_timeout: connection.connect_timeout,
            max_head: connection.max_answer_header_size,
            pool_idle_timeout: connection.pool_idle_timeout,
            scheme,
        })
    }

    /// Whether a connection can be expected to serve many requests at a time.
    pub(super) fn shares(&self) -> bool {
        self.shares.load(Relaxed)
    }

    /// Makes a head one for HTTP/2, where `:scheme` and `:authority` say what `Host` says in HTTP/1.1 (RFC 9113 §8.3.1).
    pub(super) fn address_in_full(&self, head: &mut Parts) {
        let mut target = std::mem::take(&mut head.uri).into_parts();
        (target.scheme, target.authority) = (Some(self.scheme.clone()), Some(self.authority.clone()));
        head.uri = Uri::from_parts(target).expect("scheme, authority and path make a URI");
        head.headers.remove(HOST);
        head.version = Version::HTTP_2;
    }

    /// A connection, however long that takes.
    pub(super) async fn connect(&self) -> Result<Connection, SendError> {
        let socket = self.reach().await?;
        let connection = match &self.tls {
            None if self.http2 => speak_http2(socket, self.max_head).await,
            None => speak_http1(socket, self.max_head).await,
            Some(tls) => {
                let stream = tls.shake_hands(socket).await?;
                // Offered or not, the server chose it.
                if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                    speak_http2(stream, self.max_head).await
                } else {
                    speak_http1(stream, self.max_head).await
                }
            }
        }?;
        self.shares.store(matches!(connection.sender, Sender::Http2(_)), Relaxed);
        Ok(connection)
    }

    /// A connection for a request that may take it away for another protocol, which HTTP/2 does not let it (RFC 9113 §8.6).
    pub(super) async fn connect_alone(&self) -> Result<Connection, SendError> {
        let connecting = async {
            let socket = self.reach().await?;
            match &self.tls {
                None => Ok(speak_http1(socket, self.max_head).await?),
                Some(tls) => {
                    let stream = tls.without_http2().shake_hands(socket).await?;
                    Ok(speak_http1(stream, self.max_head).await?)
                }
            }
        };
        let connected = tokio::time::timeout(self.connect_timeout, Box::pin(connecting)).await;
        connected.unwrap_or(Err(SendError::ConnectTimeout))
    }

    async fn reach(&self) -> Result<TcpStream, ConnectError> {
        let Some(proxy) = &self.proxy else {
            return dial(&self.host, self.port).await.map_err(ConnectError::Dial);
        };
        let host = self.authority.host();
        let destination = format!("{host}:{}", self.port).parse();
        let destination = destination.expect("a host and a port make an authority");
        proxy::tunnel(proxy, &destination)
            .await
            .map_err(|source| ConnectError::Proxy { proxy: proxy.authority.clone(), source })
    }
}

impl Tls {
    fn new(host: &str, connection: &config::Connection) -> Result<Self, TlsError> {
        let name = connection.server_name.as_deref().unwrap_or(host).to_owned();
        Ok(Self {
            name: ServerName::try_from(name.clone()).map_err(|_| TlsError::ServerName { name })?,
            config: tls::upstream_config(connection)?,
            timeout: connection.tls_timeout,
        })
    }

    fn without_http2(&self) -> Self {
        let mut config = (*self.config).clone();
        config.alpn_protocols.retain(|protocol| protocol != b"h2");
        Self { config: Arc::new(config), ..self.clone() }
    }

    async fn shake_hands(&self, socket: TcpStream) -> Result<TlsStream<TcpStream>, SendError> {
        let connecting = TlsConnector::from(self.config.clone()).connect(self.name.clone(), socket);
        let connected = match self.timeout {
            None => connecting.await,
            Some(most) => {
                tokio::time::timeout(most, connecting).await.map_err(|_elapsed| SendError::TlsTimeout)?
            }
        };
        connected.map_err(|error| SendError::Connect(self.failure(error)))
    }

    fn failure(&self, source: io::Error) -> ConnectError {
        let name = self.name.to_str().into_owned();
        let cause = source.get_ref().and_then(|cause| cause.downcast_ref::<rustls::Error>());
        match cause {
            Some(rustls::Error::InvalidCertificate(_)) => ConnectError::Certificate { name, source },
            _ => ConnectError::Tls { name, source },
        }
    }
}

async fn speak_http2<T>(io: T, max_head: usize) -> Result<Connection, ConnectError>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stream = http2::speak(io, max_head).await.ok_or(ConnectError::NotHttp2)?;
    Ok(Connection { heard: stream.connection().heard.clone(), sender: Sender::Http2(stream) })
}

async fn speak_http1<T>(io: T, max_head: usize) -> Result<Connection, ConnectError>
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
    let (sender, driver) = handshake.map_err(ConnectError::Http)?;
    // The driver ends when its connection is dropped or broken; whoever uses the connection sees the error too.
    tokio::spawn(driver.with_upgrades());
    Ok(Connection { sender: Sender::Http1(sender), heard })
}
