//! How streams end: an upstream that breaks off is told of in the stream's own words where they fit, and never ends it
//! cleanly; one that is silent is waited for, with a sign of life.

use reqwest::{Client, Response};

use crate::harness::{
    Proxy, ProxyBuilder, Script, Upstream, Wire, clients, patiently,
    raw::{DATA, HEADERS, RST_STREAM, Raw, RawH2, WINDOW_UPDATE},
    secret,
};

/// A path of each API, what its error event begins with, and the sign of life of its streams.
const APIS: [(&str, &str, &str); 4] = [
    ("/v1/chat/completions", "data: {\"error\":{", ": k\n"),
    ("/v1/responses", "event: error\ndata: {\"code\":\"server_error\",\"error\":{", ": k\n"),
    (
        "/v1/messages",
        "event: error\ndata: {\"error\":{\"message\":",
        "event: ping\ndata: {\"type\": \"ping\"}\n\n",
    ),
    ("/v1beta/models/g:streamGenerateContent", "data: {\"error\":{\"code\":50", "\n\n"),
];

async fn get(proxy: &Proxy, client: &Client, path: &str, fields: &[(&str, &str)]) -> Response {
    let request = client.get(proxy.url(path)).bearer_auth(secret("alice"));
    let request = fields.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    patiently("a head", request.send()).await.unwrap()
}

/// All that came, and whether it ended cleanly.
async fn arrived(mut answer: Response) -> (String, bool) {
    let mut text = Vec::new();
    let clean = loop {
        match patiently("a piece", answer.chunk()).await {
            Ok(Some(piece)) => text.extend_from_slice(&piece),
            Ok(None) => break true,
            Err(_) => break false,
        }
    };
    (String::from_utf8(text).unwrap(), clean)
}

const STREAM: &str = "data: one\n\nid: 7\r\ndata: two\r\n\r\ndata: 3\n\n\n: c\n\ndata: [DONE]\n\n";

/// Whether the stream stands between two events after so many bytes.
fn is_between_events(bytes: usize) -> bool {
    let text = &STREAM[..bytes];
    bytes > 0 && (text.ends_with("\n\n") || text.ends_with("\r\n\r\n"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_cut_at_any_byte_never_ends_cleanly_and_says_so_between_events() {
    let upstream = Upstream::start(|request| {
        let cut_at: usize = request.header("x-cut-at").unwrap().parse().unwrap();
        let script = if cut_at == 0 { Script::sse() } else { Script::sse().chunk(&STREAM[..cut_at]) };
        script.close()
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        for (nth, cut_at) in (0..=STREAM.len()).enumerate() {
            let (path, event, _) = APIS[nth % APIS.len()];
            let answer = get(&proxy, &client, path, &[("x-cut-at", &cut_at.to_string())]).await;
            let (text, clean) = arrived(answer).await;
            assert!(!clean, "{protocol}, cut at {cut_at}: {text:?}");
            let said = text.strip_prefix(&STREAM[..cut_at]).expect("what came before arrives");
            if is_between_events(cut_at) {
                let end = if STREAM[..cut_at].ends_with("\r\n") { "\r\n" } else { "\n" };
                assert!(said.starts_with(&event.replace('\n', end)), "{protocol}, cut at {cut_at}: {said:?}");
                assert!(said.ends_with(&format!("}}{end}{end}")), "{said:?}");
            } else {
                assert_eq!(said, "", "{protocol}, cut at {cut_at}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_put_into_what_is_compressed_measured_or_no_event_stream() {
    let upstream = Upstream::start(|request| {
        let fields = match &*request.target {
            "/v1/gzip" => {
                "content-type: text/event-stream\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked"
            }
            "/v1/length" => "content-type: text/event-stream\r\ncontent-length: 100",
            "/v1/json" => "content-type: application/json\r\ntransfer-encoding: chunked",
            _ => "content-type: application/x-ndjson\r\ntransfer-encoding: chunked",
        };
        let script = Script::new().send(format!("HTTP/1.1 200 OK\r\n{fields}\r\n\r\n"));
        if request.target == "/v1/length" { script.send("{}\n\n") } else { script.chunk("{}\n\n") }.hang()
    })
    .await;
    let lines = "idle_timeout = \"700ms\"\nkeepalive = \"100ms\"";
    let proxy = ProxyBuilder::before(&upstream).upstream(lines).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        for path in ["/v1/gzip", "/v1/length", "/v1/json", "/v1/ndjson"] {
            let answer = get(&proxy, &client, path, &[]).await;
            assert_eq!(arrived(answer).await, ("{}\n\n".to_owned(), false), "{protocol} {path}");
        }
        let (text, clean) = arrived(get(&proxy, &client, "/api/chat", &[]).await).await;
        assert!(text.starts_with("{}\n\n{\"error\":\"") && text.ends_with("\"}\n"), "{text:?}");
        assert!(!clean);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_stream_is_kept_alive_between_its_events_until_its_upstream_has_been_silent_for_too_long() {
    let upstream = Upstream::start(|request| match request.header("x-stands").unwrap() {
        "before" => Script::sse().hang(),
        "between" => Script::sse().event("one").hang(),
        _ => Script::sse().event("one").chunk("data: tw").hang(),
    })
    .await;
    let lines = "idle_timeout = \"1500ms\"\nkeepalive = \"100ms\"";
    let proxy = ProxyBuilder::before(&upstream).upstream(lines).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        for (path, event, sign_of_life) in APIS {
            let case = format!("{protocol} {path}");
            let before = arrived(get(&proxy, &client, path, &[("x-stands", "before")]).await);
            let between = arrived(get(&proxy, &client, path, &[("x-stands", "between")]).await);
            let inside = arrived(get(&proxy, &client, path, &[("x-stands", "inside")]).await);
            let (before, between, inside) = tokio::join!(before, between, inside);

            let count = before.0.matches(sign_of_life).count();
            assert!(count >= 2, "{case}: {before:?}");
            assert_eq!(
                before,
                (sign_of_life.repeat(count), false),
                "{case}: nothing else before the first byte"
            );

            let (signs, words) = between.0.split_at(between.0.find(event).expect(&case));
            let signs = signs.strip_prefix("data: one\n\n").unwrap();
            let count = signs.matches(sign_of_life).count();
            assert!(count >= 2 && signs == sign_of_life.repeat(count), "{case}: {signs:?}");
            assert!(words.ends_with("}\n\n") && !between.1, "{case}: {words:?}");

            assert_eq!(inside, ("data: one\n\ndata: tw".to_owned(), false), "{case}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_not_kept_alive_unless_that_is_wanted() {
    let upstream = Upstream::start(|_| Script::sse().event("one").hang()).await;
    let proxy = ProxyBuilder::before(&upstream).upstream("idle_timeout = \"700ms\"").tier("alice", "");
    let proxy = proxy.start().await;
    let (text, _) = arrived(get(&proxy, &proxy.client(), "/v1/messages", &[]).await).await;
    assert!(text.starts_with("data: one\n\nevent: error\n"), "{text:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_may_last_as_long_as_it_goes_on() {
    const EVENTS: usize = 12;
    let wire = Wire::listen().await;
    let lines = "first_byte_timeout = \"1s\"\nidle_timeout = \"1s\"";
    let proxy = ProxyBuilder::before_url(&wire.url()).upstream(lines).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        let reads = async { arrived(get(&proxy, &client, "/v1/responses", &[]).await).await };
        let goes_on = async {
            let mut link = wire.accept().await;
            link.head().await;
            link.send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 132\r\n\r\n")
                .await;
            for _ in 0..EVENTS {
                tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                link.send("data: one\n\n").await;
            }
        };
        let (whole, ()) = tokio::join!(reads, goes_on);
        assert_eq!(whole, ("data: one\n\n".repeat(EVENTS), true), "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exchange_has_its_time_if_that_is_wanted_however_lively_it_is() {
    let wire = Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&wire.url()).upstream("total_timeout = \"700ms\"").tier("alice", "");
    let proxy = proxy.start().await;
    for (protocol, client) in clients(&proxy) {
        let waits = async {
            let answer = get(&proxy, &client, "/v1/messages", &[]).await;
            assert_eq!(answer.status(), 504, "{protocol}");
            assert!(answer.text().await.unwrap().contains("\"api_error\""));
        };
        let says_nothing = async {
            let mut link = wire.accept().await;
            link.head().await;
            link.ended().await;
        };
        tokio::join!(waits, says_nothing);

        let reads = async { arrived(get(&proxy, &client, "/v1/responses", &[]).await).await };
        let goes_on = async {
            let mut link = wire.accept().await;
            link.head().await;
            link.send(
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
            )
            .await;
            while link.try_send("b\r\ndata: one\n\n\r\n").await {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        let ((text, clean), ()) = tokio::join!(reads, patiently("the end", goes_on));
        let events = text.trim_start_matches("data: one\n\n");
        assert!(events.starts_with("event: error\n") && events.ends_with("}\n\n") && !clean, "{events:?}");
        let line = proxy.logs.request("/v1/responses").await;
        assert_eq!((&line["outcome"], &line["ending"]), (&"upstream_timeout".into(), &"broken".into()));
    }
    let line = proxy.logs.request("/v1/messages").await;
    assert_eq!((&line["outcome"], &line["status"]), (&"upstream_timeout".into(), &504.into()));
}

/// More than the buffers of two connections hold.
const MANY: usize = 2_000_000;

#[tokio::test(flavor = "multi_thread")]
async fn the_last_words_reach_a_client_that_reads_slowly() {
    let upstream = Upstream::start(|_| Script::sse().chunk(&"data: one\n\n".repeat(MANY)).close()).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let mut raw = Raw::to(&proxy).await;
    raw.get("/v1/messages", "alice").await;
    raw.head().await.expect("a head");
    // The upstream is let go when it has been read to its break, which nobody waits for here: reading comes late enough.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let rest = raw.rest().await;
    let shown = String::from_utf8_lossy(&rest[rest.len().saturating_sub(300)..]).into_owned();
    assert!(rest.len() > 11 * MANY && shown.contains("event: error\ndata: {"), "{shown}");
    assert!(!shown.ends_with("0\r\n\r\n"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_words_wait_for_the_window_of_an_http2_stream() {
    let events = "data: one\n\n".repeat(10);
    let sent = events.clone();
    let upstream = Upstream::start(move |_| Script::sse().chunk(&sent).close()).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    for window in [0, 1, 109, 110, 111, 200] {
        let mut raw = RawH2::to(&proxy, window).await;
        raw.get(1, "/v1/messages", "alice").await;
        raw.frame_of(HEADERS, 1).await.expect("a head");
        let mut text = Vec::new();
        let reset = loop {
            // Room for a few bytes at a time, and only when all that there was room for has come.
            if text.len() >= window as usize {
                raw.send(WINDOW_UPDATE, 0, 1, &7_u32.to_be_bytes()).await;
            }
            let frame = raw.frame().await.expect("the connection lives");
            match frame.kind {
                DATA => text.extend_from_slice(&frame.payload),
                RST_STREAM => break frame,
                _ => {}
            }
        };
        let text = String::from_utf8(text).unwrap();
        let words = text.strip_prefix(&events).expect("all that came before");
        assert!(words.starts_with("event: error\n") && words.ends_with("}\n\n"), "{window}: {words:?}");
        assert_eq!(reset.payload, 2_u32.to_be_bytes(), "INTERNAL_ERROR");
    }
}
