//! What can stand before an upstream: TLS, or a proxy that opens tunnels. Behind them bytes pass as they are.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, copy_bidirectional},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        server::WebPkiClientVerifier,
    },
};

use super::{Certificates, Received, upstream::read_head};

/// How one connection introduced itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    /// The protocol that was chosen.
    pub(crate) protocol: Option<String>,
    /// The name that was asked for (SNI).
    pub(crate) server_name: Option<String>,
    pub(crate) showed_certificate: bool,
}

/// TLS before a server that speaks none.
#[derive(Debug)]
pub(crate) struct TlsFront {
    pub(crate) address: SocketAddr,
    greetings: Arc<Mutex<Vec<Greeting>>>,
}

impl TlsFront {
    /// Shows the server's certificate and speaks these protocols. `asks`: whoever shows no certificate is sent away.
    pub(crate) async fn before(
        server: SocketAddr,
        certificates: &Certificates,
        protocols: &[&str],
        asks: bool,
    ) -> Self {
        let chain = |name: &str| {
            CertificateDer::pem_file_iter(certificates.path(name))
                .unwrap()
                .map(Result::unwrap)
                .collect::<Vec<_>>()
        };
        let key = PrivateKeyDer::from_pem_file(certificates.path("server.key")).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(chain("ca.crt"));
        let builder = ServerConfig::builder();
        let builder = if asks {
            builder.with_client_cert_verifier(WebPkiClientVerifier::builder(roots.into()).build().unwrap())
        } else {
            builder.with_no_client_auth()
        };
        let mut config = builder.with_single_cert(chain("server.crt"), key).unwrap();
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let greetings = Arc::new(Mutex::new(Vec::new()));
        let seen = greetings.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let (acceptor, seen) = (acceptor.clone(), seen.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(socket).await else { return };
                    let (_, tls) = stream.get_ref();
                    seen.lock().unwrap().push(Greeting {
                        protocol: tls.alpn_protocol().map(|name| String::from_utf8(name.to_vec()).unwrap()),
                        server_name: tls.server_name().map(str::to_owned),
                        showed_certificate: tls.peer_certificates().is_some(),
                    });
                    join(stream, server).await;
                });
            }
        });
        Self { address, greetings }
    }

    pub(crate) fn greetings(&self) -> Vec<Greeting> {
        self.greetings.lock().unwrap().clone()
    }
}

/// A proxy that leads everybody to one server, whatever the name.
#[derive(Debug)]
pub(crate) struct TunnelProxy {
    pub(crate) address: SocketAddr,
    asked: Arc<Mutex<Vec<Received>>>,
}

impl TunnelProxy {
    /// Answers with this status line, and opens the tunnel if that is a success.
    pub(crate) async fn before(server: SocketAddr, answer: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = asked.clone();
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let log = log.clone();
                tokio::spawn(async move {
                    let mut socket = BufReader::new(socket);
                    let Ok(Some(request)) = read_head(&mut socket).await else { return };
                    log.lock().unwrap().push(request);
                    let head = format!("HTTP/1.1 {answer}\r\n\r\n");
                    socket.write_all(head.as_bytes()).await.unwrap();
                    if answer.starts_with('2') {
                        join(socket, server).await;
                    }
                });
            }
        });
        Self { address, asked }
    }

    /// The requests for tunnels so far.
    pub(crate) fn asked(&self) -> Vec<Received> {
        self.asked.lock().unwrap().clone()
    }
}

/// How either side ends is the test's business, which sees it at the ends.
async fn join(mut stream: impl AsyncRead + AsyncWrite + Unpin, server: SocketAddr) {
    let mut onward = TcpStream::connect(server).await.unwrap();
    onward.set_nodelay(true).unwrap();
    let _ = copy_bidirectional(&mut stream, &mut onward).await;
}
