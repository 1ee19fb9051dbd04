//! Request bodies pass as they come, within bounds, and an early answer is one that the client gets to read.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame};
use reqwest::StatusCode;
use tokio::sync::mpsc;

use crate::harness::{Plain, Proxy, ProxyBuilder, Upstream, Wire, clients, patiently, secret};

const LIMITS: &str = r#"{ requests = 50, per = "1h" }"#;

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|n| ((n * n) >> 5) as u8).collect()
}

/// A body whose pieces the test hands out one by one.
struct Pieces(mpsc::UnboundedReceiver<&'static str>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|piece| piece.map(|piece| Ok(Frame::data(Bytes::from(piece)))))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_piece_of_a_body_arrives_before_the_next_is_sent() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        let (pieces, body) = mpsc::unbounded_channel();
        let request = client.post(proxy.url("/v1/files")).bearer_auth(secret("alice"));
        let answer = tokio::spawn(request.body(reqwest::Body::wrap(Pieces(body))).send());
        pieces.send("first").unwrap();
        let mut link = wire.accept().await;
        assert_eq!(link.head().await.header("transfer-encoding"), Some("chunked"), "{protocol}");
        assert_eq!(link.chunk().await, b"first", "{protocol}");
        pieces.send("second").unwrap();
        assert_eq!(link.chunk().await, b"second", "{protocol}");
        drop(pieces);
        assert_eq!(link.chunk().await, b"");
        link.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(patiently("the answer", answer).await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_declared_length_is_kept_while_the_body_streams() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/files", "alice", "content-length: 10\r\n").await;
    plain.send("12345").await.unwrap();
    let mut link = wire.accept().await;
    let head = link.head().await;
    assert_eq!(head.header("content-length"), Some("10"));
    assert_eq!(head.header("transfer-encoding"), None);
    assert_eq!(link.bytes(5).await, b"12345");
    plain.send("67890").await.unwrap();
    assert_eq!(link.bytes(5).await, b"67890");
    link.ok().await;
    assert_eq!(plain.answer().await.unwrap().body, b"{}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_begins_during_the_upload_streams_beside_it() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/audio", "alice", "content-length: 10\r\n").await;
    plain.send("12345").await.unwrap();
    let mut link = wire.accept().await;
    link.head().await;
    link.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{").await;
    assert_eq!(plain.head().await.unwrap().status, 200);
    plain.send("67890").await.unwrap();
    assert_eq!(link.bytes(10).await, b"1234567890");
    link.send("}").await;
    let line = proxy.logs.request("/v1/audio").await;
    assert_eq!((&line["ending"], &line["bytes"]), (&"complete".into(), &2.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_any_size_and_kind_arrive_untouched() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let multipart =
        b"--xyz\r\ncontent-disposition: form-data; name=\"file\"\r\n\r\n\0\xff\xfe\r\n--xyz--\r\n";
    for (protocol, client) in clients(&proxy) {
        for (body, kind) in [
            (pattern(20_000_000), "application/octet-stream"),
            (multipart.to_vec(), "multipart/form-data; boundary=xyz"),
            (vec![0, 255, 13, 10, 13, 10], "audio/wav"),
            (Vec::new(), "application/json"),
        ] {
            let request = client.post(proxy.url("/v1/files")).bearer_auth(secret("alice"));
            let request = request.header("content-type", kind).header("content-encoding", "zstd");
            assert_eq!(request.body(body.clone()).send().await.unwrap().status(), 200, "{protocol} {kind}");
            let received = upstream.next_request().await;
            assert!(received.body == body, "{protocol} {kind}: {} bytes came", received.body.len());
            assert_eq!(
                received.header("content-length"),
                Some(&*body.len().to_string()),
                "{protocol} {kind}"
            );
            assert_eq!(received.header("content-type"), Some(kind));
            assert_eq!(received.header("content-encoding"), Some("zstd"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_post_without_a_body_says_so_and_a_get_says_nothing() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        for (line, length) in [("POST", Some("0")), ("GET", None), ("DELETE", None)] {
            let request = client.request(line.parse().unwrap(), proxy.url("/v1/batches/b/cancel"));
            assert_eq!(request.bearer_auth(secret("alice")).send().await.unwrap().status(), 200);
            let received = upstream.next_request().await;
            assert_eq!(received.method, line);
            assert_eq!(received.header("content-length"), length, "{protocol} {line}");
            assert_eq!(received.header("transfer-encoding"), None, "{protocol} {line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_asked_for_only_after_admission() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", r#"{ requests = 1, per = "1h" }"#);
    let proxy = proxy.start().await;
    let expect = "content-length: 5\r\nexpect: 100-continue\r\n";

    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/files", "alice", expect).await;
    assert_eq!(plain.head().await.unwrap().status, 100);
    plain.send("hello").await.unwrap();
    let mut link = wire.accept().await;
    let received = link.request().await;
    assert_eq!((received.header("expect"), &*received.body), (None, &b"hello"[..]));
    link.ok().await;
    assert_eq!(plain.answer().await.unwrap().status, 200);

    for (id, status) in [("alice", 429), ("nobody", 401)] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request("POST /v1/files", id, expect).await;
        assert_eq!(plain.answer().await.unwrap().status, status, "at once, and no 100 before");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_bound_is_answered_413_and_the_client_reads_it() {
    let wire = Wire::listen().await;
    let proxy =
        ProxyBuilder::before_url(&wire.url()).server("max_body_size = \"1MiB\"").tier("alice", LIMITS);
    let proxy = proxy.start().await;
    let body = pattern(8_000_000);

    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/messages", "alice", "content-length: 8000000\r\n").await;
    plain.send(&body).await.unwrap();
    let answer = plain.answer().await.unwrap();
    assert_eq!(answer.status, 413);
    assert_eq!(answer.json()["error"]["type"], "request_too_large");
    assert_eq!(
        answer.header("x-ratelimit-remaining"),
        None,
        "its length alone condemned it, so nothing was charged"
    );

    for expect in ["", "expect: 100-continue\r\n"] {
        let mut plain = Plain::connect(&proxy).await;
        plain.request("POST /v1/messages", "alice", &format!("transfer-encoding: chunked\r\n{expect}")).await;
        if !expect.is_empty() {
            assert_eq!(plain.head().await.unwrap().status, 100);
        }
        let mut link = wire.accept().await;
        let upstream = tokio::spawn(async move { link.ended().await });
        for piece in body.chunks(100_000) {
            plain.send(format!("{:x}\r\n", piece.len())).await.unwrap();
            plain.send(piece).await.unwrap();
            plain.send("\r\n").await.unwrap();
        }
        plain.send("0\r\n\r\n").await.unwrap();
        let answer = plain.answer().await.unwrap();
        assert_eq!(answer.status, 413);
        assert_eq!(answer.json()["error"]["type"], "request_too_large");
        assert!(answer.json()["error"]["message"].as_str().unwrap().contains("larger than 1MiB"));
        let seen = patiently("the end at the upstream", upstream).await.unwrap();
        assert!(!seen.ends_with(b"0\r\n\r\n"), "a cut body never looks complete to the upstream");
    }
    for (protocol, client) in clients(&proxy) {
        let request = client.post(proxy.url("/v1/files")).bearer_auth(secret("alice"));
        let answer = request.body(body.clone()).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE, "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_have_a_bound_of_their_own_and_upstreams_theirs() {
    let upstream = Upstream::ok().await;
    let sizes = "max_body_size = \"1KiB\"\nmax_file_size = \"1MiB\"";
    let of_own = format!(
        "[[upstreams]]\nname = \"own\"\nurl = \"{}\"\npaths = [\"/own\"]\nmax_body_size = \"3KiB\"\nmax_file_size = 0",
        upstream.url()
    );
    let proxy = ProxyBuilder::before(&upstream).upstream("paths = [\"/v1\"]").server(sizes).section(&of_own);
    let proxy = proxy.tier("alice", "").start().await;
    let multipart = "multipart/form-data; boundary=xyz";
    for (protocol, client) in clients(&proxy) {
        for (path, kind, size, status) in [
            ("/v1/x", "application/json", 1024, 200),
            ("/v1/x", "application/json", 1025, 413),
            ("/v1/x", "text/plain", 1025, 413),
            ("/v1/x", multipart, 1_000_000, 200),
            ("/v1/x", "audio/wav", 1_000_000, 200),
            ("/v1/x", "application/octet-stream", 1_100_000, 413),
            ("/own/x", "application/json", 3072, 200),
            ("/own/x", "application/json", 3073, 413),
            ("/own/x", "audio/wav", 2_000_000, 200),
        ] {
            let request =
                client.post(proxy.url(path)).bearer_auth(secret("alice")).header("content-type", kind);
            let answer = patiently("an answer", request.body(pattern(size)).send()).await.unwrap();
            assert_eq!(answer.status(), status, "{protocol} {path} {kind} {size}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trailer_of_a_request_stays_behind() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    let headers = "transfer-encoding: chunked\r\ntrailer: x-late\r\nte: trailers\r\n";
    plain.request("POST /v1/x", "alice", headers).await;
    plain.send("2\r\n{}\r\n0\r\nx-late: 1\r\n\r\n").await.unwrap();
    let mut link = wire.accept().await;
    let head = link.head().await;
    assert_eq!((head.header("trailer"), head.header("x-late")), (None, None));
    assert_eq!(link.bytes(12).await, b"2\r\n{}\r\n0\r\n\r\n", "the body, its end, and nothing between");
    link.ok().await;
    assert_eq!(plain.answer().await.unwrap().status, 200);
}

/// Measured on a 2-core virtual machine: 17 MB at the start, at most 51 MB during 3 GB.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_large_uploads_to_a_slow_upstream_take_little_memory() {
    const UPLOADS: usize = 100;
    const SIZE: usize = 30_000_000;
    const MOST: usize = 256 << 20;
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let before = proxy.resident_bytes().await;
    let piece: &'static [u8] = pattern(1_000_000).leak();
    let mut uploads = tokio::task::JoinSet::new();
    let sent = Arc::new(AtomicUsize::new(0));
    let mut links = Vec::new();
    for _ in 0..UPLOADS {
        let mut plain = Plain::connect(&proxy).await;
        let kind = format!("content-type: application/json\r\ncontent-length: {SIZE}\r\n");
        plain.request("POST /v1/files", "alice", &kind).await;
        let mut link = wire.accept().await;
        link.head().await;
        links.push(link);
        let sent = sent.clone();
        uploads.spawn(async move {
            for _ in 0..SIZE / piece.len() {
                plain.send(piece).await.unwrap();
                sent.fetch_add(1, Ordering::Relaxed);
            }
            plain.answer().await.unwrap().status
        });
    }
    // The upstream reads nothing, so that everything in between fills up until no client gets on.
    let mut last = usize::MAX;
    while last != sent.load(Ordering::Relaxed) {
        last = sent.load(Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(last < UPLOADS * SIZE / piece.len(), "nobody is through");
    let mut most = proxy.resident_bytes().await;
    for link in &mut links {
        // One by one, so that all the others wait.
        assert!(link.bytes(SIZE).await.chunks(piece.len()).all(|came| came == piece), "the body is whole");
        most = most.max(proxy.resident_bytes().await);
        link.ok().await;
    }
    while let Some(status) = patiently("the end of an upload", uploads.join_next()).await {
        assert_eq!(status.unwrap(), 200);
    }
    println!("{before} bytes before, at most {most} during {UPLOADS} uploads of {SIZE} bytes");
    assert!(most < before + MOST, "{before} bytes grew to {most}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_stalls_is_answered_408() {
    let wire = Wire::listen().await;
    let proxy =
        ProxyBuilder::before_url(&wire.url()).server("body_timeout = \"500ms\"").tier("alice", LIMITS);
    let proxy = proxy.start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/messages", "alice", "content-length: 10\r\n").await;
    plain.send("12345").await.unwrap();
    let answer = plain.answer().await.unwrap();
    assert_eq!(answer.status, 408);
    assert_eq!(answer.json()["type"], "error");
    let mut link = wire.accept().await;
    assert!(link.ended().await.ends_with(b"12345"));
    let line = proxy.logs.request("/v1/messages").await;
    assert_eq!((&line["outcome"], &line["status"]), (&"upload_failed".into(), &408.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_in_a_broken_framing_is_answered_400_and_never_looks_whole() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/messages", "alice", "transfer-encoding: chunked\r\n").await;
    plain.send("2\r\n{}\r\nzz\r\n").await.unwrap();
    let mut link = wire.accept().await;
    link.head().await;
    assert_eq!(link.ended().await, b"2\r\n{}\r\n");
    let answer = plain.answer().await.unwrap();
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (400, &"invalid_request_error".into()));
    let line = proxy.logs.request("/v1/messages").await;
    assert_eq!((&line["outcome"], &line["ending"]), (&"upload_failed".into(), &"complete".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_client_is_not_mistaken_for_a_slow_upstream() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).server("body_timeout = \"2s\"");
    let proxy = proxy.upstream("first_byte_timeout = \"250ms\"").tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/messages", "alice", "content-length: 10\r\n").await;
    plain.send("12345").await.unwrap();
    assert_eq!(plain.answer().await.unwrap().status, 408, "the time of the upstream had not begun");
}

async fn reads_the_early_answer(proxy: &Proxy, id: &str, status: u16) {
    let body = pattern(3_000_000);
    for (protocol, client) in clients(proxy) {
        let request = client.post(proxy.url("/v1/messages")).bearer_auth(secret(id)).body(body.clone());
        let answer = request.send().await.unwrap_or_else(|error| panic!("{protocol}, {status}: {error:?}"));
        assert_eq!(answer.status(), status, "{protocol}");
        assert!(answer.text().await.unwrap().contains("\"error\""));
    }
    // This client sees the answer only after its last byte, as simple ones do.
    let mut plain = Plain::connect(proxy).await;
    plain.request("POST /v1/messages", id, "content-length: 3000000\r\n").await;
    for piece in body.chunks(50_000) {
        plain.send(piece).await.unwrap();
    }
    assert_eq!(plain.answer().await.unwrap().status, status);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_early_refusal_is_read_by_a_client_that_still_sends() {
    let upstream = Upstream::ok().await;
    let proxy =
        ProxyBuilder::before(&upstream).tier("alice", r#"{ requests = 1, per = "1h" }"#).start().await;
    assert_eq!(proxy.chat(&proxy.client(), "alice").send().await.unwrap().status(), 200);
    reads_the_early_answer(&proxy, "alice", 429).await;
    reads_the_early_answer(&proxy, "nobody", 401).await;
    assert_eq!(upstream.received().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_early_answer_reaches_a_client_that_still_sends() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).tier("alice", "").start().await;
    let body = pattern(3_000_000);
    for (protocol, client) in clients(&proxy) {
        let request = client.post(proxy.url("/v1/files")).bearer_auth(secret("alice")).body(body.clone());
        let answer = tokio::spawn(request.send());
        let mut link = wire.accept().await;
        link.head().await;
        link.send("HTTP/1.1 400 No\r\nconnection: close\r\ncontent-length: 4\r\n\r\nlong").await;
        // It closes with the upload unread, as servers do that have seen enough.
        drop(link);
        let answer = patiently("the answer", answer).await.unwrap();
        let answer = answer.unwrap_or_else(|error| panic!("{protocol}: {error:?}"));
        assert_eq!((answer.status(), &*answer.text().await.unwrap()), (StatusCode::BAD_REQUEST, "long"));
    }
}

/// As large as people's files are, and as many as people send at a time.
#[tokio::test(flavor = "multi_thread")]
async fn early_refusals_of_large_uploads_are_read_by_all() {
    const LARGE: usize = 20_000_000;
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream)
        .server("max_body_size = \"10MiB\"")
        .tier("alice", r#"{ requests = 1, per = "1h" }"#)
        .tier("bob", "");
    let proxy = proxy.start().await;
    assert_eq!(proxy.chat(&proxy.client(), "alice").send().await.unwrap().status(), 200);
    let body = Bytes::from(pattern(LARGE));
    for (id, size, status) in [("nobody", LARGE, 401), ("bob", LARGE, 413), ("alice", 10_000_000, 429)] {
        for protocol in ["HTTP/1.1", "HTTP/2"] {
            let posts: Vec<_> = (0..20)
                .map(|_| {
                    let builder = proxy.client_builder();
                    let builder = if protocol == "HTTP/1.1" { builder.http1_only() } else { builder };
                    let request =
                        builder.build().unwrap().post(proxy.url("/v1/files")).bearer_auth(secret(id));
                    tokio::spawn(request.body(body.slice(..size)).send())
                })
                .collect();
            for post in posts {
                let answer = patiently("an answer", post).await.unwrap();
                let answer = answer.unwrap_or_else(|error| panic!("{protocol}, {status}: {error:?}"));
                assert_eq!(answer.status(), status, "{protocol}");
                assert!(answer.text().await.unwrap().contains("\"error\""), "{protocol}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_client_that_never_closes_does_not_keep_its_place() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("POST /v1/files", "nobody", "content-length: 20000000\r\n").await;
    plain.send(pattern(100_000)).await.unwrap();
    assert_eq!(plain.answer().await.unwrap().status, 401);
    patiently("the end of the connection", async {
        while proxy.metric("tollgate_connections").await != 0.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
}
