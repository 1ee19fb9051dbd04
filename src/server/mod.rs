//! The edge of one worker: accepts connections, speaks TLS and HTTP on each in a task of its own, and drains.

mod admission;
mod delivery;
mod listener;
mod pulse;
mod reading;
mod stream;

use std::{net::IpAddr, pin::pin, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use hyper::{
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulConnection,
};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::task::TaskTracker;

pub use self::{
    admission::Admission,
    listener::{BindError, Listeners, bind},
};
use self::{
    admission::{Refusal, Slot},
    delivery::{DeliveredBody, Delivery},
    pulse::{Expiry, GOODBYE, Protocol, Pulse},
    reading::{ReadBody, Reader, StreamExecutor},
    stream::WatchedStream,
};
use crate::{
    config::Bounds,
    cut::{Cut, Reason},
    metrics::Counted,
    proxy::{ConnInfo, Proxy},
};

/// After an accept fails for want of resources, the loop pauses instead of spinning.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How long streams that are cut may take to say so.
const LAST_WORDS: Duration = Duration::from_millis(250);

/// What a process is doing. Signals change it, every connection watches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Accepting.
    Serving,
    /// Finishing what has begun.
    Draining,
    /// Ending at once.
    Stopping,
}

/// The labels of all reasons why a connection does not come about.
pub fn refusal_labels() -> Vec<&'static str> {
    Refusal::ALL.map(Refusal::label).into()
}

/// The labels of all reasons why a connection is ended for its client's slowness.
pub fn expiry_labels() -> Vec<&'static str> {
    Expiry::OF_CLIENTS.map(Expiry::label).into()
}

/// One worker's edge.
#[derive(Clone)]
pub struct Server {
    /// Answers the requests.
    pub proxy: Arc<Proxy>,
    /// What new connections speak TLS with.
    pub tls: Arc<ArcSwap<ServerConfig>>,
    /// Who may connect, over all workers.
    pub admission: Arc<Admission>,
    /// Says who ended what was ended before its end.
    pub cut: Cut,
    /// What the process is doing.
    pub phase: watch::Receiver<Phase>,
}

impl Server {
    /// Serves until the process drains and every connection has ended, or until it stops.
    pub async fn run(mut self, listeners: Vec<TcpListener>) {
        let connections = TaskTracker::new();
        for listener in listeners {
            connections.spawn(self.clone().accept(listener, connections.clone()));
        }
        connections.close();
        tokio::select! {
            () = connections.wait() => return,
            _ = self.phase.wait_for(|phase| *phase == Phase::Stopping) => {}
        }
        let _ = tokio::time::timeout(LAST_WORDS, connections.wait()).await;
    }

    /// Survives everything: a connection that fails is its own affair, and a want of file descriptors passes.
    async fn accept(mut self, listener: TcpListener, connections: TaskTracker) {
        let mut failing = false;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = self.phase.wait_for(|phase| *phase != Phase::Serving) => return,
            };
            match accepted {
                Ok((socket, peer)) => {
                    if std::mem::take(&mut failing) {
                        tracing::info!("accepting connections again");
                    }
                    match self.admission.admit(peer.ip()) {
                        Ok(slot) => drop(connections.spawn(self.clone().connection(socket, peer.ip(), slot))),
                        Err(refusal) => self.refused(refusal),
                    }
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    // Said once: it comes back after every pause until there is room.
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "accepting failed; trying again");
                    }
                    self.refused(Refusal::AcceptFailed);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn connection(mut self, socket: TcpStream, client: IpAddr, slot: Slot) {
        let metrics = &self.proxy.shared.metrics;
        let (_slot, _open) = (slot, Counted::new(&metrics.connections));
        let bounds = &self.proxy.shared.bounds;
        if let Err(error) = listener::prepare(&socket, bounds.write_timeout) {
            tracing::debug!(%client, %error, "the connection was gone before it began");
            return;
        }
        let acceptor = TlsAcceptor::from(self.tls.load_full());
        let handshake = tokio::time::timeout(bounds.handshake_timeout, acceptor.accept(socket));
        let handshake = tokio::select! {
            handshake = handshake => handshake,
            // Nothing was asked yet, so nothing is lost.
            _ = self.phase.wait_for(|phase| *phase != Phase::Serving) => return,
        };
        match handshake {
            Ok(Ok(stream)) => {
                let protocol = if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                    Protocol::Http2
                } else {
                    Protocol::Http1
                };
                let watched =
                    Watched { pulse: Arc::new(Pulse::new(protocol, bounds)), delivery: Arc::default() };
                self.speak_http(stream, client, watched).await;
            }
            Ok(Err(error)) => {
                self.refused(Refusal::HandshakeFailed);
                tracing::debug!(%client, %error, "the TLS handshake failed");
            }
            Err(_elapsed) => self.refused(Refusal::HandshakeTimeout),
        }
    }

    fn refused(&self, refusal: Refusal) {
        self.proxy.shared.metrics.connection_refused(refusal.label());
    }

    /// The protocol was settled by ALPN, so nothing is sniffed and no silent client escapes the timers.
    async fn speak_http(self, stream: TlsStream<TcpStream>, client: IpAddr, watched: Watched) {
        let io = TokioIo::new(WatchedStream::new(stream, watched.pulse.clone(), watched.delivery.clone()));
        let pulse = watched.pulse.clone();
        let (proxy, cut) = (self.proxy.clone(), self.cut.part());
        let of_requests = cut.clone();
        let service = service_fn(move |request| {
            let (proxy, begun, cut) = (proxy.clone(), watched.pulse.request_begun(), of_requests.clone());
            let delivery = watched.delivery.clone();
            async move {
                let reader = Reader::current();
                let cut = reader.as_ref().map_or(cut, |reader| reader.cut().clone());
                let answer = proxy.serve(ConnInfo { client, cut }, request).await;
                answer.map(|answer| {
                    let delivered = |body| ReadBody::new(DeliveredBody::new(body, delivery), reader);
                    answer.map(|body| begun.until_the_end_of(delivered(body)))
                })
            }
        });
        let bounds = &self.proxy.shared.bounds;
        let watch = Watch { client, pulse: &pulse, cut: &cut };
        match pulse.protocol() {
            Protocol::Http1 => {
                self.supervise(http1_builder(bounds).serve_connection(io, service), watch).await
            }
            Protocol::Http2 => {
                let streams = StreamExecutor { patience: bounds.write_timeout, cut: cut.clone() };
                self.supervise(http2_builder(bounds, streams).serve_connection(io, service), watch).await
            }
        }
    }

    /// Drives a connection until it ends, until its pulse says that its client has been given enough time, or until
    /// the process stops. While the process drains, it ends after what it is doing.
    async fn supervise<C>(&self, connection: C, Watch { client, pulse, cut }: Watch<'_>)
    where
        C: GracefulConnection<Error = hyper::Error> + Future<Output = hyper::Result<()>>,
    {
        let mut connection = pin!(connection);
        let (mut phase, mut stop) = (self.phase.clone(), self.phase.clone());
        let mut draining = false;
        let expiry = loop {
            tokio::select! {
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        if error.is_parse() {
                            self.proxy.refused_unread(client, &error);
                        }
                        tracing::debug!(%client, %error, "the connection broke");
                    }
                    return;
                }
                expiry = pulse.expiry() => break Some(expiry),
                _ = stop.wait_for(|phase| *phase == Phase::Stopping) => break None,
                _ = phase.wait_for(|phase| *phase != Phase::Serving), if !draining => {
                    draining = true;
                    pulse.drain();
                    connection.as_mut().graceful_shutdown();
                }
            }
        };
        let Some(expiry) = expiry else {
            // hyper asks the answer of an HTTP/1.1 connection once more, which knows by its cut what to say.
            let _ = tokio::time::timeout(LAST_WORDS, connection).await;
            return;
        };
        if expiry == Expiry::Drained {
            return;
        }
        self.proxy.shared.metrics.connection_expired(expiry.label());
        tracing::debug!(%client, reason = expiry.label(), "the connection ran out of time");
        match expiry {
            Expiry::Idle => {
                connection.as_mut().graceful_shutdown();
                let _ = tokio::time::timeout(GOODBYE, connection).await;
            }
            Expiry::WriteStalled => cut.because(Reason::Unread),
            Expiry::SlowHead | Expiry::Drained => {}
        }
    }
}

/// What is noted of a connection as it goes on.
struct Watched {
    pulse: Arc<Pulse>,
    delivery: Arc<Delivery>,
}

/// What a connection is judged by.
struct Watch<'a> {
    client: IpAddr,
    pulse: &'a Pulse,
    cut: &'a Cut,
}

/// Such an error concerns only the connection that was about to be accepted.
fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// What hyper turns away it answers without a body, so it takes this much more, and the proxy tells the client.
const MORE_HEAD_BYTES: usize = 32 * 1024;

/// The same for the number of fields.
const MORE_FIELDS: usize = 256;

fn http1_builder(bounds: &Bounds) -> http1::Builder {
    let mut builder = http1::Builder::new();
    let head = bounds.max_header_size as usize + MORE_HEAD_BYTES;
    // The pulse times heads and idleness; hyper's own timer can't tell the two apart.
    builder
        .header_read_timeout(None)
        .max_headers(bounds.max_headers + MORE_FIELDS)
        .max_header_size(head)
        .max_buf_size(head.max(64 * 1024))
        .pipeline_flush(false);
    builder
}

fn http2_builder(bounds: &Bounds, streams: StreamExecutor) -> http2::Builder<StreamExecutor> {
    let mut builder = http2::Builder::new(streams);
    // RFC 9113 §6.5.2: each field counts for 32 bytes more than it has.
    let fields = bounds.max_headers + MORE_FIELDS;
    let head = bounds.max_header_size as usize + MORE_HEAD_BYTES + 32 * fields;
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(20))
        .max_concurrent_streams(bounds.max_streams)
        .max_header_list_size(u32::try_from(head).unwrap_or(u32::MAX))
        .initial_stream_window_size(256 * 1024)
        .initial_connection_window_size(1024 * 1024)
        .max_send_buf_size(32 * 1024)
        .max_pending_accept_reset_streams(20)
        .max_local_error_reset_streams(100);
    builder
}
