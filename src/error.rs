//! Every way in which a request ends without an upstream's answer, and what the caller is told.
//!
//! The stages know nothing of HTTP. Here, and only here, their errors become a status and a sentence; details that are
//! the operator's business go to the log.

use std::time::Duration;

use hyper::StatusCode;

use crate::{
    auth::Unauthorized,
    cors::OriginNotAllowed,
    dialect::ErrorKind,
    headers::whole_seconds,
    hygiene::Unclean,
    limit::Limit,
    route::NoRoute,
    size::Size,
    upload::UploadFailure,
    upstream::{AnswerError, SendError},
};

/// The outcome of a request that met a bug of ours.
pub const PANICKED: &str = "panicked";

/// Why a request was not answered by an upstream.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not one that is forwarded.
    #[error(transparent)]
    Unclean(#[from] Unclean),
    /// A web page asks to call that may not.
    #[error(transparent)]
    OriginNotAllowed(#[from] OriginNotAllowed),
    /// Nobody we know sent it.
    #[error(transparent)]
    Unauthorized(#[from] Unauthorized),
    /// Nobody serves it.
    #[error(transparent)]
    NoRoute(#[from] NoRoute),
    /// Its body did not come as it should.
    #[error(transparent)]
    Upload(#[from] UploadFailure),
    /// The upstream takes no WebSocket.
    #[error("WebSocket is switched off")]
    WebSocketOff,
    /// A limit is used up.
    #[error("over the limit")]
    Refused {
        /// The limit that keeps the caller out longest.
        limit: Limit,
        /// The same, as an index into the tier's limits.
        by: usize,
        /// Until it has room.
        retry_after: Duration,
    },
    /// No store decided, and the configuration says to turn requests away then.
    #[error("the limiter's store is not available")]
    StoreUnavailable,
    /// The upstream gave no answer.
    #[error(transparent)]
    Upstream(#[from] SendError),
    /// A bug of ours.
    #[error("a stage panicked")]
    Panicked,
}

/// What the world gets to know of an error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The class that SDKs make an exception of.
    pub kind: ErrorKind,
    /// The metric's label, from few values.
    pub outcome: &'static str,
    /// The sentence for the caller's developer.
    pub message: String,
}

impl Error {
    /// The answer to a request that ended so.
    pub fn answer(&self) -> Answer {
        match self {
            Self::Unclean(unclean) => answer_unclean(*unclean),
            Self::OriginNotAllowed(OriginNotAllowed) => Answer::new(
                StatusCode::FORBIDDEN,
                ErrorKind::Permission,
                "origin_not_allowed",
                "Web pages of this origin may not call. The key `origins` in [cors] of the proxy's configuration lists those that may.",
            ),
            Self::Unauthorized(Unauthorized::Missing | Unauthorized::Invalid) => Answer::new(
                StatusCode::UNAUTHORIZED,
                ErrorKind::Authentication,
                "unauthorized",
                "Missing or invalid API key. Send a valid key as `Authorization: Bearer KEY` or `X-API-Key: KEY`.",
            ),
            Self::NoRoute(missing) => answer_no_route(missing),
            Self::Upload(failure) => answer_upstream(&SendError::from(*failure)),
            Self::WebSocketOff => Answer::new(
                StatusCode::UPGRADE_REQUIRED,
                ErrorKind::InvalidRequest,
                "websocket_off",
                "WebSocket is not available here. Send plain HTTP requests.",
            ),
            Self::Refused { limit, retry_after, .. } => Answer::new(
                StatusCode::TOO_MANY_REQUESTS,
                ErrorKind::RateLimit,
                "refused",
                &format!(
                    "Rate limit reached for this key: {} requests per {}. Please try again in {}s.",
                    limit.requests,
                    limit.window,
                    whole_seconds(*retry_after).max(1),
                ),
            ),
            Self::StoreUnavailable => Answer::new(
                StatusCode::SERVICE_UNAVAILABLE,
                ErrorKind::Unavailable,
                "store_unavailable",
                "The rate limiter is not available. Please try again.",
            ),
            Self::Upstream(error) => answer_upstream(error),
            Self::Panicked => Answer::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                ErrorKind::Unavailable,
                PANICKED,
                "The proxy failed. Please try again.",
            ),
        }
    }
}

impl Answer {
    fn new(status: StatusCode, kind: ErrorKind, outcome: &'static str, message: &str) -> Self {
        Self { status, kind, outcome, message: message.to_owned() }
    }
}

fn answer_unclean(unclean: Unclean) -> Answer {
    let status = match unclean {
        Unclean::Method => StatusCode::METHOD_NOT_ALLOWED,
        Unclean::TargetTooLong => StatusCode::URI_TOO_LONG,
        Unclean::TooManyFields(_) | Unclean::HeadTooLarge(_) => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        Unclean::Path | Unclean::Host | Unclean::Handshake => StatusCode::BAD_REQUEST,
        Unclean::TransferCoding => StatusCode::NOT_IMPLEMENTED,
        Unclean::Upgrade | Unclean::WebSocketVersion => StatusCode::UPGRADE_REQUIRED,
    };
    let message = format!("The request was not forwarded: {unclean}.");
    Answer::new(status, ErrorKind::InvalidRequest, "unclean", &message)
}

fn answer_no_route(missing: &NoRoute) -> Answer {
    let (status, kind, message) = match missing {
        NoRoute::Path => (
            StatusCode::NOT_FOUND,
            ErrorKind::NotFound,
            "No upstream serves this path. Check the base URL of your client.".to_owned(),
        ),
        NoRoute::Model(model) => (
            StatusCode::NOT_FOUND,
            ErrorKind::NotFound,
            format!("No upstream serves the model `{model}` on this path."),
        ),
        NoRoute::Unnamed => (
            StatusCode::BAD_REQUEST,
            ErrorKind::InvalidRequest,
            "The model decides where this request goes, and none was found in it. Send `model` in an uncompressed \
             JSON or form body, before anything large."
                .to_owned(),
        ),
    };
    Answer::new(status, kind, "no_route", &message)
}

fn answer_upstream(error: &SendError) -> Answer {
    use ErrorKind::{InvalidRequest, Unavailable};
    match error {
        SendError::TooLarge(most) => too_large(*most),
        SendError::UploadStalled => Answer::new(
            StatusCode::REQUEST_TIMEOUT,
            InvalidRequest,
            "upload_failed",
            "The request body did not arrive in time.",
        ),
        SendError::UploadMalformed => Answer::new(
            StatusCode::BAD_REQUEST,
            InvalidRequest,
            "upload_failed",
            "The request body is malformed.",
        ),
        // Nobody reads this one. By its outcome the record knows that.
        SendError::ClientGone => {
            Answer::new(StatusCode::BAD_REQUEST, InvalidRequest, "client_gone", "The request body broke off.")
        }
        SendError::Connect(_) | SendError::Exchange(_) | SendError::NotHttp => Answer::new(
            StatusCode::BAD_GATEWAY,
            Unavailable,
            "upstream_failed",
            "The upstream could not be reached. Please try again.",
        ),
        SendError::HeadTooLarge(_) => Answer::new(
            StatusCode::BAD_GATEWAY,
            Unavailable,
            "upstream_failed",
            "The head of the upstream's answer is too large to pass on.",
        ),
        SendError::ConnectTimeout
        | SendError::TlsTimeout
        | SendError::FirstByteTimeout
        | SendError::TotalTimeout => Answer::new(
            StatusCode::GATEWAY_TIMEOUT,
            Unavailable,
            "upstream_timeout",
            "The upstream did not answer in time.",
        ),
    }
}

/// What is said of an answer that had begun and broke off: its status has passed, but for the error that it would have been.
pub fn broken_answer(error: &AnswerError) -> Answer {
    let (status, outcome, message) = match error {
        AnswerError::Broken(_) | AnswerError::CutShort => (
            StatusCode::BAD_GATEWAY,
            "upstream_broke",
            "The upstream broke off its answer. Please try again.",
        ),
        AnswerError::Upload(failure) => return answer_upstream(&SendError::from(*failure)),
        AnswerError::Stalled => (
            StatusCode::GATEWAY_TIMEOUT,
            "upstream_stalled",
            "The upstream stopped in the middle of its answer. Please try again.",
        ),
        AnswerError::TotalTimeout => (
            StatusCode::GATEWAY_TIMEOUT,
            "upstream_timeout",
            "The upstream did not finish its answer in time.",
        ),
        AnswerError::Stopped => {
            (StatusCode::SERVICE_UNAVAILABLE, "stopped", "The proxy is restarting. Please try again.")
        }
    };
    Answer::new(status, ErrorKind::Unavailable, outcome, message)
}

fn too_large(most: u64) -> Answer {
    let message = format!("The request body is larger than {}, the most that is allowed here.", Size(most));
    Answer::new(StatusCode::PAYLOAD_TOO_LARGE, ErrorKind::TooLarge, "too_large", &message)
}
