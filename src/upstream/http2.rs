//! HTTP/2 to upstreams: a connection that many requests share, each as a stream of its own.
//!
//! What one client does must not be felt by another. A client that does not read leaves frames unread on the shared
//! connection, so the windows are such that all streams of a connection can be full at once and the connection goes on.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use hyper::{Request, Response, body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::Instant,
};

use super::socket::{Heard, Socket};
use crate::upload::UploadBody;

/// No connection carries more streams at a time, however many its server would take.
const MOST_STREAMS: usize = 100;

/// So much of an answer waits for a client that does not read, and then its upstream waits, too.
const STREAM_WINDOW: u32 = 64 * 1024;

/// Far more than all streams together can fill. It is not what bounds them: h2 ends a connection on which small unread
/// frames, each counted as what it lacks to 256 bytes, add up to half of this. A hundred full windows of frames of 12
/// bytes, the smallest events that make sense, stay below.
const CONNECTION_WINDOW: u32 = 256 * 1024 * 1024;

/// A stream keeps so much of an upload that the connection has not taken yet.
const MOST_UNSENT_BYTES: usize = 64 * 1024;

/// While streams are open and nothing comes, the server is asked whether it is still there.
const PING_INTERVAL: Duration = Duration::from_secs(10);

/// It is not, if it does not answer for so long.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Streams that were cancelled are remembered so long, for the server may not know yet and send on.
const CANCELLED_REMEMBERED: (usize, Duration) = (1000, Duration::from_secs(30));

/// A connection that many requests share. It is closed when nobody holds a copy of it any more.
#[derive(Clone, Debug)]
pub(super) struct Shared {
    sender: http2::SendRequest<UploadBody>,
    pub(super) heard: Heard,
    load: Arc<Mutex<Load>>,
}

/// How many streams a connection carries.
#[derive(Debug)]
struct Load {
    open: usize,
    most: usize,
    /// It takes no more. Those that it carries come to their end.
    retired: bool,
    last_end: Instant,
}

/// The right to one stream of a connection.
#[derive(Debug)]
pub(super) struct Stream {
    connection: Shared,
}

impl Shared {
    /// The right to one more stream, if there may be one.
    pub(super) fn open(&self) -> Option<Stream> {
        let mut load = lock(&self.load);
        if load.retired || load.open >= load.most || self.sender.is_closed() {
            return None;
        }
        load.open += 1;
        Some(Stream { connection: self.clone() })
    }

    /// Whether it is in use, or was until a moment ago and can be used again.
    pub(super) fn is_alive(&self, most_idle: Duration, now: Instant) -> bool {
        let load = lock(&self.load);
        let in_use = load.open > 0 || now < load.last_end + most_idle;
        in_use && !load.retired && !self.sender.is_closed()
    }
}

impl Stream {
    /// The connection that it is one of.
    pub(super) fn connection(&self) -> &Shared {
        &self.connection
    }

    /// Sends a request and waits for the head of its answer. Dropped before, it resets the stream (CANCEL).
    pub(super) async fn send(&mut self, request: Request<UploadBody>) -> hyper::Result<Response<Incoming>> {
        let answer = self.connection.sender.send_request(request).await;
        if answer.as_ref().is_err_and(was_not_processed) {
            lock(&self.connection.load).retired = true;
        }
        answer
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let mut load = lock(&self.connection.load);
        load.open -= 1;
        load.last_end = Instant::now();
    }
}

/// Says hello, and waits until the server did, for only then is known how many streams it takes. The first of them; or
/// nothing, if the server speaks no HTTP/2.
pub(super) async fn speak<T>(io: T, max_head: usize) -> Option<Stream>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let heard = Heard::default();
    let io = TokioIo::new(Socket::new(io, heard.clone()));
    let (sender, mut driver) = builder(max_head).handshake(io).await.ok()?;
    tokio::select! {
        biased;
        _ended = &mut driver => return None,
        () = heard.first() => {}
    }
    let load = Load {
        open: 1,
        most: driver.current_max_send_streams().min(MOST_STREAMS),
        retired: false,
        last_end: Instant::now(),
    };
    let connection = Shared { sender, heard, load: Arc::new(Mutex::new(load)) };
    let load = connection.load.clone();
    // It ends when its connection is dropped or broken; whoever uses the connection sees the error too.
    tokio::spawn(poll_fn(move |cx| {
        let ended = Pin::new(&mut driver).poll(cx);
        // A server may change its mind at any time.
        lock(&load).most = driver.current_max_send_streams().min(MOST_STREAMS);
        ended
    }));
    Some(Stream { connection })
}

fn builder(max_head: usize) -> http2::Builder<TokioExecutor> {
    let (remembered, duration) = CANCELLED_REMEMBERED;
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(MOST_UNSENT_BYTES)
        .max_header_list_size(u32::try_from(max_head).unwrap_or(u32::MAX))
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        // What a server sends on a stream that was cancelled would be counted over the life of the connection.
        .max_local_error_reset_streams(None)
        .max_concurrent_reset_streams(remembered)
        .reset_stream_duration(duration);
    builder
}

/// Whether the server surely did nothing about the request: it never left, or the server said so (RFC 9113 §8.7).
pub(super) fn was_not_processed(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    let refused = |cause: &h2::Error| cause.reason() == Some(h2::Reason::REFUSED_STREAM);
    error.is_canceled()
        || cause.is_some_and(|cause| cause.is_remote() && (cause.is_go_away() || refused(cause)))
}

/// Nothing that can panic runs while it is locked.
fn lock(load: &Mutex<Load>) -> MutexGuard<'_, Load> {
    load.lock().unwrap_or_else(PoisonError::into_inner)
}
