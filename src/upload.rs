//! The body of a request on its way to the upstream: passed on as it comes, bounded in size and in silence, and kept
//! for a while where a stale connection may make it necessary to send it again.

use std::{
    io,
    ops::ControlFlow,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};

/// No more of a body than this is kept for sending it again, unless something else is said.
const MOST_KEPT_BYTES: u64 = 256 * 1024;

/// Why an upload ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UploadFailure {
    /// More came than is allowed.
    #[error("the body is larger than {0} bytes")]
    TooLarge(u64),
    /// Nothing came for too long.
    #[error("the body stalled")]
    Stalled,
    /// What came is no body.
    #[error("the body is malformed")]
    Malformed,
    /// The client went away.
    #[error("the client went away")]
    Gone,
}

/// The upload as the proxy sees it, while its [`UploadBody`] is with the connection.
#[derive(Clone, Debug)]
pub struct Upload(Arc<Mutex<Source>>);

#[derive(Debug)]
struct Source {
    incoming: Incoming,
    /// How many bytes are passed on at most.
    most_bytes: u64,
    /// How long the client may be silent in between.
    most_silence: Duration,
    received: u64,
    /// Nothing follows.
    ended: bool,
    kept: Kept,
    most_kept: u64,
    /// The number of the latest reader. Only that one may read on.
    reader: u64,
    /// How many of the kept pieces the latest reader has had.
    handed_out: usize,
    begun: bool,
    silence: Option<Pin<Box<Sleep>>>,
    failure: Option<UploadFailure>,
    last_progress: Instant,
}

#[derive(Debug)]
enum Kept {
    /// Everything that came, for another try.
    All(Vec<Bytes>),
    /// There will be no other try, but the present one has not sent all of it yet.
    Rest(Vec<Bytes>),
    No,
}

impl Kept {
    fn pieces(&self) -> &[Bytes] {
        match self {
            Self::All(pieces) | Self::Rest(pieces) => pieces,
            Self::No => &[],
        }
    }

    /// A piece to send. Where nobody will ask for it again, it is given away.
    fn piece(&mut self, position: usize) -> Option<Bytes> {
        match self {
            Self::All(pieces) => pieces.get(position).cloned(),
            Self::Rest(pieces) => pieces.get_mut(position).map(std::mem::take),
            Self::No => None,
        }
    }
}

impl Upload {
    /// The body of a request that has just begun, whose client may be silent for so long. Of its size everything is
    /// allowed until [`Upload::hold_to`] says otherwise.
    pub fn new(incoming: Incoming, most_silence: Duration) -> Self {
        let (silence, failure) = (None, None);
        let kept = Kept::All(Vec::new());
        let last_progress = Instant::now();
        Self(Arc::new(Mutex::new(Source {
            incoming,
            most_bytes: u64::MAX,
            most_silence,
            received: 0,
            ended: false,
            kept,
            most_kept: MOST_KEPT_BYTES,
            reader: 0,
            handed_out: 0,
            begun: false,
            silence,
            failure,
            last_progress,
        })))
    }

    /// Bounds its size. Fails at once if its declared length, or what has come of it, is more.
    pub fn hold_to(&self, most_bytes: u64) -> Result<(), UploadFailure> {
        let mut source = self.source();
        source.most_bytes = most_bytes;
        let to_come = source.incoming.size_hint().exact().unwrap_or_default();
        if source.received.saturating_add(to_come) > most_bytes {
            return Err(UploadFailure::TooLarge(most_bytes));
        }
        Ok(())
    }

    /// Shows the beginning of the body to `look`, piece by piece, until it has seen enough. All of it is kept, and goes to
    /// the upstream first. Nothing, if `look` finds nothing within so many bytes.
    pub async fn look_ahead<T>(
        &self,
        most_bytes: u64,
        mut look: impl FnMut(&[u8]) -> ControlFlow<Option<T>>,
    ) -> Result<Option<T>, UploadFailure> {
        while self.source().received < most_bytes {
            let next = std::future::poll_fn(|cx| self.source().poll_kept_piece(cx)).await;
            let Some(piece) = next.transpose()? else { return Ok(None) };
            if let ControlFlow::Break(found) = look(&piece) {
                return Ok(found);
            }
        }
        Ok(None)
    }

    /// The body from its first byte on. Whoever has it from before gets no more of it.
    pub fn body(&self) -> UploadBody {
        let mut source = self.source();
        source.reader += 1;
        source.handed_out = 0;
        // To send it again is progress, however long the last attempt has waited.
        source.last_progress = Instant::now();
        UploadBody { upload: self.clone(), reader: source.reader, position: 0 }
    }

    /// Keeps so many bytes, and none of a longer body.
    pub fn keep_at_most(&self, bytes: u64) {
        self.source().most_kept = bytes;
    }

    /// Whether it has no byte, and the client has said so.
    pub fn is_empty(&self) -> bool {
        let source = self.source();
        source.received == 0 && source.incoming.is_end_stream()
    }

    /// Whether the latest reader has had all of it.
    pub fn is_sent(&self) -> bool {
        let source = self.source();
        source.handed_out >= source.kept.pieces().len() && (source.ended || source.incoming.is_end_stream())
    }

    /// What went wrong on the client's side, if anything did.
    pub fn failure(&self) -> Option<UploadFailure> {
        self.source().failure
    }

    /// Whether a byte of it has been asked for. Only then does a client that expects `100 Continue` get it.
    pub fn has_begun(&self) -> bool {
        self.source().begun
    }

    /// When the last piece was passed on; while it is the client that keeps us waiting, that is now.
    pub fn last_progress(&self) -> Instant {
        let source = self.source();
        if source.silence.is_some() { Instant::now() } else { source.last_progress }
    }

    /// Whether the body can be had from its first byte once more.
    pub fn is_replayable(&self) -> bool {
        let source = self.source();
        source.failure.is_none() && matches!(source.kept, Kept::All(_))
    }

    /// Lets go of what was kept for another try.
    pub fn forget(&self) {
        self.source().forget();
    }

    /// Keeps nothing for another try after the next one.
    pub fn keep_for_one_more(&self) {
        let mut source = self.source();
        source.handed_out = 0;
        source.forget();
    }

    /// Reads and drops what the client still sends, so that it gets to read an early answer instead of a reset.
    pub async fn drain(&self, most: u64, within: Duration) {
        if !matches!(self.failure(), None | Some(UploadFailure::TooLarge(_))) {
            return;
        }
        let drained = async {
            let mut dropped = 0;
            while let Some(bytes) = std::future::poll_fn(|cx| self.source().poll_discard(cx)).await
                && dropped <= most
            {
                dropped += bytes;
            }
        };
        // Past either bound the connection is closed, and the client may see that instead of the answer.
        let _ = tokio::time::timeout(within, drained).await;
    }

    /// A panic while this is locked would have been one of hyper's; the state is then still whole.
    fn source(&self) -> MutexGuard<'_, Source> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Source {
    fn fail(&mut self, failure: UploadFailure) -> Poll<Option<Result<Bytes, UploadFailure>>> {
        (self.failure, self.silence) = (Some(failure), None);
        Poll::Ready(Some(Err(failure)))
    }

    fn forget(&mut self) {
        self.kept = match std::mem::replace(&mut self.kept, Kept::No) {
            Kept::All(pieces) | Kept::Rest(pieces) if self.handed_out < pieces.len() => Kept::Rest(pieces),
            _ => Kept::No,
        };
    }

    /// The number of bytes that came; nothing at the end, whichever way it came.
    fn poll_discard(&mut self, cx: &mut Context<'_>) -> Poll<Option<u64>> {
        let frame = ready!(Pin::new(&mut self.incoming).poll_frame(cx));
        let bytes = |frame: Frame<Bytes>| frame.data_ref().map_or(0, |data| data.len() as u64);
        Poll::Ready(frame.and_then(Result::ok).map(bytes))
    }

    /// The next piece, kept for another try as long as they are few.
    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UploadFailure>>> {
        let piece = ready!(self.poll_incoming(cx));
        if let Some(Ok(piece)) = &piece {
            let rest = self.incoming.size_hint().lower();
            match &mut self.kept {
                Kept::All(pieces) if self.received.saturating_add(rest) <= self.most_kept => {
                    pieces.push(piece.clone());
                }
                _ => self.kept = Kept::No,
            }
        }
        Poll::Ready(piece)
    }

    /// The next piece before anybody sends one. Kept whatever it weighs, for it was not sent.
    fn poll_kept_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UploadFailure>>> {
        let piece = ready!(self.poll_incoming(cx));
        if let (Some(Ok(piece)), Kept::All(pieces)) = (&piece, &mut self.kept) {
            pieces.push(piece.clone());
        }
        Poll::Ready(piece)
    }

    fn poll_incoming(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UploadFailure>>> {
        if let Some(failure) = self.failure {
            return Poll::Ready(Some(Err(failure)));
        }
        self.begun = true;
        let piece = match Pin::new(&mut self.incoming).poll_frame(cx) {
            Poll::Pending => return self.poll_silence(cx),
            Poll::Ready(None) => None,
            Poll::Ready(Some(Err(error))) => return self.fail(broken(&error)),
            // Trailers of a request are not passed on, for some can change its meaning.
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
        };
        self.silence = None;
        self.last_progress = Instant::now();
        let Some(piece) = piece else {
            self.ended = true;
            return Poll::Ready(None);
        };
        self.received += piece.len() as u64;
        if self.received > self.most_bytes {
            return self.fail(UploadFailure::TooLarge(self.most_bytes));
        }
        Poll::Ready(Some(Ok(piece)))
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, UploadFailure>>> {
        let most = self.most_silence;
        let silence = self.silence.get_or_insert_with(|| Box::pin(tokio::time::sleep(most)));
        ready!(silence.as_mut().poll(cx));
        self.fail(UploadFailure::Stalled)
    }
}

/// A client that breaks the rules can still be told; one that is gone can't.
fn broken(error: &hyper::Error) -> UploadFailure {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<io::Error>());
    match cause.map(io::Error::kind) {
        Some(io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData) => UploadFailure::Malformed,
        _ => UploadFailure::Gone,
    }
}

/// The body as a connection sends it.
#[derive(Debug)]
pub struct UploadBody {
    upload: Upload,
    reader: u64,
    /// How many of the kept pieces have been sent.
    position: usize,
}

impl Body for UploadBody {
    type Data = Bytes;
    type Error = UploadFailure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UploadFailure>>> {
        let this = &mut *self;
        let mut source = this.upload.source();
        if source.reader != this.reader {
            // A connection that is given up must neither take a piece nor be woken for one in the other's place.
            return Poll::Ready(Some(Err(UploadFailure::Gone)));
        }
        let piece = match source.kept.piece(this.position) {
            Some(piece) => {
                source.last_progress = Instant::now();
                Some(Ok(piece))
            }
            None => ready!(source.poll_piece(cx)),
        };
        this.position += 1;
        source.handed_out = this.position;
        Poll::Ready(piece.map(|piece| piece.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        let source = self.upload.source();
        let nothing_to_replay = self.position >= source.kept.pieces().len();
        nothing_to_replay && source.incoming.is_end_stream()
    }

    /// The declared length of the whole body. A connection asks before it sends the first piece.
    fn size_hint(&self) -> SizeHint {
        let source = self.upload.source();
        match source.incoming.size_hint().exact() {
            Some(rest) if self.position == 0 => SizeHint::with_exact(source.received + rest),
            Some(rest) => SizeHint::with_exact(rest),
            None => SizeHint::default(),
        }
    }
}
