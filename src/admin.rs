//! The admin listener: `/livez`, `/readyz` and `/metrics`, apart from what clients reach.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response, StatusCode,
    body::Incoming,
    header::{CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
    time::Instant,
};

use crate::{
    limit::{redis::Deployment, replicas::Replicas},
    metrics::Metrics,
    server::Phase,
    upstream::EndpointStates,
};

/// Probes and scrapers at a time.
const MOST_CONNECTIONS: usize = 64;

/// A probe's head is short and comes at once.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// What the admin listener tells of.
#[derive(Clone, Debug)]
pub struct Admin {
    /// For `/metrics`.
    pub metrics: Arc<Metrics>,
    /// How the endpoints of upstreams fare.
    pub endpoints: EndpointStates,
    /// The limiter's store, where it is not this process.
    pub store: Option<Arc<Deployment>>,
    /// How many processes share the limits.
    pub replicas: Replicas,
    /// For `/readyz`.
    pub phase: watch::Receiver<Phase>,
}

impl Admin {
    /// Serves until dropped: also while the process drains, for that is when its probes matter.
    pub async fn serve(self, listener: TcpListener) {
        let room = Arc::new(Semaphore::new(MOST_CONNECTIONS));
        let mut failing = false;
        loop {
            let Ok(permit) = room.clone().acquire_owned().await else { return };
            match listener.accept().await {
                Ok((socket, _)) => {
                    failing = false;
                    let admin = self.clone();
                    tokio::spawn(async move {
                        admin.connection(socket).await;
                        drop(permit);
                    });
                }
                Err(error) => {
                    // Said once: it comes back after every pause until there is room.
                    if !std::mem::replace(&mut failing, true) {
                        tracing::warn!(%error, "accepting on the admin listener failed; trying again");
                    }
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn connection(self, socket: TcpStream) {
        let service = service_fn(|request| std::future::ready(Ok::<_, Infallible>(self.answer(&request))));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
        if let Err(error) = http.serve_connection(TokioIo::new(socket), service).await {
            tracing::debug!(%error, "an admin connection broke");
        }
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        if ![Method::GET, Method::HEAD].contains(request.method()) {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD\n");
        }
        match request.uri().path() {
            "/livez" => text(StatusCode::OK, "alive\n"),
            "/readyz" => match *self.phase.borrow() {
                Phase::Serving => text(StatusCode::OK, "ready\n"),
                Phase::Draining | Phase::Stopping => text(StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
            },
            "/metrics" => self.exposition(),
            _ => text(StatusCode::NOT_FOUND, "there are /livez, /readyz and /metrics\n"),
        }
    }

    fn exposition(&self) -> Response<Full<Bytes>> {
        let store_up = self.store.as_ref().is_none_or(|store| store.is_up());
        self.metrics.store_up.set(store_up.into());
        self.metrics.replicas.set(self.replicas.count().get().into());
        self.metrics.endpoints(self.endpoints.available(Instant::now()));
        let mut response = text(StatusCode::OK, self.metrics.exposition());
        let media_type =
            HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
        response.headers_mut().insert(CONTENT_TYPE, media_type);
        response
    }
}

fn text(status: StatusCode, text: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    response
}
