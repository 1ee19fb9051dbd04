//! One connection of a client: its handshake, its HTTP, and the tunnel that it may become.

use std::{
    convert::Infallible,
    net::IpAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use hyper::{
    Request,
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
    upgrade::OnUpgrade,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{
    LAST_WORDS, Phase, Server,
    admission::{Refusal, Slot},
    flush::{FlushedBody, Flushes},
    listener,
    pulse::{Expiry, GOODBYE, Protocol, Pulse},
    reading::{ReadBody, Reader, StreamExecutor},
    stream::WatchedStream,
    switch::{Granted, Rest, Switch},
};
use crate::{
    config::Bounds,
    cut::{Cut, Reason},
    metrics::Counted,
    proxy::ConnInfo,
};

/// What hyper turns away it answers without a body, so it takes this much more, and the proxy tells the client.
const MORE_HEAD_BYTES: usize = 32 * 1024;

/// The same for the number of fields.
const MORE_FIELDS: usize = 256;

/// What is noted of a connection as it goes on.
struct Watched {
    pulse: Arc<Pulse>,
    flushes: Arc<Flushes>,
}

/// What a connection is judged by.
struct Watch<'a> {
    client: IpAddr,
    pulse: &'a Pulse,
    cut: &'a Cut,
    switch: &'a Switch,
}

impl Server {
    /// Serves a client until it or its connection ends.
    pub(super) async fn connection(mut self, socket: TcpStream, client: IpAddr, slot: Slot) {
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
                    Watched { pulse: Arc::new(Pulse::new(protocol, bounds)), flushes: Arc::default() };
                self.speak_http(stream, client, watched).await;
            }
            Ok(Err(error)) => {
                self.refused(Refusal::HandshakeFailed);
                tracing::debug!(%client, %error, "the TLS handshake failed");
            }
            Err(_elapsed) => self.refused(Refusal::HandshakeTimeout),
        }
    }

    /// The protocol was settled by ALPN, so nothing is sniffed and no silent client escapes the timers.
    async fn speak_http(self, stream: TlsStream<TcpStream>, client: IpAddr, watched: Watched) {
        let io = TokioIo::new(WatchedStream::new(stream, watched.pulse.clone(), watched.flushes.clone()));
        let pulse = watched.pulse.clone();
        let (proxy, cut) = (self.proxy.clone(), self.cut.part());
        let (of_requests, switch) = (cut.clone(), Switch::default());
        let asked = switch.clone();
        let service = service_fn(move |mut request: Request<Incoming>| {
            let (proxy, begun, cut) = (proxy.clone(), watched.pulse.request_begun(), of_requests.clone());
            let flushes = watched.flushes.clone();
            let upgrade = request.extensions_mut().remove::<OnUpgrade>().map(|upgrade| {
                asked.asked();
                (upgrade, asked.clone())
            });
            async move {
                let reader = Reader::current();
                let cut = reader.as_ref().map_or(cut, |reader| reader.cut().clone());
                let (answer, tunnel) = proxy.serve(ConnInfo { client, cut }, request).await;
                if let Some((upgrade, switch)) = upgrade {
                    switch.answered(upgrade, tunnel.map(|tunnel| Granted { tunnel, begun: begun.clone() }));
                }
                let watched = |body| ReadBody::new(FlushedBody::new(body, flushes), reader);
                Ok::<_, Infallible>(answer.map(|body| begun.until_the_end_of(watched(body))))
            }
        });
        let bounds = &self.proxy.shared.bounds;
        let watch = Watch { client, pulse: &pulse, cut: &cut, switch: &switch };
        match pulse.protocol() {
            Protocol::Http1 => {
                let connection = http1_builder(bounds).serve_connection(io, service).with_upgrades();
                self.supervise(connection, http1::UpgradeableConnection::graceful_shutdown, &watch).await;
                if let Some(rest) = switch.rest().await {
                    self.go_on(rest, &watch).await;
                }
            }
            Protocol::Http2 => {
                let streams = StreamExecutor { patience: bounds.write_timeout, cut: cut.clone() };
                let connection = http2_builder(bounds, streams).serve_connection(io, service);
                self.supervise(connection, http2::Connection::graceful_shutdown, &watch).await;
            }
        }
    }

    /// Drives a connection until it ends, until its pulse says that its client has been given enough time, or until
    /// the process stops. While the process drains, it ends after what it is doing.
    async fn supervise<C>(&self, connection: C, drain: fn(Pin<&mut C>), watch: &Watch<'_>)
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let Watch { client, pulse, cut, switch } = watch;
        let mut connection = pin!(connection);
        let (mut phase, mut stop) = (self.phase.clone(), self.phase.clone());
        let mut draining = false;
        let expiry = loop {
            // hyper would put a `close` into the answer to a handshake, which some clients then take for none.
            let drains = async {
                let _ = phase.wait_for(|phase| *phase != Phase::Serving).await;
                switch.settled().await;
            };
            tokio::select! {
                // What settles the switch happens in the first.
                biased;
                ended = connection.as_mut() => {
                    if let Err(error) = ended {
                        if error.is_parse() {
                            self.proxy.refused_unread(*client, &error);
                        }
                        tracing::debug!(%client, %error, "the connection broke");
                    }
                    return;
                }
                expiry = pulse.expiry() => break Some(expiry),
                _ = stop.wait_for(|phase| *phase == Phase::Stopping) => break None,
                () = drains, if !draining => {
                    draining = true;
                    pulse.drain();
                    drain(connection.as_mut());
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
                drain(connection.as_mut());
                let _ = tokio::time::timeout(GOODBYE, connection).await;
            }
            Expiry::WriteStalled => cut.because(Reason::Unread),
            Expiry::SlowHead | Expiry::Drained => {}
        }
    }

    /// Lets a connection that is done with HTTP be the tunnel that it was granted, or ends it. A tunnel lasts as long as
    /// both sides want, draining or not: the time to drain or the end of the process cuts it.
    async fn go_on(&self, rest: Rest, Watch { client, pulse, cut, .. }: &Watch<'_>) {
        let Rest { mut stream, early, granted } = rest;
        let Some(Granted { tunnel, begun: _begun }) = granted else {
            let _ = stream.shutdown().await;
            return;
        };
        stream.close_one_way();
        let mut tunnel = pin!(tunnel.run(stream, early));
        let mut stop = self.phase.clone();
        tokio::select! {
            () = tunnel.as_mut() => {}
            _ = stop.wait_for(|phase| *phase == Phase::Stopping) => {}
            expiry = pulse.expiry() => {
                self.proxy.shared.metrics.connection_expired(expiry.label());
                tracing::debug!(%client, reason = expiry.label(), "the tunnel ran out of time");
                // Before the tunnel is dropped, which tells its end.
                cut.because(Reason::Unread);
            }
        }
    }
}

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
