//! WebSocket: a handshake is a request like any other, and what follows it is a tunnel that nobody looks into.

mod handshake;

use rustix::process::Signal;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::harness::{
    Answer, Link, Plain, Proxy, ProxyBuilder, Script, Upstream, Wire, close_and_drain, converse, patiently,
    secret,
};

const LIMITS: &str = r#"{ requests = 100, per = "1m" }"#;

const TARGET: &str = "/v1/realtime?model=m";

/// What every client sends, but for its credential.
const HANDSHAKE: &str = "host: localhost\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\
     sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

const ACCEPT: &str = "sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n";

/// Asks for a WebSocket with these further header lines, and reads the head of what comes.
async fn ask(proxy: &Proxy, target: &str, headers: &str) -> (Plain, Answer) {
    let mut client = Plain::connect(proxy).await;
    client.send(format!("GET {target} HTTP/1.1\r\n{HANDSHAKE}{headers}\r\n")).await.unwrap();
    let answer = client.head().await.unwrap();
    (client, answer)
}

fn key(id: &str) -> String {
    format!("authorization: Bearer {}\r\n", secret(id))
}

/// A proxy with one open tunnel.
struct Tunnel {
    wire: Wire,
    proxy: Proxy,
    client: Plain,
    server: Link,
}

impl Tunnel {
    async fn open(build: impl FnOnce(ProxyBuilder) -> ProxyBuilder) -> Self {
        let wire = Wire::listen().await;
        let proxy = build(ProxyBuilder::before_url(&wire.url()).tier("alice", LIMITS)).start().await;
        let (client, server) = tunnel(&proxy, &wire).await;
        Self { wire, proxy, client, server }
    }

    /// The log line of the tunnel, which has ended.
    async fn logged(&self) -> Value {
        self.proxy.logged("/v1/realtime").await
    }
}

/// Both ends of a new tunnel.
async fn tunnel(proxy: &Proxy, wire: &Wire) -> (Plain, Link) {
    let key = key("alice");
    let server = async {
        let mut link = wire.accept().await;
        link.head().await;
        link.send(format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n{ACCEPT}\r\n"
        ))
        .await;
        link
    };
    let ((client, answer), server) = tokio::join!(ask(proxy, TARGET, &key), server);
    assert_eq!(answer.status, 101);
    (client, server)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_passes_and_bytes_follow_both_ways() {
    let upstream = Upstream::start(|_| {
        Script::switch(&format!("{ACCEPT}sec-websocket-extensions: permessage-deflate\r\n")).echo()
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let offer = "sec-websocket-extensions: permessage-deflate; client_max_window_bits\r\norigin: https://app.example\r\n";
    let (mut client, answer) = ask(&proxy, TARGET, &format!("{offer}{}", key("alice"))).await;

    let request = upstream.next_request().await;
    assert_eq!((&*request.method, &*request.target), ("GET", TARGET));
    for (name, value) in [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("sec-websocket-extensions", "permessage-deflate; client_max_window_bits"),
        ("origin", "https://app.example"),
    ] {
        assert_eq!(request.header(name), Some(value), "{name}");
    }
    assert_eq!(answer.status, 101);
    for (name, value) in [
        ("connection", "Upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="),
        ("sec-websocket-extensions", "permessage-deflate"),
        ("x-ratelimit-limit", "100"),
        ("x-ratelimit-remaining", "99"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{name}");
    }
    assert_eq!((answer.header("content-length"), answer.header("transfer-encoding")), (None, None));
    assert!(answer.header("x-request-id").is_some());

    // What is inside is nobody's business, so anything passes.
    for frame in [&b"\x81\x02hi"[..], b"\x88\x00", b"GET / HTTP/1.1\r\n\r\n", b"\0\xff\r\n"] {
        client.send(frame).await.unwrap();
        assert_eq!(client.bytes(frame.len()).await.unwrap(), frame);
    }
    assert_eq!(proxy.metric("tollgate_in_flight_requests").await, 1.0);
    assert_eq!(proxy.metric("tollgate_connections").await, 1.0);
    client.close_one_way().await;
    assert_eq!(client.rest().await.unwrap(), b"");

    let line = proxy.logged("/v1/realtime").await;
    assert_eq!(
        (&line["status"], &line["outcome"], &line["ending"]),
        (&101.into(), &"answered".into(), &"complete".into())
    );
    assert_eq!((&line["bytes"], &line["received_bytes"]), (&28.into(), &28.into()), "{line}");
    assert_eq!(proxy.metric("tollgate_in_flight_requests").await, 0.0);

    proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(upstream.connections(), 2, "a connection that was a tunnel is never used again");
}

#[tokio::test(flavor = "multi_thread")]
async fn large_frames_pass_both_ways_at_once() {
    const LENGTH: usize = 10 * 1024 * 1024;
    let upstream = Upstream::start(|_| Script::switch(ACCEPT).echo()).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let (client, answer) = ask(&proxy, TARGET, &key("alice")).await;
    assert_eq!(answer.status, 101);
    let frame: Vec<u8> = (0..LENGTH as u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (mut read, mut write) = tokio::io::split(client.into_stream());
    let sent = frame.clone();
    let sends = tokio::spawn(async move {
        write.write_all(&sent).await.unwrap();
        write.flush().await.unwrap();
        write
    });
    let mut back = vec![0; LENGTH];
    patiently("the echo", read.read_exact(&mut back)).await.unwrap();
    assert!(back == frame, "every byte came back in its place");
    drop(sends.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn either_side_may_close_and_the_other_hears_of_it() {
    let Tunnel { proxy, client, mut server, .. } = Tunnel::open(|proxy| proxy).await;
    drop(client);
    assert_eq!(server.ended().await, b"");
    let line = proxy.logged("/v1/realtime").await;
    assert_eq!(line["status"], 101);

    let Tunnel { proxy, mut client, server, .. } = Tunnel::open(|proxy| proxy).await;
    drop(server);
    assert_eq!(client.rest().await.unwrap(), b"");
    let line = proxy.logged("/v1/realtime").await;
    assert_eq!((&line["ending"], &line["reason"]), (&"complete".into(), &"the upstream closed".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_heard_on_the_other_side_too() {
    let Tunnel { proxy, client, mut server, .. } = Tunnel::open(|proxy| proxy).await;
    client.reset();
    assert_eq!(server.ended().await, b"");
    assert_eq!(proxy.logged("/v1/realtime").await["outcome"], "client_gone");

    let Tunnel { proxy, mut client, server, .. } = Tunnel::open(|proxy| proxy).await;
    server.reset();
    let _ = client.rest().await;
    assert_eq!(proxy.logged("/v1/realtime").await["outcome"], "upstream_broke");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reset_is_heard_while_the_other_side_takes_nothing() {
    let Tunnel { proxy, mut client, mut server, .. } = Tunnel::open(|proxy| proxy).await;
    let brief = std::time::Duration::from_millis(500);
    while tokio::time::timeout(brief, client.send(vec![b'x'; 16_384])).await.is_ok() {}
    client.reset();
    assert_eq!(proxy.logged("/v1/realtime").await["outcome"], "client_gone");
    server.ended().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_said_everything_can_still_listen() {
    let Tunnel { proxy: _proxy, mut client, mut server, .. } = Tunnel::open(|proxy| proxy).await;
    client.send("question").await.unwrap();
    client.close_one_way().await;
    assert_eq!(server.ended().await, b"question");
    server.send("answer").await;
    drop(server);
    assert_eq!(client.rest().await.unwrap(), b"answer");

    let Tunnel { proxy: _proxy, mut client, mut server, .. } = Tunnel::open(|proxy| proxy).await;
    server.send("goodbye").await;
    server.close_one_way().await;
    assert_eq!(client.rest().await.unwrap(), b"goodbye");
    client.send("goodbye to you").await.unwrap();
    client.close_one_way().await;
    assert_eq!(server.ended().await, b"goodbye to you");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_still_sends_reads_the_goodbye_of_an_upstream_that_has_ended() {
    let Tunnel { proxy: _proxy, client, mut server, .. } = Tunnel::open(|proxy| proxy).await;
    let (mut read, mut write) = tokio::io::split(client.into_stream());
    let sends = tokio::spawn(async move { while write.write_all(&[7; 1000]).await.is_ok() {} });
    server.bytes(1000).await;
    let goodbye = vec![b'!'; 100_000];
    server.send(&goodbye).await;
    // It reads nothing more, but closing it would reset the connection and take back what it has said.
    server.close_one_way().await;
    let mut said = Vec::new();
    let _ = patiently("the goodbye", read.read_to_end(&mut said)).await;
    assert_eq!(said.len(), goodbye.len());
    sends.abort();
}

#[tokio::test(flavor = "multi_thread")]
async fn who_does_not_read_holds_up_the_sender_and_loses_nothing() {
    const LENGTH: usize = 64 * 1024 * 1024;
    let Tunnel { proxy: _proxy, client, server, .. } = Tunnel::open(|proxy| proxy).await;
    let (mut client, mut server) = (client.into_stream(), server.into_stream());
    let (progress, mut sent) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        while *progress.borrow() < LENGTH && server.write_all(&[1; 64 * 1024]).await.is_ok() {
            progress.send_modify(|sent| *sent += 64 * 1024);
        }
    });
    while tokio::time::timeout(std::time::Duration::from_secs(1), sent.changed()).await.is_ok() {}
    assert!(*sent.borrow() < LENGTH / 2, "only what sockets hold was taken: {}", *sent.borrow());
    let mut all = Vec::new();
    patiently("all that was held up", client.read_to_end(&mut all)).await.unwrap();
    assert_eq!(all.len(), LENGTH);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_reads_is_cut_off() {
    let mut tunnel = Tunnel::open(|proxy| proxy.server("write_timeout = \"500ms\"")).await;
    let mut server = std::mem::replace(&mut tunnel.server, idle_link(&tunnel.wire).await).into_stream();
    let cut = async { while server.write_all(&[1; 64 * 1024]).await.is_ok() {} };
    patiently("the end of the tunnel", cut).await;
    assert_eq!(tunnel.logged().await["outcome"], "client_stalled");
    drop(tunnel.client);
}

/// A connection that stands in for one that was moved away.
async fn idle_link(wire: &Wire) -> Link {
    let _ours = tokio::net::TcpStream::connect(wire.url().trim_start_matches("http://")).await.unwrap();
    wire.accept().await
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_on_both_sides_ends_a_tunnel_and_words_do_not() {
    let idle = "websocket_idle_timeout = \"2s\"";
    let mut tunnel = Tunnel::open(|proxy| proxy.upstream(idle)).await;
    for _ in 0..5 {
        tokio::time::sleep(std::time::Duration::from_millis(500)).await;
        tunnel.client.send("x").await.unwrap();
        assert_eq!(tunnel.server.bytes(1).await, b"x");
    }
    assert_eq!(tunnel.server.ended().await, b"");
    let _ = tunnel.client.rest().await;
    let line = tunnel.logged().await;
    assert_eq!((&line["ending"], &line["received_bytes"]), (&"idle".into(), &5.into()), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_of_http2_is_asked_in_http1() {
    let Tunnel { proxy: _proxy, mut client, mut server, .. } =
        Tunnel::open(|proxy| proxy.upstream("http2 = true")).await;
    client.send("hi").await.unwrap();
    assert_eq!(server.bytes(2).await, b"hi");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_deadline_of_http_touches_a_tunnel() {
    let mut tunnel = Tunnel::open(|proxy| {
        let [client, upstream] = [
            "idle_timeout = \"1s\"\nheader_timeout = \"1s\"\nbody_timeout = \"1s\"\nwrite_timeout = \"1s\"",
            "first_byte_timeout = \"10s\"\nidle_timeout = \"1s\"\npool_idle_timeout = \"1s\"",
        ];
        proxy.server(client).upstream(upstream)
    })
    .await;
    tokio::time::sleep(std::time::Duration::from_millis(2500)).await;
    tunnel.client.send("still").await.unwrap();
    assert_eq!(tunnel.server.bytes(5).await, b"still");
    tunnel.server.send("here").await;
    assert_eq!(tunnel.client.bytes(4).await.unwrap(), b"here");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_tunnels_go_on() {
    let Tunnel { proxy, mut client, mut server, .. } =
        Tunnel::open(|proxy| proxy.server("drain_timeout = \"1h\"")).await;
    proxy.signal(Signal::TERM).await;
    let draining =
        |line: &Value| line["fields"]["message"].as_str().is_some_and(|said| said.starts_with("draining"));
    proxy.logs.wait_for("the drain", draining).await;
    for _ in 0..3 {
        converse(&mut client, &mut server).await;
    }
    close_and_drain(proxy, client, server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_cuts_tunnels_and_says_nothing_in_them() {
    let Tunnel { proxy, mut client, mut server, .. } =
        Tunnel::open(|proxy| proxy.server("drain_timeout = \"300ms\"")).await;
    proxy.signal(Signal::TERM).await;
    assert_eq!(proxy.ended().await.code(), Some(3));
    assert_eq!(server.ended().await, b"");
    assert!(client.rest().await.is_err(), "it does not look like an orderly end");
    assert_eq!(proxy.logged("/v1/realtime").await["outcome"], "stopped");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_leaves_tunnels_alone() {
    let Tunnel { wire, proxy, mut client, mut server } = Tunnel::open(|proxy| proxy).await;
    proxy.write_config(
        &ProxyBuilder::before_url(&wire.url()).upstream("websocket = false").tier("alice", LIMITS),
    );
    proxy.signal(Signal::HUP).await;
    proxy.logs.wait_for("the reload", |line| line["fields"]["message"] == "reloaded").await;
    assert_eq!(ask(&proxy, TARGET, &key("alice")).await.1.status, 426);
    client.send("still").await.unwrap();
    assert_eq!(server.bytes(5).await, b"still");
    server.send("here").await;
    assert_eq!(client.bytes(4).await.unwrap(), b"here");
}
