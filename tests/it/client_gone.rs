//! A client that goes away takes its request with it, and the log says so.

use std::time::Duration;

use serde_json::Value;
use tokio::net::{TcpListener, TcpSocket, TcpStream};

use crate::harness::{
    Gate, Plain, Proxy, ProxyBuilder, Script, Upstream, Wire, patiently,
    raw::{DATA, RST_STREAM, RawH2},
    secret,
};

async fn start(upstream: &Upstream) -> Proxy {
    ProxyBuilder::before(upstream).tier("alice", "").start().await
}

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leave {
    Close,
    Reset,
    HalfClose,
    CloseNotify,
}

impl Leave {
    /// Those that the kernel tells of, whoever reads.
    const OF_SOCKETS: [(Self, &str); 3] =
        [(Self::Close, "/v1/close"), (Self::Reset, "/v1/reset"), (Self::HalfClose, "/v1/half-close")];
    const ALL: [(Self, &str); 4] = [
        Self::OF_SOCKETS[0],
        Self::OF_SOCKETS[1],
        Self::OF_SOCKETS[2],
        (Self::CloseNotify, "/v1/close-notify"),
    ];
}

/// What is left of the client, which must not close by itself meanwhile.
async fn leave(mut plain: Plain, how: Leave) -> Option<Plain> {
    match how {
        Leave::Close => drop(plain),
        Leave::Reset => plain.reset(),
        Leave::HalfClose => {
            plain.half_close().await;
            return Some(plain);
        }
        Leave::CloseNotify => {
            plain.close_notify().await;
            return Some(plain);
        }
    }
    None
}

async fn is_cancelled(proxy: &Proxy, upstream: &Upstream, path: &str, bytes: u64) {
    upstream.next_closed().await;
    assert_eq!(line_of_a_client_gone(proxy, path).await["bytes"], bytes);
}

/// The log's line of this request, whose client was not there for its end.
async fn line_of_a_client_gone(proxy: &Proxy, path: &str) -> Value {
    let line = proxy.logs.request(path).await;
    assert_eq!((&line["ending"], &line["outcome"]), (&"client gone".into(), &"client_gone".into()), "{line}");
    line
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_the_first_byte_cancels_at_the_upstream() {
    let upstream = Upstream::start(|_| Script::new().hang()).await;
    let proxy = start(&upstream).await;
    for (how, path) in Leave::ALL {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("POST {path}"), "alice", "content-length: 2\r\n").await;
        plain.send("{}").await.unwrap();
        upstream.next_request().await;
        let _left = leave(plain, how).await;
        is_cancelled(&proxy, &upstream, path, 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_mid_stream_cancels_at_the_upstream() {
    let upstream = Upstream::start(|_| Script::sse().event("one").hang()).await;
    let proxy = start(&upstream).await;
    for (how, path) in Leave::ALL {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("GET {path}"), "alice", "").await;
        assert_eq!(plain.head().await.unwrap().status, 200);
        assert_eq!(patiently("the event", plain.chunk()).await.unwrap(), b"data: one\n\n");
        let _left = leave(plain, how).await;
        is_cancelled(&proxy, &upstream, path, 11).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_reset_cancels_its_request_and_no_other() {
    let gate = Gate::default();
    let held = gate.clone();
    let upstream = Upstream::start(move |request| match &*request.target {
        "/v1/stays" => Script::sse().event("one").wait(&held).event("two").end(),
        "/v1/midway" => Script::sse().event("one").hang(),
        _ => Script::new().hang(),
    })
    .await;
    let proxy = start(&upstream).await;
    let client = proxy.client();
    let get = |path: &str| client.get(proxy.url(path)).bearer_auth(secret("alice")).send();
    let mut stays = patiently("an answer", get("/v1/stays")).await.unwrap();
    upstream.next_request().await;

    let before_the_answer = tokio::spawn(get("/v1/before"));
    upstream.next_request().await;
    before_the_answer.abort();
    is_cancelled(&proxy, &upstream, "/v1/before", 0).await;

    let mut midway = patiently("an answer", get("/v1/midway")).await.unwrap();
    assert_eq!(midway.chunk().await.unwrap().unwrap(), "data: one\n\n");
    drop(midway);
    is_cancelled(&proxy, &upstream, "/v1/midway", 11).await;

    gate.open();
    let mut rest = Vec::new();
    while let Some(piece) = patiently("the rest", stays.chunk()).await.unwrap() {
        rest.extend_from_slice(&piece);
    }
    assert_eq!(rest, b"data: one\n\ndata: two\n\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_connection_that_drops_cancels_all_its_requests() {
    let upstream = Upstream::start(|_| Script::sse().event("one").hang()).await;
    let proxy = start(&upstream).await;
    // The client's connection lives in the runtime that it was made in, and ends with it.
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let client = proxy.client();
    for path in ["/v1/a", "/v1/b"] {
        let request = client.get(proxy.url(path)).bearer_auth(secret("alice")).send();
        let answer = patiently("an answer", runtime.spawn(request)).await.unwrap().unwrap();
        assert_eq!(answer.version(), reqwest::Version::HTTP_2);
        std::mem::forget(answer);
    }
    runtime.shutdown_background();
    for path in ["/v1/a", "/v1/b"] {
        upstream.next_closed().await;
        line_of_a_client_gone(&proxy, path).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_mid_upload_cancels_at_the_upstream() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    for (how, path) in Leave::ALL {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("POST {path}"), "alice", "content-length: 10\r\n").await;
        plain.send("12345").await.unwrap();
        let mut link = wire.accept().await;
        link.head().await;
        assert_eq!(link.bytes(5).await, b"12345");
        let _left = leave(plain, how).await;
        assert_eq!(link.ended().await, b"", "half a request never looks whole");
        assert_eq!(proxy.logs.request(path).await["ending"], "client gone");
    }
}

/// An upstream may answer what it has only heard a part of.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_in_mid_upload_while_it_is_answered_is_not_taken_for_a_broken_upstream() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    for (how, path) in Leave::ALL {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("POST {path}"), "alice", "content-length: 10\r\n").await;
        plain.send("12345").await.unwrap();
        let mut link = wire.accept().await;
        link.head().await;
        link.send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            .await;
        link.send("b\r\ndata: one\n\n\r\n").await;
        assert_eq!(plain.head().await.unwrap().status, 200);
        assert_eq!(patiently("the event", plain.chunk()).await.unwrap(), b"data: one\n\n");
        let _left = leave(plain, how).await;
        link.ended().await;
        line_of_a_client_gone(&proxy, path).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_with_a_byte_of_a_next_request_unread_cancels_at_the_upstream() {
    let upstream = Upstream::start(|request| match request.header("x-waits") {
        Some(_) => Script::new().hang(),
        None => Script::sse().event("one").hang(),
    })
    .await;
    let proxy = start(&upstream).await;
    for (waits, bytes) in [("x-waits: yes\r\n", 0), ("", 11)] {
        for (how, path) in Leave::OF_SOCKETS {
            let path = format!("{path}/{bytes}");
            let mut plain = Plain::connect(&proxy).await;
            plain.request(&format!("GET {path}"), "alice", waits).await;
            upstream.next_request().await;
            plain.send("G").await.unwrap();
            if bytes > 0 {
                assert_eq!(plain.head().await.unwrap().status, 200);
                assert_eq!(patiently("the event", plain.chunk()).await.unwrap(), b"data: one\n\n");
            }
            let _left = leave(plain, how).await;
            is_cancelled(&proxy, &upstream, &path, bytes).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_nobody_takes_its_upload_cancels_its_request() {
    // An upstream that never accepts: the queue of its listener is full.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener: TcpListener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    while let Ok(waiting) =
        tokio::time::timeout(Duration::from_millis(500), TcpStream::connect(address)).await
    {
        queue.push(waiting.unwrap());
    }
    let proxy = ProxyBuilder::before_url(&format!("http://{address}")).upstream("connect_timeout = \"1h\"");
    let proxy = proxy.tier("alice", "").start().await;
    for (how, path) in Leave::OF_SOCKETS {
        let mut plain = Plain::connect(&proxy).await;
        plain.request(&format!("POST {path}"), "alice", "content-length: 100000\r\n").await;
        plain.send(vec![b'x'; 60_000]).await.unwrap();
        patiently("the request", async {
            while proxy.metric("tollgate_in_flight_requests").await != 1.0 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        let _left = leave(plain, how).await;
        let line = proxy.logs.request(path).await;
        assert_eq!(
            (&line["outcome"], &line["ending"]),
            (&"client_gone".into(), &"client gone".into()),
            "{line}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_reset_while_its_upload_stands_still_cancels_at_the_upstream() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).server("write_timeout = \"1h\"").tier("alice", "");
    let proxy = proxy.server("body_timeout = \"1h\"").start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/files", "alice", "content-length: 60000000\r\n").await;
    let mut link = wire.accept().await;
    link.head().await;
    // Nobody reads on at the upstream, so that at some time nobody takes anything any more.
    let brief = Duration::from_millis(500);
    while tokio::time::timeout(brief, plain.send(vec![b'x'; 16_384])).await.is_ok() {}
    plain.reset();
    let line = proxy.logs.request("/v1/files").await;
    assert_eq!((&line["outcome"], &line["ending"]), (&"client_gone".into(), &"client gone".into()), "{line}");
    link.ended().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_end_of_an_http2_client_cancels_its_requests() {
    let upstream = Upstream::start(|request| match request.target.rsplit('/').next() {
        Some("before") => Script::new().hang(),
        _ => Script::sse().event("one").hang(),
    })
    .await;
    let proxy = start(&upstream).await;
    for how in ["fin", "rst", "rst-stream"] {
        for (stands, bytes) in [("before", 0), ("amid", 11)] {
            let path = format!("/v1/{how}/{stands}");
            let mut raw = RawH2::to(&proxy, 65_535).await;
            raw.get(1, &path, "alice").await;
            upstream.next_request().await;
            if bytes > 0 {
                raw.frame_of(DATA, 1).await.expect("the event");
            }
            let left = match how {
                "fin" => {
                    drop(raw);
                    None
                }
                "rst" => {
                    raw.reset();
                    None
                }
                _ => {
                    raw.send(RST_STREAM, 0, 1, &8_u32.to_be_bytes()).await;
                    Some(raw)
                }
            };
            is_cancelled(&proxy, &upstream, &path, bytes).await;
            drop(left);
        }
    }
}
