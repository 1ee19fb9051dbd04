//! The end: what has begun is finished, nothing new begins, and the exit code says how it went.

use reqwest::{Client, Response};
use rustix::process::Signal;
use tokio::net::TcpStream;

use crate::harness::{
    Gate, Proxy, ProxyBuilder, Script, Upstream, patiently,
    raw::{GOAWAY, HEADERS, Raw, RawH2},
    rest_of, secret,
};

const LIMITS: &str = r#"{ requests = 1000, per = "1m" }"#;

/// A proxy with a stream that waits for the gate on each protocol.
struct Scene {
    _upstream: Upstream,
    proxy: Proxy,
    gate: Gate,
    streams: Vec<Response>,
}

impl Scene {
    async fn set(drain_timeout: &str) -> Self {
        let gate = Gate::default();
        let opens = gate.clone();
        let upstream = Upstream::start(move |request| match &*request.target {
            "/v1/slow" => Script::sse().event("one").wait(&opens).event("two").end(),
            "/v1/late" => Script::new().wait(&opens),
            _ => Script::json(200, "{}"),
        })
        .await;
        let proxy = ProxyBuilder::before(&upstream)
            .server(&format!("drain_timeout = \"{drain_timeout}\""))
            .tier("alice", LIMITS)
            .start()
            .await;
        let mut streams = Vec::new();
        for client in [proxy.client_builder().http1_only(), proxy.client_builder().http2_prior_knowledge()] {
            let mut stream = get(&client.build().unwrap(), &proxy, "/v1/slow").await.unwrap();
            assert_eq!(stream.chunk().await.unwrap().unwrap(), "data: one\n\n");
            streams.push(stream);
        }
        Self { _upstream: upstream, proxy, gate, streams }
    }

    async fn signalled(&self, signal: Signal) {
        self.proxy.signal(signal).await;
        let draining = |line: &serde_json::Value| {
            line["fields"]["message"].as_str().is_some_and(|said| said.starts_with("draining"))
        };
        self.proxy.logs.wait_for("the drain", draining).await;
        patiently("the end of accepting", async {
            while TcpStream::connect(self.proxy.address).await.is_ok() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Both streams were cut where their readers see it, and the log blames nobody. That of HTTP/1.1 was told why.
    async fn were_cut(mut self) {
        for (nth, stream) in self.streams.iter_mut().enumerate() {
            let mut told = String::new();
            while let Ok(piece) = patiently("the cut", stream.chunk()).await {
                let piece = piece.expect("a cut stream does not look like a whole one");
                told.push_str(str::from_utf8(&piece).unwrap());
            }
            assert_eq!(told.contains("The proxy is restarting"), nth == 0, "{told:?}");
        }
        let requests = self.proxy.logs.requests();
        assert_eq!(requests.len(), 2, "{requests:#?}");
        for line in requests {
            assert_eq!((&line["outcome"], &line["ending"]), (&"stopped".into(), &"cut".into()), "{line}");
        }
    }
}

async fn get(client: &Client, proxy: &Proxy, path: &str) -> reqwest::Result<Response> {
    client.get(proxy.url(path)).header("x-api-key", secret("alice")).send().await
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_finish_and_probes_tell_of_it() {
    for signal in [Signal::TERM, Signal::INT] {
        let mut scene = Scene::set("1h").await;
        assert_eq!(scene.proxy.admin("/readyz").await, (200, "ready\n".to_owned()));
        scene.signalled(signal).await;
        assert_eq!(scene.proxy.admin("/readyz").await, (503, "draining\n".to_owned()));
        assert_eq!(scene.proxy.admin("/livez").await.0, 200);
        scene.gate.open();
        for stream in &mut scene.streams {
            assert_eq!(rest_of(stream).await.unwrap(), "data: two\n\n");
        }
        assert_eq!(scene.proxy.ended().await.code(), Some(0));
        let endings: Vec<_> = scene.proxy.logs.requests().iter().map(|line| line["ending"].clone()).collect();
        assert_eq!(endings, ["complete", "complete"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_idle_or_has_not_begun_holds_nothing_up() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream)
        .server("header_timeout = \"1h\"\nidle_timeout = \"1h\"\nhandshake_timeout = \"1h\"")
        .tier("alice", LIMITS)
        .start()
        .await;
    let mut idle = Raw::to(&proxy).await;
    idle.get("/v1/models", "alice").await;
    assert_eq!(idle.answer().await.unwrap().status, 200);
    let mut silent = Raw::to(&proxy).await;
    let mut half = Raw::to(&proxy).await;
    half.send("GET /v1/models HTTP/1.1\r\nhost: loc").await;
    let mut idle_h2 = RawH2::to(&proxy, 65_535).await;
    idle_h2.get(1, "/v1/models", "alice").await;
    idle_h2.frame_of(HEADERS, 1).await.expect("an answer");
    let _unshaken = TcpStream::connect(proxy.address).await.unwrap();
    patiently("the connections", async {
        while proxy.metric("tollgate_connections").await != 5.0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    proxy.signal(Signal::TERM).await;
    assert_eq!(proxy.ended().await.code(), Some(0));
    assert_eq!((idle.rest().await, silent.rest().await, half.rest().await), (vec![], vec![], vec![]));
    idle_h2.frame_of(GOAWAY, 0).await.expect("a goodbye");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_under_way_is_finished() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let mut raw = Raw::to(&proxy).await;
    let key = secret("alice");
    let head = format!("POST /v1/x HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\ncontent-length: 4\r\n\r\nha");
    raw.send(head).await;
    patiently("the upload's beginning", async {
        while proxy.metric("tollgate_in_flight_requests").await != 1.0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    proxy.signal(Signal::TERM).await;
    raw.send("lf").await;
    let answer = raw.answer().await.expect("an answer");
    assert_eq!((answer.status, answer.whole), (200, true));
    assert_eq!(upstream.next_request().await.body, b"half");
    assert_eq!(raw.rest().await, b"");
    assert_eq!(proxy.ended().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_takes_too_long_is_cut_and_the_exit_code_says_so() {
    let scene = Scene::set("300ms").await;
    scene.signalled(Signal::TERM).await;
    assert_eq!(scene.proxy.ended().await.code(), Some(3));
    scene.were_cut().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_at_once() {
    for second in [Signal::TERM, Signal::INT] {
        let scene = Scene::set("1h").await;
        scene.signalled(Signal::TERM).await;
        scene.proxy.signal(second).await;
        assert_eq!(scene.proxy.ended().await.code(), Some(4));
        scene.were_cut().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_waits_for_its_upstream_is_cut_too() {
    let scene = Scene::set("1h").await;
    let (client, proxy) = (scene.proxy.client(), &scene.proxy);
    let waits = get(&client, proxy, "/v1/late");
    let ends = async {
        patiently("the request", async {
            while proxy.metric("tollgate_in_flight_requests").await != 3.0 {
                tokio::task::yield_now().await;
            }
        })
        .await;
        proxy.signal(Signal::TERM).await;
        proxy.signal(Signal::INT).await;
    };
    let (answer, ()) = tokio::join!(waits, ends);
    assert!(answer.is_err());
    assert_eq!(proxy.ended().await.code(), Some(4));
    let line = proxy.logged("/v1/late").await;
    assert_eq!((&line["outcome"], &line["status"]), (&"stopped".into(), &serde_json::Value::Null));
}
