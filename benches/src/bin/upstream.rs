//! A made-up LLM API on loopback, as cheap as it can be: it shares the machine with what is measured.
//!
//! `POST …/chat/completions` gets a fixed completion of 320 bytes. With `"stream":true` it gets events, as many as
//! `"events":` says, `"pace":` milliseconds apart, each with the wall clock in nanoseconds behind an `@`, so that a client on the same machine knows how long each
//! was under way.

use std::{
    convert::Infallible,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use clap::Parser;
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Either, Full};
use hyper::{
    Request, Response, StatusCode, body::Incoming, header::CONTENT_TYPE, server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::TokioIo;
use tokio::{
    net::{TcpListener, TcpStream},
    time::{Instant, Interval, interval_at},
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const COMPLETION: &[u8] = br#"{"id":"chatcmpl-1","object":"chat.completion","created":1790000000,"model":"made-up","choices":[{"index":0,"message":{"role":"assistant","content":"Hello! This answer was made up by the benchmark's upstream."},"finish_reason":"stop"}],"usage":{"prompt_tokens":18,"completion_tokens":11,"total_tokens":29}}"#;

#[derive(Parser)]
struct Arguments {
    #[arg(long)]
    listen: SocketAddr,
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

fn main() {
    let arguments = Arguments::parse();
    benches::run(arguments.threads, serve(arguments));
}

async fn serve(arguments: Arguments) {
    let listener = TcpListener::bind(arguments.listen).await.expect("the address is free");
    loop {
        let Ok((socket, _)) = listener.accept().await else { continue };
        tokio::spawn(connection(socket));
    }
}

async fn connection(socket: TcpStream) {
    // The connection goes on without it, if slower.
    let _ = socket.set_nodelay(true);
    // A client that breaks off is its own affair.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), service_fn(answer)).await;
}

async fn answer(request: Request<Incoming>) -> Result<Response<Either<Full<Bytes>, Events>>, hyper::Error> {
    let found = request.uri().path().ends_with("/chat/completions");
    let body = request.into_body().collect().await?.to_bytes();
    let (status, kind, body) = if !found {
        (StatusCode::NOT_FOUND, "application/json", Either::Left(Full::from("{}")))
    } else if after(&body, b"\"stream\":").is_some_and(|value| value.starts_with(b"true")) {
        let events = number(&body, b"\"events\":").unwrap_or(100);
        let pace = number(&body, b"\"pace\":").unwrap_or(10);
        (StatusCode::OK, "text/event-stream", Either::Right(Events::new(events, pace)))
    } else {
        (StatusCode::OK, "application/json", Either::Left(Full::from(COMPLETION)))
    };
    let answer = Response::builder().status(status).header(CONTENT_TYPE, kind).body(body);
    Ok(answer.expect("the head is a valid one"))
}

/// What follows a name and its colon, as the load client writes them.
fn after<'a>(body: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let at = body.windows(name.len()).position(|window| window == name)?;
    Some(body[at + name.len()..].trim_ascii_start())
}

fn number(body: &[u8], name: &[u8]) -> Option<u64> {
    let value = after(body, name)?;
    let digits = value.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&value[..digits]).ok()?.parse().ok()
}

struct Events {
    next: u64,
    count: u64,
    pace: Interval,
}

impl Events {
    fn new(count: u64, pace: u64) -> Self {
        let pace = Duration::from_millis(pace.max(1));
        Self { next: 0, count, pace: interval_at(Instant::now() + pace, pace) }
    }

    fn event(&self) -> Bytes {
        let (next, now) = (self.next, benches::wall_clock_nanos());
        Bytes::from(format!(
            "data: {{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1790000000,\"model\":\"made-up\",\
             \"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"word {next} @{now} \"}},\"finish_reason\":null}}]}}\n\n"
        ))
    }
}

impl Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        // The first goes out at once, with the head.
        if self.next > 0 && self.next < self.count {
            ready!(self.pace.poll_tick(cx));
        }
        let event = match self.next.cmp(&self.count) {
            std::cmp::Ordering::Less => self.event(),
            std::cmp::Ordering::Equal => Bytes::from_static(b"data: [DONE]\n\n"),
            std::cmp::Ordering::Greater => return Poll::Ready(None),
        };
        self.next += 1;
        Poll::Ready(Some(Ok(Frame::data(event))))
    }
}
