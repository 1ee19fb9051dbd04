//! An LLM server that speaks HTTP/2 in clear text, and answers each request as its test says.

use std::net::SocketAddr;

use bytes::Bytes;
use h2::{
    Reason, RecvStream, SendStream,
    server::{Builder, SendResponse},
};
use hyper::{Request, Response};
use tokio::{
    net::TcpListener,
    sync::{Mutex, mpsc},
};

use super::patiently;

/// The server. It ends with the test's runtime.
#[derive(Debug)]
pub(crate) struct Http2Upstream {
    pub(crate) address: SocketAddr,
    arrivals: Mutex<mpsc::UnboundedReceiver<Arrival>>,
    closed: Mutex<mpsc::UnboundedReceiver<usize>>,
}

/// A request that waits for its answer.
#[derive(Debug)]
pub(crate) struct Arrival {
    /// Its head, and its body where one follows.
    pub(crate) request: Request<RecvStream>,
    /// Which connection it came by, counted from 0.
    pub(crate) connection: usize,
    respond: SendResponse<Bytes>,
}

/// An answer that has begun.
#[derive(Debug)]
pub(crate) struct Answering(SendStream<Bytes>);

impl Http2Upstream {
    pub(crate) async fn start() -> Self {
        Self::with(Builder::new()).await
    }

    /// The same, with these settings.
    pub(crate) async fn with(settings: Builder) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let (gone, closed) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            for connection in 0.. {
                let Ok((socket, _)) = listener.accept().await else { break };
                socket.set_nodelay(true).unwrap();
                let (settings, arrived, gone) = (settings.clone(), arrived.clone(), gone.clone());
                tokio::spawn(async move {
                    if let Ok(mut streams) = settings.handshake(socket).await {
                        while let Some(Ok((request, respond))) = streams.accept().await {
                            let _ = arrived.send(Arrival { request, connection, respond });
                        }
                    }
                    let _ = gone.send(connection);
                });
            }
        });
        Self { address, arrivals: arrivals.into(), closed: closed.into() }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The next request, when its head is there.
    pub(crate) async fn next(&self) -> Arrival {
        let mut arrivals = self.arrivals.lock().await;
        patiently("a request at the upstream", arrivals.recv()).await.unwrap()
    }

    /// The next connection whose end is seen here.
    pub(crate) async fn next_closed(&self) -> usize {
        let mut closed = self.closed.lock().await;
        patiently("the end of a connection at the upstream", closed.recv()).await.unwrap()
    }

    /// Answers every request from now on with a small JSON object.
    pub(crate) async fn answer_all(&self) {
        loop {
            self.next().await.ok();
        }
    }
}

impl Arrival {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.request.headers().get_all(name).iter();
        let value = values.next();
        assert!(values.next().is_none(), "{name} stands once");
        value.map(|value| value.to_str().unwrap())
    }

    /// The whole body.
    pub(crate) async fn body(&mut self) -> Vec<u8> {
        let mut whole = Vec::new();
        let body = self.request.body_mut();
        while let Some(piece) = patiently("a request's body", body.data()).await {
            let piece = piece.unwrap();
            let _ = body.flow_control().release_capacity(piece.len());
            whole.extend_from_slice(&piece);
        }
        whole
    }

    pub(crate) fn ok(mut self) {
        self.head(200).last("{}");
    }

    /// The head of a stream of server-sent events.
    pub(crate) fn head(&mut self, status: u16) -> Answering {
        let head = Response::builder().status(status).header("content-type", "text/event-stream");
        Answering(self.respond.send_response(head.body(()).unwrap(), false).unwrap())
    }

    pub(crate) fn reset(mut self, reason: Reason) {
        self.respond.send_reset(reason);
    }

    /// Why the other side has reset the request, once it has.
    pub(crate) async fn cancelled(&mut self) -> Reason {
        let reset = std::future::poll_fn(|cx| self.respond.poll_reset(cx));
        patiently("the reset of a request", reset).await.unwrap()
    }
}

impl Answering {
    pub(crate) fn event(&mut self, data: &str) {
        self.0.send_data(format!("data: {data}\n\n").into(), false).unwrap();
    }

    pub(crate) fn last(&mut self, bytes: &str) {
        self.0.send_data(Bytes::copy_from_slice(bytes.as_bytes()), true).unwrap();
    }

    pub(crate) fn reset(mut self, reason: Reason) {
        self.0.send_reset(reason);
    }

    /// Waits until so many bytes may be sent.
    pub(crate) async fn room_for(&mut self, bytes: usize) -> bool {
        self.0.reserve_capacity(bytes);
        while self.0.capacity() < bytes {
            if !matches!(std::future::poll_fn(|cx| self.0.poll_capacity(cx)).await, Some(Ok(_))) {
                return false;
            }
        }
        true
    }

    /// Why the other side has reset the answer, once it has.
    pub(crate) async fn cancelled(&mut self) -> Reason {
        let reset = std::future::poll_fn(|cx| self.0.poll_reset(cx));
        patiently("the reset of an answer", reset).await.unwrap()
    }
}
