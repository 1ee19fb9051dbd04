//! The wire formats that LLM APIs speak, and the error body that each one's SDKs understand.
//!
//! Shapes by protocol, as the SDKs read them: OpenAI `{"error":{message,type,param,code}}`, Anthropic
//! `{"type":"error","error":{type,message},"request_id"}`, Gemini `{"error":{code,message,status}}`, Ollama `{"error":"text"}`.

use std::str::FromStr;

use serde_json::json;

/// A family of wire formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// OpenAI and everything that copies it (Azure, vLLM, most gateways).
    Openai,
    /// Anthropic's Messages API.
    Anthropic,
    /// Google's Generative Language API.
    Gemini,
    /// Ollama's native API.
    Ollama,
}

/// The name is none of `openai`, `anthropic`, `gemini`, `ollama`.
#[derive(Debug, thiserror::Error)]
#[error("unknown dialect")]
pub struct UnknownDialect;

impl Dialect {
    /// Every dialect's name, as configuration spells it.
    pub const NAMES: [&str; 4] = ["openai", "anthropic", "gemini", "ollama"];

    /// The dialect that a raw request path belongs to. Unknown paths are taken for OpenAI's, which most clients speak.
    pub fn of_path(path: &str) -> Self {
        let path = path.trim_start_matches('/');
        let has = |segment: &str| path.split('/').any(|part| part == segment);
        if has("messages") || path == "v1/complete" {
            Self::Anthropic
        } else if path.split('/').any(|part| part.starts_with("v1beta")) || path.contains("enerateContent") {
            Self::Gemini
        } else if has_ollama_call(path) {
            Self::Ollama
        } else {
            Self::Openai
        }
    }

    /// The body of an answer that Tollgate makes itself.
    pub fn error_body(self, error: &ErrorBody<'_>) -> String {
        let ErrorBody { status, kind, message, request_id } = *error;
        match self {
            Self::Openai => json!({"error": {
                "message": message, "type": kind.openai_type(), "param": null, "code": kind.openai_code(),
            }}),
            Self::Anthropic => json!({
                "type": "error",
                "error": {"type": kind.anthropic_type(), "message": message},
                "request_id": request_id,
            }),
            Self::Gemini => json!({"error": {
                "code": status, "message": message, "status": kind.gemini_status(),
            }}),
            Self::Ollama => json!({"error": message}),
        }
        .to_string()
    }
}

/// Whether `api` is followed by a call of Ollama's. At the start nearly everything is one, but `/api/v1` is where gateways
/// of the OpenAI kind have theirs.
fn has_ollama_call(path: &str) -> bool {
    const CALLS: [&str; 8] = ["chat", "generate", "tags", "embed", "embeddings", "show", "ps", "pull"];
    match path.strip_prefix("api/") {
        Some(call) => {
            !call.strip_prefix('v').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        }
        None => path.rsplit_once("/api/").is_some_and(|(_, call)| CALLS.contains(&call)),
    }
}

impl FromStr for Dialect {
    type Err = UnknownDialect;

    fn from_str(name: &str) -> Result<Self, UnknownDialect> {
        match name {
            "openai" => Ok(Self::Openai),
            "anthropic" => Ok(Self::Anthropic),
            "gemini" => Ok(Self::Gemini),
            "ollama" => Ok(Self::Ollama),
            _ => Err(UnknownDialect),
        }
    }
}

/// What an error body says, before it is put into a dialect's shape.
#[derive(Clone, Copy, Debug)]
pub struct ErrorBody<'a> {
    /// The HTTP status of the answer.
    pub status: u16,
    /// The class of the error.
    pub kind: ErrorKind,
    /// The sentence that the caller's developer reads.
    pub message: &'a str,
    /// The id that the log line carries too.
    pub request_id: &'a str,
}

impl ErrorBody<'_> {
    /// The data of an `error` event of OpenAI's Responses API. Its reference has the fields beside `type`, its SDKs raise
    /// on those in `error`. Events are numbered there; this one has no number of its own.
    pub fn in_responses(&self) -> String {
        let Self { kind, message, .. } = *self;
        let code = kind.openai_code();
        json!({
            "type": "error", "code": code, "message": message, "param": null, "sequence_number": 0,
            "error": {"message": message, "type": kind.openai_type(), "param": null, "code": code},
        })
        .to_string()
    }
}

/// The classes of error that SDKs tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request is not one that Tollgate forwards.
    InvalidRequest,
    /// No valid key.
    Authentication,
    /// It may not be done from there.
    Permission,
    /// No such path.
    NotFound,
    /// The body is too large.
    TooLarge,
    /// Over the limit.
    RateLimit,
    /// Tollgate or the upstream is not able to answer.
    Unavailable,
}

impl ErrorKind {
    fn openai_type(self) -> &'static str {
        match self {
            Self::InvalidRequest | Self::NotFound | Self::TooLarge => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::Permission => "permission_error",
            Self::RateLimit => "rate_limit_error",
            Self::Unavailable => "server_error",
        }
    }

    fn openai_code(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Authentication => "invalid_api_key",
            Self::Permission => "permission_denied",
            Self::NotFound => "not_found",
            Self::TooLarge => "request_too_large",
            Self::RateLimit => "rate_limit_exceeded",
            Self::Unavailable => "server_error",
        }
    }

    fn anthropic_type(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::Permission => "permission_error",
            Self::NotFound => "not_found_error",
            Self::TooLarge => "request_too_large",
            Self::RateLimit => "rate_limit_error",
            Self::Unavailable => "api_error",
        }
    }

    fn gemini_status(self) -> &'static str {
        match self {
            Self::InvalidRequest | Self::TooLarge => "INVALID_ARGUMENT",
            Self::Authentication => "UNAUTHENTICATED",
            Self::Permission => "PERMISSION_DENIED",
            Self::NotFound => "NOT_FOUND",
            Self::RateLimit => "RESOURCE_EXHAUSTED",
            Self::Unavailable => "UNAVAILABLE",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_tells_its_dialect() {
        for (path, dialect) in [
            ("/v1/chat/completions", Dialect::Openai),
            ("/v1/responses", Dialect::Openai),
            ("/v1/messages", Dialect::Anthropic),
            ("/v1/messages/count_tokens", Dialect::Anthropic),
            ("/messages", Dialect::Anthropic),
            ("/v1beta/models/gemini-pro:generateContent", Dialect::Gemini),
            ("/v1/models/gemini-pro:streamGenerateContent", Dialect::Gemini),
            ("/api/chat", Dialect::Ollama),
            ("//api/chat", Dialect::Ollama),
            ("/api/version", Dialect::Ollama),
            ("/ollama/api/chat", Dialect::Ollama),
            ("/api/v1/chat/completions", Dialect::Openai),
            ("/x/api/v1/chat/completions", Dialect::Openai),
            ("/v1/models", Dialect::Openai),
            ("/", Dialect::Openai),
        ] {
            assert_eq!(Dialect::of_path(path), dialect, "{path}");
        }
    }

    #[test]
    fn every_name_parses_and_nothing_else_does() {
        for name in Dialect::NAMES {
            assert!(name.parse::<Dialect>().is_ok(), "{name}");
        }
        assert!("OpenAI".parse::<Dialect>().is_err());
    }

    #[test]
    fn the_body_has_the_shape_of_the_dialect() {
        let error =
            ErrorBody { status: 429, kind: ErrorKind::RateLimit, message: "wait \"7\" s", request_id: "r1" };
        let body = |dialect: Dialect| -> serde_json::Value {
            serde_json::from_str(&dialect.error_body(&error)).unwrap()
        };
        assert_eq!(body(Dialect::Openai)["error"]["code"], "rate_limit_exceeded");
        assert_eq!(body(Dialect::Openai)["error"]["message"], "wait \"7\" s");
        assert_eq!(body(Dialect::Anthropic)["type"], "error");
        assert_eq!(body(Dialect::Anthropic)["request_id"], "r1");
        assert_eq!(body(Dialect::Gemini)["error"]["code"], 429);
        assert_eq!(body(Dialect::Gemini)["error"]["status"], "RESOURCE_EXHAUSTED");
        assert_eq!(body(Dialect::Ollama)["error"], "wait \"7\" s");
    }
}
