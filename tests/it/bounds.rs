//! Everything that a client can pile up has a bound.

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tokio::{io::AsyncReadExt, net::TcpStream};

use crate::harness::{
    Gate, Proxy, ProxyBuilder, Script, Upstream, patiently,
    raw::{DATA, END_STREAM, HEADERS, RST_STREAM, Raw, RawH2, SETTINGS},
    secret,
};

const LIMITS: &str = r#"{ requests = 1000, per = "1m" }"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_head_too_large_is_refused_on_both_protocols() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let many = |count: usize| (0..count).map(|n| (format!("x-field-{n}"), "x".to_owned())).collect();
    let none: Vec<(String, String)> = Vec::new();
    let cases = [
        ("a large field", "/v1/models".to_owned(), vec![("x-large".to_owned(), "x".repeat(66_000))], 431),
        ("too many fields", "/v1/models".to_owned(), many(256), 431),
        ("a long target", format!("/v1/{}", "x".repeat(8200)), none, 414),
        ("all in its bounds", format!("/v1/{}", "x".repeat(8100)), many(250), 200),
        (
            "a large field in its bounds",
            "/v1/m".to_owned(),
            vec![("x-large".to_owned(), "x".repeat(65_000))],
            200,
        ),
    ];
    let clients = [
        proxy.client_builder().http1_only().build().unwrap(),
        proxy.client_builder().http2_prior_knowledge().build().unwrap(),
    ];
    for client in clients {
        for (case, path, fields, expected) in &cases {
            let mut request = client.get(proxy.url(path)).header("x-api-key", secret("alice"));
            for (name, value) in fields {
                request = request.header(name, value);
            }
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), *expected, "{case}");
            if *expected != 200 {
                let body: serde_json::Value = answer.json().await.unwrap();
                assert_eq!(body["error"]["type"], "invalid_request_error", "{case}");
            }
        }
    }
    assert_eq!(upstream.received().len(), 4);
    let refused = proxy.logs.request("/v1/models").await;
    assert_eq!((&refused["status"], &refused["outcome"]), (&431.into(), &"unclean".into()));
    assert!(refused["reason"].as_str().unwrap().contains("65536 bytes"), "{refused}");
}

/// Nobody is told what a head far beyond the bound was, and nobody is kept waiting.
#[tokio::test(flavor = "multi_thread")]
async fn a_head_far_too_large_ends_its_connection_alone() {
    let upstream = Upstream::ok().await;
    let proxy =
        ProxyBuilder::before(&upstream).server("max_headers = 16").tier("alice", LIMITS).start().await;
    let mut raw = Raw::to(&proxy).await;
    raw.send("GET /v1/models HTTP/1.1\r\nhost: localhost\r\n").await;
    raw.send(format!("x-large: {}\r\n\r\n", "x".repeat(200_000))).await;
    if let Some(answer) = raw.head().await {
        assert_eq!(answer.status, 431);
    }
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(upstream.received().len(), 1);
}

async fn connections(proxy: &Proxy, expected: f64) {
    patiently("the number of connections", async {
        while proxy.metric("tollgate_connections").await != expected {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_connections_than_allowed_are_closed_at_once_and_room_comes_back() {
    for (bound, reason) in
        [("max_connections = 2", "too_many"), ("max_connections_per_ip = 2", "too_many_from_address")]
    {
        let upstream = Upstream::ok().await;
        let proxy = ProxyBuilder::before(&upstream).server(bound).tier("alice", LIMITS).start().await;
        let first = TcpStream::connect(proxy.address).await.unwrap();
        let _second = TcpStream::connect(proxy.address).await.unwrap();
        connections(&proxy, 2.0).await;
        let mut third = TcpStream::connect(proxy.address).await.unwrap();
        let closed = patiently("the end of the third", third.read(&mut [0])).await;
        assert!(matches!(closed, Ok(0) | Err(_)));
        let series = format!("tollgate_connections_refused_total{{reason=\"{reason}\"}}");
        assert_eq!(proxy.metric(&series).await, 1.0);
        drop(first);
        connections(&proxy, 1.0).await;
        let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_streams_than_allowed_are_refused_and_the_others_live() {
    let gate = Gate::default();
    let opens = gate.clone();
    let upstream = Upstream::start(move |_| Script::sse().event("one").wait(&opens).event("two").end()).await;
    let proxy = ProxyBuilder::before(&upstream).server("max_streams = 2").tier("alice", LIMITS).start().await;
    let mut raw = RawH2::to(&proxy, 65_535).await;
    let settings = raw.frame_of(SETTINGS, 0).await.unwrap();
    let max_concurrent_streams = [&[0, 3][..], &2_u32.to_be_bytes()].concat();
    assert!(settings.payload.chunks(6).any(|setting| setting == max_concurrent_streams));
    for stream in [1, 3] {
        raw.get(stream, "/v1/models", "alice").await;
        raw.frame_of(HEADERS, stream).await.expect("an answer");
    }
    raw.get(5, "/v1/models", "alice").await;
    let refused = raw.frame_of(RST_STREAM, 5).await.unwrap();
    assert_eq!(refused.payload, 7_u32.to_be_bytes(), "REFUSED_STREAM");
    gate.open();
    let mut ended = 0;
    while ended < 2 {
        let frame = raw.frame().await.expect("the other two live");
        assert_ne!(frame.kind, RST_STREAM);
        ended += usize::from(frame.kind == DATA && frame.flags & END_STREAM != 0);
    }
    assert_eq!(upstream.received().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_file_descriptors_streams_live_and_accepting_resumes() {
    let gate = Gate::default();
    let opens = gate.clone();
    let upstream = Upstream::start(move |_| Script::sse().event("one").wait(&opens).event("two").end()).await;
    let proxy = ProxyBuilder::before(&upstream).server("workers = 1").tier("alice", LIMITS).start().await;
    let mut raw = Raw::to(&proxy).await;
    raw.get("/v1/models", "alice").await;
    assert_eq!(raw.head().await.unwrap().status, 200);

    let pid = Pid::from_raw(proxy.pid().await as i32).unwrap();
    let highest = std::fs::read_dir(format!("/proc/{}/fd", proxy.pid().await))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse::<u64>().unwrap())
        .max()
        .unwrap();
    let before =
        prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(1), maximum: Some(highest + 100) });
    assert!(before.is_ok());
    let starved = std::time::Instant::now();
    let waiting = TcpStream::connect(proxy.address).await.unwrap();
    proxy
        .logs
        .wait_for("the want of descriptors", |line| {
            line["fields"]["message"] == "accepting failed; trying again"
        })
        .await;
    gate.open();
    let rest = patiently("the rest of the stream", async {
        let mut rest = String::new();
        while !rest.contains("data: two") {
            rest.push_str(&raw.line().await.expect("the stream lives"));
        }
        rest
    })
    .await;
    assert!(rest.contains("data: one"), "{rest}");
    // Nothing tells of the tries in between, which is what is counted below: so this waits for some of them.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;

    prlimit(
        Some(pid),
        Resource::Nofile,
        Rlimit { current: Some(highest + 100), maximum: Some(highest + 100) },
    )
    .unwrap();
    proxy
        .logs
        .wait_for("the end of the want", |line| line["fields"]["message"] == "accepting connections again")
        .await;
    drop(waiting);
    let pauses = starved.elapsed().as_millis() as f64 / 50.0;
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let failed = proxy.metric("tollgate_connections_refused_total{reason=\"accept_failed\"}").await;
    assert!(failed >= 1.0 && failed <= pauses + 1.0, "{failed} attempts in {pauses} pauses: it spins");
    let said = |line: &&serde_json::Value| line["fields"]["message"] == "accepting failed; trying again";
    assert_eq!(proxy.logs.all().iter().filter(said).count(), 1, "it is said once");
}
