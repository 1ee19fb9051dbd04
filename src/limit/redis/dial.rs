//! Making a connection to one server.
//!
//! The client could dial by itself, but would read the system's certificates anew for every connection, with whichever
//! cryptography the process has as a default. Here both are given.

use std::{sync::Arc, time::Duration};

use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, RedisError, Value,
    aio::{ConnectionLike, MultiplexedConnection},
};
use rustls::{ClientConfig, pki_types::ServerName};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
};
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::{
    errors::of_connecting,
    topology::{Endpoint, Server},
};
use crate::limit::fault::{Fault, FaultKind};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Unacknowledged data ends a connection after this long, where the kernel would try for a quarter of an hour.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(2);

/// Commands that may wait to be written. The library's 50 makes callers queue under load.
const PIPELINE: usize = 1024;

/// Makes connections.
#[derive(Clone)]
pub(super) struct Dialer {
    tls: Option<TlsConnector>,
}

impl std::fmt::Debug for Dialer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dialer").finish_non_exhaustive()
    }
}

/// A connection that many share. It is closed when nobody holds a copy of it any more.
#[derive(Clone)]
pub(super) struct Connection {
    client: MultiplexedConnection,
    endpoint: Endpoint,
    asking: bool,
    _driver: Arc<AbortOnDropHandle<()>>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("endpoint", &self.endpoint)
            .field("asking", &self.asking)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// The server's end of it.
    pub(super) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The same connection for commands about a slot that is moving to its server.
    pub(super) fn asking(mut self) -> Self {
        self.asking = true;
        self
    }

    /// What the server answers. redis-rs hands a server's error out as a value.
    pub(super) async fn send(&mut self, command: &Cmd) -> Result<Value, RedisError> {
        if !self.asking {
            return self.client.send_packed_command(command).await?.extract_error();
        }
        // The permission is for the very next command, so nobody else's may come in between.
        let mut both = Pipeline::with_capacity(2);
        both.cmd("ASKING").add_command(command.clone());
        let mut answers = self.client.req_packed_commands(&both, 1, 1).await?;
        answers.pop().unwrap_or(Value::Nil).extract_error()
    }
}

impl Dialer {
    /// `tls` is for servers that are spoken to in it.
    pub(super) fn new(tls: Option<Arc<ClientConfig>>) -> Self {
        Self { tls: tls.map(TlsConnector::from) }
    }

    /// A connection that is logged in.
    pub(super) async fn dial(&self, server: &Server) -> Result<Connection, Fault> {
        let connected = tokio::time::timeout(CONNECT_TIMEOUT, self.connect(server)).await;
        let error = match connected {
            Ok(Ok(connection)) => return Ok(connection),
            Ok(Err(error)) => of_connecting(error),
            Err(_elapsed) => Fault::from(FaultKind::Timeout),
        };
        Err(error.at(&server.endpoint))
    }

    async fn connect(&self, server: &Server) -> Result<Connection, RedisError> {
        match &server.endpoint {
            Endpoint::Unix(path) => log_in(server, UnixStream::connect(path).await?).await,
            Endpoint::Tcp { host, port, encrypted } => {
                let socket = TcpStream::connect((&**host, *port)).await?;
                set_up(&socket)?;
                if !encrypted {
                    return log_in(server, socket).await;
                }
                let name = ServerName::try_from(&**host).map_err(std::io::Error::other)?.to_owned();
                let tls = self.tls.as_ref().expect("encrypted servers come with a TLS configuration");
                log_in(server, tls.connect(name, socket).await?).await
            }
        }
    }
}

fn set_up(socket: &TcpStream) -> Result<(), RedisError> {
    socket.set_nodelay(true)?;
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(1));
    let socket = SockRef::from(socket);
    socket.set_tcp_keepalive(&keepalive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT))?;
    Ok(())
}

async fn log_in(
    server: &Server,
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<Connection, RedisError> {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_pipeline_buffer_size(PIPELINE);
    let settings = server.login.settings();
    let (client, driver) = MultiplexedConnection::new_with_config(&settings, stream, config).await?;
    let driver = Arc::new(AbortOnDropHandle::new(tokio::spawn(driver)));
    Ok(Connection { client, endpoint: server.endpoint.clone(), asking: false, _driver: driver })
}
