//! HTTP/2 to an upstream: one connection for many requests, of which none feels what the others do.

use std::time::Duration;

use h2::{Reason, server::Builder};
use reqwest::{Client, Response};

use crate::harness::{
    Answering, Arrival, Http2Upstream, Link, Proxy, ProxyBuilder, Upstream, Wire, header, patiently,
    raw::{DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, RawH2, SETTINGS, WINDOW_UPDATE, frame},
    rest_of, secret,
};

const LIMITS: &str = r#"{ requests = 500, per = "1h" }"#;

/// A client whose requests all come by one connection, and so to one worker, and the proxy before this server.
async fn start(url: &str) -> (Proxy, Client) {
    start_with(url, "").await
}

async fn start_with(url: &str, lines: &str) -> (Proxy, Client) {
    let builder = ProxyBuilder::before_url(url).upstream("http2 = true").upstream(lines);
    let proxy = builder.tier("alice", LIMITS).start().await;
    let client = proxy.client();
    // A client that sends its first requests at the same time makes connections for them at the same time.
    let stranger = client.get(proxy.url("/v1/warm")).send().await.unwrap();
    assert_eq!(stranger.status(), 401);
    (proxy, client)
}

type Asked = tokio::task::JoinHandle<reqwest::Result<Response>>;

fn ask(proxy: &Proxy, client: &Client, path: &str) -> Asked {
    tokio::spawn(client.get(proxy.url(path)).bearer_auth(secret("alice")).send())
}

fn post(proxy: &Proxy, client: &Client, path: &str, body: Vec<u8>) -> Asked {
    tokio::spawn(client.post(proxy.url(path)).bearer_auth(secret("alice")).body(body).send())
}

async fn answer(asked: Asked) -> Response {
    patiently("an answer", asked).await.unwrap().unwrap()
}

/// So many requests that wait for their answers at once.
async fn waiting(
    proxy: &Proxy,
    client: &Client,
    upstream: &Http2Upstream,
    count: usize,
) -> (Vec<Asked>, Vec<Arrival>) {
    let asked = (0..count).map(|_| ask(proxy, client, "/v1/x")).collect();
    let mut arrived = Vec::new();
    for _ in 0..count {
        arrived.push(upstream.next().await);
    }
    (asked, arrived)
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_at_the_same_time_share_a_connection_and_have_the_heads_of_http2() {
    let upstream = Http2Upstream::start().await;
    let (proxy, client) = start(&format!("{}/base", upstream.url())).await;
    let (asked, arrived) = waiting(&proxy, &client, &upstream, 20).await;
    for arrival in arrived {
        assert_eq!(arrival.connection, 0);
        let uri = arrival.request.uri().to_string();
        assert_eq!(uri, format!("{}/base/v1/x", upstream.url()), "`:authority` is the upstream's");
        arrival.ok();
    }
    for asked in asked {
        let answer = answer(asked).await;
        assert_eq!((answer.status().as_u16(), header(&answer, "x-ratelimit-limit")), (200, "500"));
        assert_eq!(answer.text().await.unwrap(), "{}");
    }

    let http1 = proxy.client_builder().http1_only().build().unwrap();
    let mut request = http1.post(proxy.url("/v1/a%2Fb?x=%20")).bearer_auth(secret("alice")).body("12345");
    for (name, value) in [
        ("connection", "x-hop, te"),
        ("x-hop", "1"),
        ("te", "gzip"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
    ] {
        request = request.header(name, value);
    }
    let asked = tokio::spawn(request.send());
    let mut arrival = upstream.next().await;
    assert_eq!(arrival.request.uri().path_and_query().unwrap(), "/base/v1/a%2Fb?x=%20");
    for name in ["host", "connection", "x-hop", "te", "keep-alive", "proxy-connection", "transfer-encoding"] {
        assert_eq!(arrival.header(name), None, "{name}");
    }
    assert_eq!(arrival.header("content-length"), Some("5"));
    assert_eq!(arrival.body().await, b"12345");
    arrival.ok();
    assert_eq!(answer(asked).await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_upload_arrives_whole_and_events_one_by_one() {
    let upstream = Http2Upstream::start().await;
    let (proxy, client) = start(&upstream.url()).await;
    let body: Vec<u8> = (0..3_000_000_u32).map(|n| (n.wrapping_mul(n) >> 6) as u8).collect();
    let asked = post(&proxy, &client, "/v1/x", body.clone());
    let mut arrival = upstream.next().await;
    assert_eq!(arrival.header("content-length"), Some("3000000"));
    assert!(arrival.body().await == body);
    let mut answering = arrival.head(200);
    let mut answer = answer(asked).await;
    for event in ["one", "two"] {
        answering.event(event);
        let chunk = patiently("an event", answer.chunk()).await.unwrap().unwrap();
        assert_eq!(chunk, format!("data: {event}\n\n"));
    }
    answering.last("");
    assert_eq!(rest_of(&mut answer).await.unwrap(), "");
    assert_eq!(proxy.logged("/v1/x").await["ending"], "complete");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_takes_no_more_streams_gets_more_connections() {
    let mut settings = Builder::new();
    settings.max_concurrent_streams(2);
    let upstream = Http2Upstream::with(settings).await;
    let (proxy, client) = start(&upstream.url()).await;
    let (asked, arrived) = waiting(&proxy, &client, &upstream, 5).await;
    let mut connections: Vec<_> = arrived.iter().map(|arrival| arrival.connection).collect();
    connections.sort_unstable();
    assert_eq!(connections, [0, 0, 1, 1, 2]);
    arrived.into_iter().for_each(Arrival::ok);
    for asked in asked {
        assert_eq!(answer(asked).await.text().await.unwrap(), "{}");
    }
    let asked = ask(&proxy, &client, "/v1/y");
    let arrival = upstream.next().await;
    assert!(arrival.connection <= 2, "one of the connections that there are");
    arrival.ok();
    answer(asked).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_stream_is_sent_once_more_on_another_connection_if_its_body_can_be() {
    let upstream = Http2Upstream::start().await;
    let (proxy, client) = start(&upstream.url()).await;
    let (stays, mut arrived) = waiting(&proxy, &client, &upstream, 1).await;
    let mut staying = arrived.remove(0).head(200);

    let asked = post(&proxy, &client, "/v1/again", b"body".to_vec());
    let mut first = upstream.next().await;
    assert_eq!((first.connection, first.body().await), (0, b"body".to_vec()));
    first.reset(Reason::REFUSED_STREAM);
    let mut second = upstream.next().await;
    assert_eq!((second.connection, second.body().await), (1, b"body".to_vec()));
    second.ok();
    let again = answer(asked).await;
    assert_eq!(
        (again.status().as_u16(), header(&again, "x-ratelimit-remaining")),
        (200, "498"),
        "counted once"
    );

    let asked = post(&proxy, &client, "/v1/large", vec![7; 300_000]);
    let mut large = upstream.next().await;
    assert_eq!(large.body().await.len(), 300_000);
    large.reset(Reason::REFUSED_STREAM);
    assert_eq!(answer(asked).await.status(), 502, "what is too large to keep is not sent again");

    // The first connection takes no more, and what it carries goes on.
    staying.last("late");
    let mut stays = answer(stays.into_iter().next().unwrap()).await;
    assert_eq!(rest_of(&mut stays).await.unwrap(), "late");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_perhaps_processed_is_not_sent_again() {
    let upstream = Http2Upstream::start().await;
    let (proxy, client) = start(&upstream.url()).await;
    for reason in [Reason::INTERNAL_ERROR, Reason::CANCEL, Reason::NO_ERROR, Reason::ENHANCE_YOUR_CALM] {
        let asked = post(&proxy, &client, "/v1/x", b"{}".to_vec());
        upstream.next().await.reset(reason);
        assert_eq!(answer(asked).await.status(), 502, "{reason:?}");
    }
    let asked = ask(&proxy, &client, "/v1/next");
    let next = upstream.next().await;
    assert_eq!((next.request.uri().path(), next.connection), ("/v1/next", 0), "and the connection lives");
    next.ok();
    answer(asked).await;
}

/// The server's part of a connection up to the first request, with frames that the test writes itself.
async fn first_request(wire: &Wire) -> Link {
    let mut link = wire.accept().await;
    assert_eq!(link.bytes(24).await, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    link.send(frame(SETTINGS, 0, 0, &[])).await;
    while link.frame().await.0 != HEADERS {}
    link
}

/// A head without a body: `:status: 200` by its place in the static table (RFC 7541 appendix A).
fn ok() -> Vec<u8> {
    frame(HEADERS, END_HEADERS | END_STREAM, 1, &[0x88])
}

fn goodbye(last_stream: u32) -> Vec<u8> {
    frame(GOAWAY, 0, 0, &[last_stream.to_be_bytes(), [0; 4]].concat())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_says_goodbye_before_a_request_gets_it_on_another_connection() {
    let wire = Wire::listen().await;
    let (proxy, client) = start(&wire.url()).await;
    let asked = post(&proxy, &client, "/v1/x", Vec::new());
    let mut leaving = first_request(&wire).await;
    leaving.send(goodbye(0)).await;
    let mut fresh = first_request(&wire).await;
    fresh.send(ok()).await;
    assert_eq!(answer(asked).await.status(), 200);
    drop((leaving, fresh));

    let asked = post(&proxy, &client, "/v1/x", Vec::new());
    let mut leaving = first_request(&wire).await;
    leaving.send(goodbye(1)).await;
    drop(leaving);
    assert_eq!(answer(asked).await.status(), 502, "it may have been processed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_gone_without_a_word_is_asked_and_given_up() {
    let wire = Wire::listen().await;
    let (proxy, client) = start(&wire.url()).await;
    let asked = post(&proxy, &client, "/v1/x", Vec::new());
    let mut link = first_request(&wire).await;
    while link.frame().await.0 != PING {}
    assert_eq!(answer(asked).await.status(), 502);
    link.ended().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_was_closed_while_it_was_idle_is_not_noticed() {
    let wire = Wire::listen().await;
    let (proxy, client) = start(&wire.url()).await;
    for _ in 0..10 {
        let asked = post(&proxy, &client, "/v1/x", Vec::new());
        let mut link = first_request(&wire).await;
        link.send(ok()).await;
        assert_eq!(answer(asked).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_cancels_its_stream_and_no_other() {
    let upstream = Http2Upstream::start().await;
    let (proxy, client) = start(&upstream.url()).await;
    let (stays, mut arrived) = waiting(&proxy, &client, &upstream, 1).await;
    let mut staying = arrived.remove(0).head(200);

    let leaves = ask(&proxy, &client, "/v1/before");
    let mut before = upstream.next().await;
    leaves.abort();
    assert_eq!(before.cancelled().await, Reason::CANCEL);
    assert_eq!(proxy.logged("/v1/before").await["ending"], "client gone");

    let leaves = ask(&proxy, &client, "/v1/midway");
    let mut midway = upstream.next().await.head(200);
    midway.event("one");
    let mut midway_answer = answer(leaves).await;
    assert_eq!(midway_answer.chunk().await.unwrap().unwrap(), "data: one\n\n");
    drop(midway_answer);
    assert_eq!(midway.cancelled().await, Reason::CANCEL);
    assert_eq!(proxy.logged("/v1/midway").await["ending"], "client gone");

    staying.last("late");
    let mut stays = answer(stays.into_iter().next().unwrap()).await;
    assert_eq!(rest_of(&mut stays).await.unwrap(), "late");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_that_is_too_slow_is_cancelled() {
    let upstream = Http2Upstream::start().await;
    let timers = "first_byte_timeout = \"300ms\"\nidle_timeout = \"300ms\"";
    let (proxy, client) = start_with(&upstream.url(), timers).await;
    let asked = ask(&proxy, &client, "/v1/silent");
    let mut silent = upstream.next().await;
    assert_eq!(answer(asked).await.status(), 504);
    assert_eq!(silent.cancelled().await, Reason::CANCEL);

    let asked = ask(&proxy, &client, "/v1/stalls");
    let mut stalls = upstream.next().await.head(200);
    stalls.event("one");
    let mut answer = answer(asked).await;
    assert!(rest_of(&mut answer).await.is_err());
    assert_eq!(stalls.cancelled().await, Reason::CANCEL);
    assert_eq!(proxy.logged("/v1/stalls").await["outcome"], "upstream_stalled");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_the_upstream_cuts_short_never_ends_cleanly() {
    let upstream = Http2Upstream::start().await;
    let (proxy, _) = start(&upstream.url()).await;
    for (protocol, client) in crate::harness::clients(&proxy) {
        for reason in [Reason::NO_ERROR, Reason::CANCEL, Reason::INTERNAL_ERROR] {
            let path = format!("/v1/{protocol}/{reason:?}");
            let asked = ask(&proxy, &client, &path);
            let mut answering = upstream.next().await.head(200);
            answering.event("one");
            let mut answer = answer(asked).await;
            assert_eq!(patiently("the event", answer.chunk()).await.unwrap().unwrap(), "data: one\n\n");
            answering.reset(reason);
            assert!(rest_of(&mut answer).await.is_err(), "{path}");
            let line = proxy.logged(&path).await;
            assert_eq!(
                (&line["ending"], &line["outcome"]),
                (&"broken".into(), &"upstream_broke".into()),
                "{line}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed_in_time() {
    let upstream = Http2Upstream::start().await;
    let (proxy, client) = start_with(&upstream.url(), "pool_idle_timeout = \"200ms\"").await;
    let asked = ask(&proxy, &client, "/v1/x");
    upstream.next().await.ok();
    answer(asked).await.bytes().await.unwrap();
    assert_eq!(upstream.next_closed().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_http2_is_told_from_one_that_is_away() {
    let upstream = Upstream::ok().await;
    let wire = Wire::listen().await;
    let (proxy, client) = start(&wire.url()).await;
    let asked = ask(&proxy, &client, "/v1/x");
    let mut link = wire.accept().await;
    link.send("HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
    assert_eq!(answer(asked).await.status(), 502);
    let line = proxy.logged("/v1/x").await;
    assert!(line["reason"].as_str().unwrap().contains("does not speak HTTP/2"), "{line}");
    assert_eq!(upstream.connections(), 0);
}

/// Sends events of 16 bytes for as long as they are taken, and tells when the window is full.
async fn flood(mut answering: Answering, full: tokio::sync::mpsc::Sender<()>) {
    loop {
        let brief = tokio::time::timeout(Duration::from_secs(2), answering.room_for(16)).await;
        match brief {
            Ok(true) => answering.event("12345678"),
            Ok(false) => return,
            Err(_) => {
                let _ = full.send(()).await;
                std::future::pending::<()>().await;
            }
        }
    }
}

/// hyper's own settings end a connection on which one client leaves small events unread, and everybody else's with it.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_do_not_read_stop_nobody_else_and_cost_little() {
    const STALLED: usize = 40;
    let upstream = Http2Upstream::start().await;
    let (proxy, _) = start(&upstream.url()).await;
    // Both kinds of client come by one connection, and so to one worker. A window of nothing: whoever gets no update
    // reads nothing.
    let mut raw = RawH2::to(&proxy, 0).await;
    raw.send(WINDOW_UPDATE, 0, 0, &1_000_000_u32.to_be_bytes()).await;
    raw.get(1, "/v1/reads", "alice").await;
    let mut reads = upstream.next().await.head(200);
    raw.send(WINDOW_UPDATE, 0, 1, &1_000_000_u32.to_be_bytes()).await;
    let before = proxy.resident_bytes().await;
    let (full, mut filled) = tokio::sync::mpsc::channel(STALLED);
    for nth in 0..STALLED {
        raw.get(3 + 2 * nth as u32, &format!("/v1/stalls/{nth}"), "alice").await;
        let arrival = upstream.next().await;
        assert_eq!(arrival.connection, 0, "they share a connection");
        let mut arrival = arrival;
        tokio::spawn(flood(arrival.head(200), full.clone()));
    }
    for _ in 0..STALLED {
        patiently("a full window", filled.recv()).await;
    }
    for _ in 0..100 {
        reads.event("go on");
        let frame = raw.frame_of(DATA, 1).await.expect("the client that reads goes on");
        assert_eq!(frame.payload, b"data: go on\n\n");
    }
    let each = (proxy.resident_bytes().await.saturating_sub(before)) / STALLED;
    assert!(each < 2 << 20, "{each} bytes for each client that does not read");
}
