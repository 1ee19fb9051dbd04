//! A made-up LLM provider for `tollgate demo`: it speaks OpenAI's and Anthropic's protocols over plain HTTP/1.1, so that
//! real SDKs work against it without an account. What it says is made of what it was told; a token is a word.

mod chat;
mod embeddings;
mod messages;
mod reply;
mod responses;

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Frame, Incoming},
    header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, Sleep, sleep},
};
use uuid::Uuid;

use self::reply::{Api, Reply};
use crate::dialect::{Dialect, ErrorBody, ErrorKind};

/// The one model that there is. A request may name any other, and its answer names it too.
pub const MODEL: &str = "made-up-1";

/// Larger requests are refused.
const MAX_BODY: usize = 1024 * 1024;

/// Between two words: about as fast as a real model, and slow enough to see the stream.
const PACE: Duration = Duration::from_millis(30);

/// How long to wait after a failed accept, which mostly means that file descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

type Answer = Response<Either<Full<Bytes>, Paced>>;

/// Answers on `listener` for ever, one task for each connection.
pub async fn serve(listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(connection(stream))),
            Err(_) => sleep(ACCEPT_PAUSE).await,
        }
    }
}

async fn connection(stream: TcpStream) {
    // Without it, a word may wait for the acknowledgement of the one before.
    let _ = stream.set_nodelay(true);
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), service_fn(answer));
    // A connection that breaks is the proxy's to report.
    let _ = served.await;
}

async fn answer(request: Request<Incoming>) -> Result<Answer, Infallible> {
    let dialect = Dialect::of_path(request.uri().path());
    Ok(handle(request).await.unwrap_or_else(|refusal| refusal.answer(dialect)))
}

async fn handle(request: Request<Incoming>) -> Result<Answer, Refusal> {
    let api = match (request.method(), request.uri().path()) {
        (&Method::GET, "/v1/models") => return Ok(whole(StatusCode::OK, models().to_string())),
        (&Method::POST, "/v1/embeddings") => {
            let embedded = embeddings::embed(&body(request).await?)?;
            return Ok(whole(StatusCode::OK, embedded.to_string()));
        }
        (&Method::POST, "/v1/chat/completions") => Api::Chat,
        (&Method::POST, "/v1/responses") => Api::Responses,
        (&Method::POST, "/v1/messages") => Api::Messages,
        _ => return Err(Refusal::NotFound),
    };
    let body = body(request).await?;
    let reply = Reply::to(api, &body)?;
    Ok(if body["stream"] == true {
        streamed(reply)
    } else {
        whole(StatusCode::OK, reply.whole().to_string())
    })
}

async fn body(request: Request<Incoming>) -> Result<Value, Refusal> {
    let collected = Limited::new(request.into_body(), MAX_BODY).collect().await.map_err(|error| {
        if error.is::<LengthLimitError>() { Refusal::TooLarge } else { Refusal::Malformed(error.to_string()) }
    })?;
    let body: Value = serde_json::from_slice(&collected.to_bytes())
        .map_err(|error| Refusal::Malformed(format!("the body is not JSON: {error}")))?;
    if body.is_object() { Ok(body) } else { Err(Refusal::Malformed("the body is not a JSON object".into())) }
}

/// One list for both protocols: either SDK finds its own fields and ignores the other's.
fn models() -> Value {
    json!({
        "object": "list",
        "data": [{
            "id": MODEL, "object": "model", "created": 1_767_225_600, "owned_by": "tollgate",
            "type": "model", "display_name": "Made-up 1", "created_at": "2026-01-01T00:00:00Z", "lifecycle": "active",
        }],
        "has_more": false, "first_id": MODEL, "last_id": MODEL,
    })
}

fn whole(status: StatusCode, json: String) -> Answer {
    let mut answer = Response::new(Either::Left(Full::from(json)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

fn streamed(reply: Reply) -> Answer {
    let mut answer = Response::new(Either::Right(Paced::new(reply)));
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    answer
}

/// The reply as it is thought up: a word is not made before it is due.
struct Paced {
    reply: Reply,
    step: usize,
    due: Pin<Box<Sleep>>,
}

impl Paced {
    fn new(reply: Reply) -> Self {
        Self { reply, step: 0, due: Box::pin(sleep(Duration::ZERO)) }
    }
}

impl Body for Paced {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(step) = self.reply.step(self.step) else { return Poll::Ready(None) };
        ready!(self.due.as_mut().poll(context));
        self.due.as_mut().reset(Instant::now() + PACE);
        self.step += 1;
        Poll::Ready(Some(Ok(Frame::data(self.reply.events(step).into()))))
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("there is no such path here: this is the made-up model of `tollgate demo`")]
    NotFound,
    #[error("the body is larger than 1 MiB")]
    TooLarge,
    #[error("{0}")]
    Malformed(String),
}

impl Refusal {
    fn answer(&self, dialect: Dialect) -> Answer {
        let (status, kind) = match self {
            Self::NotFound => (StatusCode::NOT_FOUND, ErrorKind::NotFound),
            Self::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, ErrorKind::TooLarge),
            Self::Malformed(_) => (StatusCode::BAD_REQUEST, ErrorKind::InvalidRequest),
        };
        let (message, request_id) = (self.to_string(), Uuid::new_v4().to_string());
        let error = ErrorBody { status: status.as_u16(), kind, message: &message, request_id: &request_id };
        whole(status, dialect.error_body(&error))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use http_body_util::BodyExt;
    use hyper::client::conn::http1::SendRequest;

    use super::*;

    type Client = SendRequest<Full<Bytes>>;

    async fn client() -> Client {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        tokio::spawn(serve(listener));
        let (client, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        client
    }

    async fn send(
        client: &mut Client,
        method: &str,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Response<Incoming> {
        let request =
            Request::builder().method(method).uri(path).header("host", "demo").body(Full::new(body.into()));
        client.send_request(request.unwrap()).await.unwrap()
    }

    async fn text(answer: Response<Incoming>) -> String {
        String::from_utf8(answer.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
    }

    async fn json_of(answer: Response<Incoming>) -> Value {
        assert_eq!(answer.headers()[CONTENT_TYPE], "application/json");
        serde_json::from_str(&text(answer).await).unwrap()
    }

    async fn post(path: &str, body: Value) -> Value {
        let answer = send(&mut client().await, "POST", path, body.to_string()).await;
        assert_eq!(answer.status(), 200);
        json_of(answer).await
    }

    /// Every event's name and data.
    async fn post_streamed(path: &str, mut body: Value) -> Vec<(Option<String>, String)> {
        body["stream"] = true.into();
        let answer = send(&mut client().await, "POST", path, body.to_string()).await;
        assert_eq!(answer.headers()[CONTENT_TYPE], "text/event-stream; charset=utf-8");
        let text = text(answer).await;
        assert!(text.ends_with("\n\n"));
        let event = |event: &str| match event.strip_prefix("event: ").and_then(|named| named.split_once('\n'))
        {
            Some((name, data)) => (Some(name.to_owned()), data.strip_prefix("data: ").unwrap().to_owned()),
            None => (None, event.strip_prefix("data: ").unwrap().to_owned()),
        };
        text.trim_end().split("\n\n").map(event).collect()
    }

    fn parsed(data: &str) -> Value {
        serde_json::from_str(data).unwrap()
    }

    /// Six words to the model, of which it repeats two.
    fn chat() -> Value {
        json!({"model": "m", "messages": [
            {"role": "system", "content": "Be brief, please."},
            {"role": "user", "content": "Hi"},
            {"role": "user", "content": [{"type": "text", "text": "Good day"}, {"type": "image_url"}]},
        ]})
    }

    fn names(events: &[(Option<String>, String)]) -> Vec<&str> {
        let mut names: Vec<_> = events.iter().map(|(name, _)| name.as_deref().unwrap_or_default()).collect();
        names.dedup();
        names
    }

    #[tokio::test]
    async fn a_chat_answers_what_was_said() {
        let answer = post("/v1/chat/completions", chat()).await;
        let said = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert!(said.starts_with("You said: “Good day”. This is a made-up model behind Tollgate"), "{said}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(answer["model"], "m");
        assert_eq!(answer["usage"]["prompt_tokens"], 6);
        assert_eq!(answer["usage"]["completion_tokens"], said.split(' ').count());
        assert_eq!(answer["usage"]["total_tokens"], 6 + said.split(' ').count());
    }

    #[tokio::test]
    async fn a_chat_streams_the_same_text_and_the_usage_if_asked() {
        let whole = post("/v1/chat/completions", chat()).await;
        let mut body = chat();
        for include_usage in [false, true] {
            body["stream_options"]["include_usage"] = include_usage.into();
            let mut events = post_streamed("/v1/chat/completions", body.clone()).await;
            assert_eq!(events.pop().unwrap(), (None, "[DONE]".to_owned()));
            assert_eq!(names(&events), [""]);
            let chunks: Vec<_> = events.iter().map(|(_, data)| parsed(data)).collect();
            let said: String =
                chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
            assert_eq!(whole["choices"][0]["message"]["content"], said);
            assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
            let last = chunks.last().unwrap();
            if include_usage {
                assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
                assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["usage"].is_null()));
            } else {
                assert_eq!(last["choices"][0]["finish_reason"], "stop");
                assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
            }
        }
    }

    #[tokio::test]
    async fn a_response_streams_what_it_is_whole() {
        let body = json!({"model": "m", "instructions": "Be brief.", "input": "Good day"});
        let whole = post("/v1/responses", body.clone()).await;
        let said = whole["output"][0]["content"][0]["text"].as_str().unwrap();
        assert!(said.starts_with("You said: “Good day”."));
        assert_eq!(whole["usage"]["input_tokens"], 4);
        assert_eq!(whole["usage"]["total_tokens"], 4 + said.split(' ').count());

        let events = post_streamed("/v1/responses", body).await;
        assert_eq!(
            names(&events),
            [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                "response.output_text.delta",
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
        );
        for (number, (name, data)) in events.iter().enumerate() {
            assert_eq!(parsed(data)["sequence_number"], number);
            assert_eq!(parsed(data)["type"].as_str(), name.as_deref());
        }
        let streamed: String =
            events.iter().filter_map(|(_, data)| parsed(data)["delta"].as_str().map(str::to_owned)).collect();
        assert_eq!(streamed, said);
        let last = parsed(&events.last().unwrap().1);
        assert_eq!(last["response"]["usage"], whole["usage"]);
        assert_eq!(last["response"]["output"][0]["content"], whole["output"][0]["content"]);
    }

    #[tokio::test]
    async fn a_message_streams_what_it_is_whole() {
        let body = json!({"model": "m", "max_tokens": 99, "system": [{"type": "text", "text": "Be brief."}],
            "messages": [{"role": "user", "content": "Good day"}]});
        let whole = post("/v1/messages", body.clone()).await;
        let said = whole["content"][0]["text"].as_str().unwrap();
        assert!(said.starts_with("You said: “Good day”."));
        assert_eq!(whole["usage"]["input_tokens"], 4);
        assert_eq!(whole["usage"]["output_tokens"], said.split(' ').count());
        assert_eq!(whole["stop_reason"], "end_turn");

        let events = post_streamed("/v1/messages", body).await;
        assert_eq!(
            names(&events),
            [
                "message_start",
                "content_block_start",
                "ping",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
            ]
        );
        let streamed: String = events
            .iter()
            .filter_map(|(_, data)| parsed(data)["delta"]["text"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(streamed, said);
        let delta = parsed(&events[events.len() - 2].1);
        assert_eq!(delta["usage"], whole["usage"]);
        assert_eq!(parsed(&events[0].1)["message"]["usage"]["input_tokens"], 4);
    }

    #[tokio::test]
    async fn a_bound_cuts_the_answer_and_says_so() {
        let mut body = chat();
        body["max_tokens"] = 3.into();
        let answer = post("/v1/chat/completions", body.clone()).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "You said: “Good");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
        assert_eq!(answer["usage"]["completion_tokens"], 3);
        assert_eq!(post("/v1/messages", body).await["stop_reason"], "max_tokens");
        let events = post_streamed("/v1/responses", json!({"input": "x", "max_output_tokens": 2})).await;
        assert_eq!(names(&events).last(), Some(&"response.incomplete"));
        assert_eq!(parsed(&events.last().unwrap().1)["response"]["status"], "incomplete");
    }

    #[tokio::test]
    async fn words_arrive_one_by_one() {
        let mut body = chat();
        body["stream"] = true.into();
        for path in ["/v1/chat/completions", "/v1/messages"] {
            let begun = Instant::now();
            let mut frames = send(&mut client().await, "POST", path, body.to_string()).await.into_body();
            let mut arrivals = Vec::new();
            while let Some(frame) = frames.frame().await {
                drop(frame.unwrap());
                arrivals.push(begun.elapsed());
            }
            // Words are made when they are due, so the first is here long before the last exists.
            let words = arrivals.len() - 2;
            assert!(words > 10, "{words}");
            assert!(*arrivals.last().unwrap() - arrivals[0] >= PACE * words as u32, "{arrivals:?}");
        }
    }

    #[tokio::test]
    async fn one_connection_serves_many_requests() {
        let mut client = client().await;
        for _ in 0..3 {
            let models = json_of(send(&mut client, "GET", "/v1/models", "").await).await;
            assert_eq!(models["data"][0]["id"], MODEL);
            client.ready().await.unwrap();
        }
    }

    #[tokio::test]
    async fn an_embedding_comes_as_numbers_or_packed() {
        let answer = post("/v1/embeddings", json!({"model": "m", "input": ["one two", "three"]})).await;
        assert_eq!(answer["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
        let vector: Vec<f64> =
            answer["data"][1]["embedding"].as_array().unwrap().iter().flat_map(Value::as_f64).collect();
        assert_eq!(vector.len(), 8);
        assert!((vector.iter().map(|number| number * number).sum::<f64>() - 1.0).abs() < 1e-5);
        let packed = post("/v1/embeddings", json!({"input": "three", "encoding_format": "base64"})).await;
        assert_eq!(packed["data"][0]["embedding"].as_str().unwrap().len(), 44);
    }

    #[tokio::test]
    async fn refusals_have_the_shape_of_the_path() {
        for (method, path, body, status, at, expected) in [
            ("GET", "/v1/chat/completions", "", 404, "/error/code", "not_found"),
            ("POST", "/v1/models", "{}", 404, "/error/code", "not_found"),
            ("POST", "/v1/messages/batches", "{}", 404, "/error/type", "not_found_error"),
            ("POST", "/v1/chat/completions", "{", 400, "/error/type", "invalid_request_error"),
            ("POST", "/v1/messages", "{", 400, "/type", "error"),
            ("POST", "/v1/messages", "[]", 400, "/error/message", "the body is not a JSON object"),
            (
                "POST",
                "/v1/messages",
                r#"{"messages":[]}"#,
                400,
                "/error/message",
                "`messages` is missing or empty",
            ),
            ("POST", "/v1/responses", "{}", 400, "/error/message", "`input` is missing or empty"),
            ("POST", "/v1/embeddings", r#"{"input":["a",1]}"#, 400, "/error/code", "invalid_request"),
        ] {
            let answer = send(&mut client().await, method, path, body).await;
            assert_eq!(answer.status(), status, "{method} {path} {body}");
            assert_eq!(json_of(answer).await.pointer(at).unwrap(), expected, "{method} {path} {body}");
        }
    }

    #[tokio::test]
    async fn a_large_body_is_refused() {
        let body = "x".repeat(MAX_BODY + 1);
        let answer = send(&mut client().await, "POST", "/v1/chat/completions", body).await;
        assert_eq!(answer.status(), 413);
        assert_eq!(json_of(answer).await["error"]["code"], "request_too_large");
    }
}
