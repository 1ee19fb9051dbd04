//! The yardstick: what hyper, rustls and tokio cost by themselves. TLS, HTTP/1.1 or HTTP/2, a pooled connection to the
//! upstream, bodies streamed both ways; no key, no limit, no header of its own, no log, no metric.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::Parser;
use hyper::{Request, Response, Uri, Version, body::Incoming, header::HOST, service::service_fn};
use hyper_util::{
    client::legacy::{Client, Error, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long)]
    upstream: SocketAddr,
    #[arg(long)]
    certificate: PathBuf,
    #[arg(long)]
    private_key: PathBuf,
    /// Threads of the work-stealing runtime.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn main() {
    let arguments = Arguments::parse();
    benches::run(arguments.threads, serve(arguments));
}

async fn serve(arguments: Arguments) {
    let acceptor = benches::acceptor(&arguments.certificate, &arguments.private_key);
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    let client = Client::builder(TokioExecutor::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(Duration::from_secs(60))
        .build(connector);
    let listener = TcpListener::bind(arguments.listen).await.expect("the address is free");
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        // The connection goes on without it, if slower.
        let _ = socket.set_nodelay(true);
        tokio::spawn(connection(socket, acceptor.clone(), client.clone(), arguments.upstream));
    }
}

async fn connection(
    socket: tokio::net::TcpStream,
    acceptor: TlsAcceptor,
    client: Client<HttpConnector, Incoming>,
    upstream: SocketAddr,
) {
    let Ok(stream) = acceptor.accept(socket).await else { return };
    let service = service_fn(move |request| pass(client.clone(), upstream, request));
    // A client that breaks off is its own affair.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
}

async fn pass(
    client: Client<HttpConnector, Incoming>,
    upstream: SocketAddr,
    mut request: Request<Incoming>,
) -> Result<Response<Incoming>, Error> {
    let target = request.uri().path_and_query().map_or("/", |target| target.as_str());
    let uri = Uri::builder().scheme("http").authority(upstream.to_string()).path_and_query(target).build();
    *request.uri_mut() = uri.expect("a request's target is one for every host");
    *request.version_mut() = Version::HTTP_11;
    request.headers_mut().remove(HOST);
    client.request(request).await
}
