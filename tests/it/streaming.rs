//! Answers pass as they come: event by event, byte for byte, with what the limits say in the head.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use reqwest::{Method, StatusCode};
use tokio::task::JoinSet;

use crate::harness::{
    Gate, Plain, Proxy, ProxyBuilder, Script, Upstream, Wire, clients, header, patiently,
    raw::{DATA, END_STREAM, HEADERS, Raw, RawH2},
    secret,
};

const LIMITS: &str = r#"{ requests = 50, per = "1h" }"#;

async fn start(upstream: &Upstream) -> Proxy {
    ProxyBuilder::before(upstream).tier("alice", LIMITS).start().await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_arrives_before_the_next_is_sent() {
    let gates = [Gate::default(), Gate::default()];
    let by_protocol = gates.clone();
    let upstream = Upstream::start(move |request| {
        let gate = &by_protocol[usize::from(request.header("x-protocol") == Some("HTTP/2"))];
        Script::sse().event("one").wait(gate).event("two").end()
    })
    .await;
    let proxy = start(&upstream).await;
    for ((protocol, client), gate) in clients(&proxy).into_iter().zip(gates) {
        let request = proxy.chat(&client, "alice").header("x-protocol", protocol).send();
        let mut answer = patiently("the head of a stream", request).await.unwrap();
        assert_eq!(
            format!("{:?}", answer.version()),
            if protocol == "HTTP/2" { "HTTP/2.0" } else { protocol }
        );
        let first = patiently("the first event", answer.chunk()).await.unwrap().unwrap();
        assert_eq!(first, "data: one\n\n", "{protocol}");
        gate.open();
        let second = patiently("the second event", answer.chunk()).await.unwrap().unwrap();
        assert_eq!(second, "data: two\n\n", "{protocol}");
        assert_eq!(patiently("the end", answer.text()).await.unwrap(), "");
    }
}

/// R3. Behind the head of its answer, an event is a second small piece, which Nagle's algorithm holds back for 40 ms: every
/// one of them, as a timer would. A busy machine holds back a few.
#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_on_its_way_at_once() {
    const ANSWERS: usize = 50;
    let gates: Arc<Vec<Gate>> = Arc::new((0..2 * ANSWERS).map(|_| Gate::default()).collect());
    let held = gates.clone();
    let upstream = Upstream::start(move |request| {
        let nth: usize = request.header("x-nth").unwrap().parse().unwrap();
        Script::sse().wait(&held[nth]).event("one").end()
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    for ((protocol, client), gates) in clients(&proxy).into_iter().zip(gates.chunks(ANSWERS)) {
        let first = if protocol == "HTTP/1.1" { 0 } else { ANSWERS };
        let mut delays = Vec::new();
        for (nth, gate) in gates.iter().enumerate() {
            let request = proxy.chat(&client, "alice").header("x-nth", first + nth).send();
            let mut answer = patiently("the head", request).await.unwrap();
            let sent = Instant::now();
            gate.open();
            let event = patiently("the event", answer.chunk()).await.unwrap().unwrap();
            delays.push(sent.elapsed());
            assert_eq!(event, "data: one\n\n", "{protocol}");
            assert_eq!(answer.text().await.unwrap(), "", "{protocol}");
        }
        delays.sort_unstable();
        println!("{protocol}: median {:?}, worst {:?}", delays[ANSWERS / 2], delays[ANSWERS - 1]);
        assert!(delays[ANSWERS / 4] < Duration::from_millis(20), "{protocol}: {delays:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_do_not_read_hold_up_their_upstream_and_cost_little() {
    const CLIENTS: usize = 20;
    /// More than the kernel's buffers of two connections.
    const MOST_EACH: usize = 64 << 20;
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let before = proxy.resident_bytes().await;
    let sent = Arc::new(AtomicUsize::new(0));
    let (mut clients, mut upstreams) = ((Vec::new(), Vec::new()), JoinSet::new());
    for nth in 0..CLIENTS {
        if nth % 2 == 0 {
            let mut raw = Raw::to(&proxy).await;
            raw.get("/v1/x", "alice").await;
            clients.0.push(raw);
        } else {
            let mut raw = RawH2::to(&proxy, 65_535).await;
            raw.get(1, "/v1/x", "alice").await;
            clients.1.push(raw);
        }
        let mut link = wire.accept().await;
        link.head().await;
        let sent = sent.clone();
        upstreams.spawn(async move {
            link.send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n").await;
            let events = "data: one\n\n".repeat(10_000);
            while sent.load(Ordering::Relaxed) < CLIENTS * MOST_EACH && link.try_send(&events).await {
                sent.fetch_add(events.len(), Ordering::Relaxed);
            }
        });
    }
    // Everything in between fills up, until no upstream gets on.
    let mut last = usize::MAX;
    while last != sent.load(Ordering::Relaxed) {
        last = sent.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let each = proxy.resident_bytes().await.saturating_sub(before) / CLIENTS;
    println!("{} bytes sent to each, {each} bytes of memory for each", last / CLIENTS);
    assert!(last < CLIENTS * MOST_EACH, "the upstreams wait");
    assert!(each < 1 << 20, "{each} bytes for each client that does not read");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_head_of_a_stream_says_what_the_limits_say_before_any_event() {
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = Upstream::start(move |_| Script::sse().wait(&held).event("one").end()).await;
    let proxy = start(&upstream).await;
    let answer = patiently("the head", proxy.chat(&proxy.client(), "alice").send()).await.unwrap();
    assert_eq!(header(&answer, "x-ratelimit-limit"), "50");
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "49");
    assert!(header(&answer, "x-ratelimit-reset").parse::<u64>().unwrap() <= 3600);
    assert!(header(&answer, "ratelimit").starts_with("\"1h\";r=49;t="));
    assert_eq!(header(&answer, "ratelimit-policy"), "\"1h\";q=50;w=3600");
    assert_eq!(header(&answer, "x-accel-buffering"), "no");
    assert_eq!(header(&answer, "cache-control"), "no-cache, no-transform");
    assert_eq!(header(&answer, "content-type"), "text/event-stream");
    gate.open();
    assert_eq!(answer.text().await.unwrap(), "data: one\n\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_limits_are_replaced_and_its_other_headers_kept() {
    let upstream = Upstream::start(|_| {
        Script::new().send(
            "HTTP/1.1 200 OK\r\nX-RateLimit-Limit: 7\r\nx-ratelimit-limit: 8\r\nx-ratelimit-remaining: 3\r\n\
             x-ratelimit-reset: 1700000000\r\nratelimit: \"up\";r=1\r\nx-ratelimit-remaining-tokens: 900\r\n\
             anthropic-ratelimit-requests-limit: 5\r\nopenai-processing-ms: 12\r\nx-request-id: theirs\r\n\
             set-cookie: a=1\r\nset-cookie: b=2\r\ncontent-length: 2\r\n\r\n{}",
        )
    })
    .await;
    let proxy = start(&upstream).await;
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(header(&answer, "x-ratelimit-limit"), "50");
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "49");
    assert_ne!(header(&answer, "x-ratelimit-reset"), "1700000000");
    assert!(header(&answer, "ratelimit").starts_with("\"1h\""));
    assert_eq!(header(&answer, "x-ratelimit-remaining-tokens"), "900");
    assert_eq!(header(&answer, "anthropic-ratelimit-requests-limit"), "5");
    assert_eq!(header(&answer, "openai-processing-ms"), "12");
    assert_eq!(header(&answer, "x-request-id"), "theirs");
    assert_eq!(answer.headers().get_all("set-cookie").iter().count(), 2);
    let line = proxy.logs.request("/v1/chat/completions").await;
    assert_eq!(line["upstream_request_id"], "theirs");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_errors_pass_untouched_with_the_limits_in_their_head() {
    let upstream = Upstream::start(|request| {
        let status = request.target.rsplit('/').next().unwrap();
        Script::new().send(format!(
            "HTTP/1.1 {status} Upset\r\ncontent-type: application/json\r\nretry-after: 17\r\n\
             x-should-retry: true\r\ncontent-length: 17\r\n\r\n{{\"error\": \"mine\"}}"
        ))
    })
    .await;
    let proxy = start(&upstream).await;
    for (nth, status) in [429, 500, 529, 404].into_iter().enumerate() {
        let url = proxy.url(&format!("/v1/{status}"));
        let answer = proxy.client().post(url).bearer_auth(secret("alice")).send().await.unwrap();
        assert_eq!(answer.status(), status);
        assert_eq!(header(&answer, "retry-after"), "17");
        assert_eq!(header(&answer, "x-should-retry"), "true");
        assert_eq!(header(&answer, "x-ratelimit-remaining"), (49 - nth).to_string());
        for ours in ["x-ratelimit-source", "retry-after-ms"] {
            assert!(!answer.headers().contains_key(ours), "{ours} is only on refusals of our own");
        }
        assert_eq!(answer.text().await.unwrap(), r#"{"error": "mine"}"#);
    }
    assert_eq!(upstream.received().len(), 4, "no retry on the client's behalf");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_of_an_answer_passes_in_every_framing() {
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|n| (n.wrapping_mul(n) >> 7) as u8).collect();
    let sent = bytes.clone();
    let upstream = Upstream::start(move |request| {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\ncontent-encoding: gzip\r\n";
        match &*request.target {
            "/length" => {
                Script::new().send(format!("{head}content-length: {}\r\n\r\n", sent.len())).send(&sent)
            }
            "/close" => Script::new().send(format!("{head}\r\n")).send(&sent).close(),
            _ => {
                let script = Script::new().send(format!("{head}transfer-encoding: chunked\r\n\r\n"));
                let chunks = sent.chunks(77_777).fold(script, |script, chunk| {
                    script.send(format!("{:x}\r\n", chunk.len())).send(chunk).send("\r\n")
                });
                chunks.end()
            }
        }
    })
    .await;
    let proxy = start(&upstream).await;
    for (protocol, client) in clients(&proxy) {
        for path in ["/length", "/close", "/chunked"] {
            let request = client.get(proxy.url(path)).bearer_auth(secret("alice"));
            let answer = request.send().await.unwrap();
            assert_eq!(header(&answer, "content-encoding"), "gzip", "nothing is decoded");
            let body = patiently("the body", answer.bytes()).await.unwrap();
            assert!(body == bytes, "{protocol} {path}: {} bytes came", body.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_length_beside_chunks_is_not_believed() {
    let upstream = Upstream::start(|_| {
        Script::new()
            .send("HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n")
            .chunk("more than three")
            .end()
    })
    .await;
    let proxy = start(&upstream).await;
    for (protocol, client) in clients(&proxy) {
        let answer = proxy.chat(&client, "alice").send().await.unwrap();
        assert_eq!(answer.text().await.unwrap(), "more than three", "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_length_that_stands_twice_is_passed_on_once() {
    let upstream = Upstream::start(|_| {
        Script::new().send(
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\ncontent-length: 2, 2\r\n\r\n{}",
        )
    })
    .await;
    let proxy = start(&upstream).await;
    for (protocol, client) in clients(&proxy) {
        let answer = proxy.chat(&client, "alice").send().await.unwrap();
        assert_eq!(header(&answer, "content-length"), "2", "{protocol}");
        assert_eq!(answer.text().await.unwrap(), "{}", "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_without_a_body_have_none_and_the_connection_lives_on() {
    let upstream = Upstream::start(|request| {
        let head = match &*request.target {
            "/head" => "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 1234\r\n\r\n",
            "/204" => "HTTP/1.1 204 No Content\r\n\r\n",
            "/304" => "HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n",
            _ => "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
        };
        Script::new().send(head)
    })
    .await;
    let proxy = start(&upstream).await;
    let mut plain = Plain::connect(&proxy).await;
    for (line, status, length) in [
        ("HEAD /head", 200, Some("1234")),
        ("GET /204", 204, None),
        ("GET /304", 304, None),
        ("GET /empty", 200, Some("0")),
    ] {
        plain.request(line, "alice", "").await;
        let head = plain.head().await.unwrap();
        assert_eq!((head.status, head.header("content-length")), (status, length), "{line}");
        assert_eq!(head.header("transfer-encoding"), None, "{line}");
        assert!(head.header("x-ratelimit-remaining").is_some(), "{line}");
    }
    assert_eq!(upstream.connections(), 1, "the end of each answer was seen on both sides");
    let client = proxy.client();
    for (method, path, status) in
        [(Method::HEAD, "/head", 200), (Method::GET, "/204", 204), (Method::GET, "/304", 304)]
    {
        let answer =
            client.request(method, proxy.url(path)).bearer_auth(secret("alice")).send().await.unwrap();
        assert_eq!(answer.status(), status);
        assert!(answer.bytes().await.unwrap().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_of_an_answer_reach_those_who_can_take_them() {
    let upstream = Upstream::start(|_| {
        Script::new()
            .send("HTTP/1.1 200 OK\r\ntrailer: x-late\r\ntransfer-encoding: chunked\r\n\r\n")
            .chunk("body")
            .send("0\r\nx-late: 1\r\n\r\n")
    })
    .await;
    let proxy = start(&upstream).await;
    for (takes, expected) in
        [("te: trailers\r\n", &["4", "body", "0", "x-late: 1", ""][..]), ("", &["4", "body", "0", ""])]
    {
        let mut plain = Raw::to(&proxy).await;
        let key = secret("alice");
        plain.send(format!("GET /v1/x HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n{takes}\r\n")).await;
        assert_eq!(plain.head().await.unwrap().status, 200);
        let mut rest = Vec::new();
        while rest.last().is_none_or(|line: &String| !line.is_empty()) {
            rest.push(plain.line().await.unwrap());
        }
        assert_eq!(rest, expected, "{takes}");
    }
    let mut raw = RawH2::to(&proxy, 65_535).await;
    raw.get(1, "/v1/x", "alice").await;
    assert_eq!(raw.frame_of(HEADERS, 1).await.unwrap().flags & END_STREAM, 0);
    let data = raw.frame_of(DATA, 1).await.unwrap();
    assert_eq!((&*data.payload, data.flags & END_STREAM), (&b"body"[..], 0));
    let trailers = raw.frame_of(HEADERS, 1).await.unwrap();
    assert_eq!(trailers.flags & END_STREAM, END_STREAM, "the trailers end the stream");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interim_answer_is_not_taken_for_the_answer() {
    let upstream = Upstream::start(|_| {
        Script::new()
            .send("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n")
            .send("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nhi")
    })
    .await;
    let proxy = start(&upstream).await;
    for (_, client) in clients(&proxy) {
        let answer = proxy.chat(&client, "alice").send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::CREATED);
        assert_eq!(answer.text().await.unwrap(), "hi");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_is_passed_on_and_not_followed() {
    let upstream = Upstream::start(|_| {
        Script::new().send("HTTP/1.1 307 Go\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")
    })
    .await;
    let proxy = start(&upstream).await;
    let client = proxy.client_builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let answer = proxy.chat(&client, "alice").send().await.unwrap();
    assert_eq!((answer.status().as_u16(), header(&answer, "location")), (307, "/elsewhere"));
    assert_eq!(upstream.received().len(), 1);
}
