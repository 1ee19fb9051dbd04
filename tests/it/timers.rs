//! A client that takes too long is cut off by the timer that is meant for it, and nobody else notices.

use reqwest::Response;
use tokio::{io::AsyncReadExt, net::TcpStream};

use crate::harness::{
    Gate, Proxy, ProxyBuilder, Script, Upstream, patiently,
    raw::{DATA, END_STREAM, GOAWAY, HEADERS, RST_STREAM, Raw, RawH2, WINDOW_UPDATE},
    rest_of,
};

/// More than the buffers of two connections hold.
const LARGE: usize = 64 * 1024 * 1024;

/// An upstream and a proxy on which only one timer can run out, and a bystander in the middle of a stream.
struct Scene {
    upstream: Upstream,
    proxy: Proxy,
    bystander: Response,
    gate: Gate,
}

impl Scene {
    async fn with_short(timer: &str) -> Self {
        let gate = Gate::default();
        let opens = gate.clone();
        let upstream = Upstream::start(move |request| match &*request.target {
            "/v1/slow" => Script::sse().event("one").wait(&opens).event("two").end(),
            "/v1/large" => {
                let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {LARGE}\r\n\r\n");
                Script::new().send(&head).send("x".repeat(LARGE))
            }
            _ => Script::json(200, "{}"),
        })
        .await;
        let timers = ["handshake_timeout", "header_timeout", "idle_timeout", "body_timeout", "write_timeout"];
        let lines =
            timers.map(|name| format!("{name} = \"{}\"\n", if name == timer { "300ms" } else { "1h" }));
        let proxy = ProxyBuilder::before(&upstream)
            .server(&lines.concat())
            .tier("alice", r#"{ requests = 1000, per = "1m" }"#)
            .start()
            .await;
        let client = proxy.client();
        let request = client.get(proxy.url("/v1/slow")).header("x-api-key", crate::harness::secret("alice"));
        let mut bystander = request.send().await.unwrap();
        assert_eq!(bystander.chunk().await.unwrap().unwrap(), "data: one\n\n");
        Self { upstream, proxy, bystander, gate }
    }

    /// Nothing happened to the bystander, and the timer that ran out was this one.
    async fn ends_well(mut self, reason: &str) {
        let series = format!("tollgate_connections_expired_total{{reason=\"{reason}\"}}");
        assert_eq!(self.proxy.metric(&series).await, 1.0);
        self.bystander_is_fine().await;
    }

    async fn bystander_is_fine(&mut self) {
        self.gate.open();
        assert_eq!(rest_of(&mut self.bystander).await.unwrap(), "data: two\n\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_shakes_hands_is_closed() {
    let mut scene = Scene::with_short("handshake_timeout").await;
    let mut silent = TcpStream::connect(scene.proxy.address).await.unwrap();
    let closed = patiently("the end of the silent connection", silent.read(&mut [0])).await;
    assert!(matches!(closed, Ok(0) | Err(_)));
    let series = "tollgate_connections_refused_total{reason=\"handshake_timeout\"}";
    assert_eq!(scene.proxy.metric(series).await, 1.0);
    scene.bystander_is_fine().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_never_shake_hands_hold_up_nobody() {
    const SILENT: usize = 300;
    let mut scene = Scene::with_short("no timer").await;
    let mut silent = Vec::new();
    for _ in 0..SILENT {
        silent.push(TcpStream::connect(scene.proxy.address).await.unwrap());
    }
    // Every worker has some of them, and accepts on.
    for _ in 0..20 {
        let answer = patiently("an answer", scene.proxy.chat(&scene.proxy.client(), "alice").send()).await;
        assert_eq!(answer.unwrap().status(), 200);
    }
    let refused =
        scene.proxy.metric("tollgate_connections_refused_total{reason=\"handshake_timeout\"}").await;
    assert_eq!(refused, 0.0, "they are still there");
    scene.bystander_is_fine().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_asks_nothing_is_closed() {
    let scene = Scene::with_short("header_timeout").await;
    let mut raw = Raw::to(&scene.proxy).await;
    assert_eq!(raw.rest().await, b"");
    scene.ends_well("slow_head").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_head_is_closed() {
    let scene = Scene::with_short("header_timeout").await;
    let mut raw = Raw::to(&scene.proxy).await;
    raw.send("GET /v1/models HTTP/1.1\r\nhost: loc").await;
    assert_eq!(raw.rest().await, b"");
    scene.ends_well("slow_head").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_trickles_is_closed_also_as_the_second_of_a_connection() {
    let scene = Scene::with_short("header_timeout").await;
    let mut raw = Raw::to(&scene.proxy).await;
    raw.get("/v1/models", "alice").await;
    assert_eq!(raw.answer().await.unwrap().status, 200);
    patiently("the end of a trickled head", async {
        // Each byte comes well within the timeout; only the whole is too slow.
        while raw.send("x").await {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    })
    .await;
    scene.ends_well("slow_head").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed_after_its_answer() {
    let scene = Scene::with_short("idle_timeout").await;
    let mut raw = Raw::to(&scene.proxy).await;
    raw.get("/v1/models", "alice").await;
    assert_eq!(raw.answer().await.unwrap().status, 200);
    assert_eq!(raw.rest().await, b"");
    scene.ends_well("idle").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_connection_without_a_stream_is_closed() {
    let scene = Scene::with_short("header_timeout").await;
    let mut raw = RawH2::to(&scene.proxy, 65_535).await;
    while raw.frame().await.is_some() {}
    scene.ends_well("slow_head").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_http2_connection_is_said_goodbye_to() {
    let scene = Scene::with_short("idle_timeout").await;
    let mut raw = RawH2::to(&scene.proxy, 65_535).await;
    raw.get(1, "/v1/models", "alice").await;
    raw.frame_of(HEADERS, 1).await.expect("an answer");
    raw.frame_of(GOAWAY, 0).await.expect("a goodbye");
    while raw.frame().await.is_some() {}
    scene.ends_well("idle").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_loses_its_answer_and_the_upstream_is_let_go() {
    let scene = Scene::with_short("write_timeout").await;
    let mut raw = Raw::to(&scene.proxy).await;
    raw.get("/v1/large", "alice").await;
    assert_eq!(scene.upstream.next_closed().await, 1);
    let line = scene.proxy.logged("/v1/large").await;
    assert_eq!((&line["outcome"], &line["ending"]), (&"client_stalled".into(), &"cut".into()));
    raw.head().await.expect("the head was sent");
    assert!(raw.rest().await.len() < LARGE, "what was not read in time is lost");
    scene.ends_well("write_stalled").await;
}

/// Its connection is read all the while, so this is about the window of the stream alone.
#[tokio::test(flavor = "multi_thread")]
async fn an_http2_stream_that_is_not_read_is_reset_and_the_others_of_its_connection_live() {
    let mut scene = Scene::with_short("write_timeout").await;
    let mut raw = RawH2::to(&scene.proxy, 0).await;
    raw.get(1, "/v1/slow", "alice").await;
    raw.send(WINDOW_UPDATE, 0, 1, &65_535_u32.to_be_bytes()).await;
    raw.frame_of(DATA, 1).await.expect("the first event");
    raw.get(3, "/v1/large", "alice").await;
    raw.frame_of(HEADERS, 3).await.expect("the head needs no window");
    let reset = raw.frame_of(RST_STREAM, 3).await.expect("the end of the stream that was not read");
    assert_eq!(reset.payload, 8_u32.to_be_bytes(), "CANCEL");
    assert_eq!(scene.upstream.next_closed().await, 2);
    let line = scene.proxy.logged("/v1/large").await;
    assert_eq!((&line["outcome"], &line["ending"]), (&"client_stalled".into(), &"cut".into()));
    scene.bystander_is_fine().await;
    loop {
        let frame = raw.frame_of(DATA, 1).await.expect("the other stream goes on");
        if frame.flags & END_STREAM != 0 {
            break;
        }
    }
}
