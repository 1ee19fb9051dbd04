//! What the operator sees: one line and one count for each request, however it ends, and labels that nobody can multiply.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::harness::{
    Gate, Proxy, ProxyBuilder, Script, Upstream, pasted, patiently,
    raw::{Raw, RawH2},
    secret,
};

const LIMITS: &str = r#"{ requests = 6, per = "1h" }, { requests = 1000, per = "1d" }"#;

/// An upstream with an answer of each kind, by path.
async fn upstream(gate: &Gate) -> Upstream {
    let opens = gate.clone();
    Upstream::start(move |request| match &*request.target {
        "/v1/stream" => Script::sse().event("one").event("two").end(),
        "/v1/hang" => Script::sse().event("one").wait(&opens),
        "/v1/never" => Script::new().hang(),
        "/v1/broken" => Script::sse().chunk("data: on").close(),
        "/v1/garbage" => Script::new().send("what?\r\n\r\n").close(),
        _ => Script::new().send(
            "HTTP/1.1 200 OK\r\nx-request-id: theirs\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
        ),
    })
    .await
}

/// Asks for a path and reads the answer as far as it comes.
async fn asked(proxy: &Proxy, path: &str, id: &str) -> u16 {
    let request = proxy.client().get(proxy.url(path)).header("x-api-key", secret(id));
    let answer = request.header("x-request-id", "req-1").send().await.unwrap();
    let status = answer.status().as_u16();
    let _ = answer.bytes().await;
    status
}

/// Whether these fields have these values.
fn says(line: &Value, fields: &Value) {
    for (name, value) in fields.as_object().unwrap() {
        assert_eq!(line.get(name).unwrap_or(&Value::Null), value, "{name} of {line}");
    }
    for name in ["duration_ms", "bytes", "client", "request_id", "method"] {
        assert!(!line[name].is_null(), "{name} of {line}");
    }
    assert_eq!(line["first_byte_ms"].is_null(), line["status"].is_null(), "{line}");
}

/// A proxy before this upstream, and before another that is not there.
fn before(upstream: &Upstream) -> ProxyBuilder {
    ProxyBuilder::before(upstream)
        .upstream("paths = [\"/v1\"]")
        .tier("alice", LIMITS)
        .section("[[upstreams]]\nname = \"dead\"\nurl = \"http://127.0.0.1:1\"\npaths = [\"/dead\"]")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_has_a_line_that_tells_all_of_it_and_how_it_ended() {
    let upstream = upstream(&Gate::default()).await;
    let proxy = before(&upstream).start().await;

    assert_eq!(asked(&proxy, "/v1/models?key=nobodys&secret=query", "alice").await, 200);
    says(
        &proxy.logged("/v1/models").await,
        &serde_json::json!({
            "request_id": "req-1", "client": "127.0.0.1", "key": "alice", "tier": "alice", "route": "llm",
            "method": "GET", "upstream_request_id": "theirs", "status": 200, "outcome": "answered",
            "decision": "admitted", "remaining": 5, "bytes": 2, "ending": "complete", "reason": null,
        }),
    );
    assert_eq!(asked(&proxy, "/v1/stream", "alice").await, 200);
    says(
        &proxy.logged("/v1/stream").await,
        &serde_json::json!({ "status": 200, "bytes": 22, "remaining": 4, "ending": "complete" }),
    );
    assert_eq!(asked(&proxy, "/v1/broken", "alice").await, 200);
    let line = proxy.logged("/v1/broken").await;
    says(
        &line,
        &serde_json::json!({ "status": 200, "outcome": "upstream_broke", "ending": "broken", "bytes": 8 }),
    );
    assert!(line["reason"].as_str().unwrap().starts_with("the upstream broke off"), "{line}");
    assert_eq!(asked(&proxy, "/v1/garbage", "alice").await, 502);
    let line = proxy.logged("/v1/garbage").await;
    says(&line, &serde_json::json!({ "status": 502, "outcome": "upstream_failed", "remaining": 2 }));
    assert!(line["reason"].is_string(), "{line}");
    assert_eq!(asked(&proxy, "/dead", "alice").await, 502);
    let line = proxy.logged("/dead").await;
    says(
        &line,
        &serde_json::json!({ "status": 502, "route": "dead", "decision": "admitted", "remaining": 1 }),
    );
    assert!(line["reason"].as_str().unwrap().contains("refused"), "{line}");

    assert_eq!(proxy.logs.requests().len(), 5, "one line each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_has_a_line_that_tells_why() {
    let upstream = upstream(&Gate::default()).await;
    let proxy = before(&upstream).start().await;
    assert_eq!(asked(&proxy, "/v1/stranger", "mallory").await, 401);
    says(
        &proxy.logged("/v1/stranger").await,
        &serde_json::json!({
            "status": 401, "key": null, "tier": null, "route": null, "decision": "none", "remaining": null,
            "outcome": "unauthorized", "ending": "complete",
        }),
    );
    assert_eq!(asked(&proxy, "/nowhere", "alice").await, 404);
    says(
        &proxy.logged("/nowhere").await,
        &serde_json::json!({ "status": 404, "key": "alice", "route": null, "outcome": "no_route", "decision": "none" }),
    );
    for _ in 0..6 {
        assert_eq!(asked(&proxy, "/v1/models", "alice").await, 200);
    }
    assert_eq!(asked(&proxy, "/v1/over", "alice").await, 429);
    says(
        &proxy.logged("/v1/over").await,
        &serde_json::json!({
            "status": 429, "outcome": "refused", "decision": "refused", "remaining": 0, "route": "llm",
        }),
    );
    assert_eq!(proxy.logs.requests().len(), 9, "one line each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_gone_before_the_first_byte_has_a_line_without_a_status() {
    let upstream = upstream(&Gate::default()).await;
    let proxy = before(&upstream).start().await;
    let mut raw = Raw::to(&proxy).await;
    raw.get("/v1/never", "alice").await;
    while upstream.next_request().await.target != "/v1/never" {}
    drop(raw);
    says(
        &proxy.logged("/v1/never").await,
        &serde_json::json!({
            "status": null, "outcome": "client_gone", "ending": "client gone", "decision": "admitted", "remaining": 5,
        }),
    );
    assert_eq!(proxy.metric("tollgate_in_flight_requests").await, 0.0, "and nothing is held");
    assert_eq!(proxy.logs.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_request_is_counted_once_by_what_became_of_it() {
    let upstream = upstream(&Gate::default()).await;
    let proxy = before(&upstream).start().await;
    for path in ["/v1/models", "/v1/stream", "/v1/broken", "/v1/garbage", "/dead", "/nowhere"] {
        asked(&proxy, path, "alice").await;
    }
    asked(&proxy, "/v1/stranger", "mallory").await;
    let mut raw = Raw::to(&proxy).await;
    raw.get("/v1/never", "alice").await;
    while upstream.next_request().await.target != "/v1/never" {}
    drop(raw);
    proxy.logged("/v1/never").await;
    asked(&proxy, "/v1/over", "alice").await;
    // The count comes before the line.
    proxy.logged("/v1/over").await;
    let counted: f64 = series(&proxy, "tollgate_requests_total").await.iter().map(|(_, value)| value).sum();
    assert_eq!(counted, 9.0, "one count each");
    for (labels, count) in [
        (r#"{route="llm",tier="alice",key="",outcome="answered",status="200"}"#, 2.0),
        (r#"{route="llm",tier="alice",key="",outcome="upstream_broke",status="200"}"#, 1.0),
        (r#"{route="llm",tier="alice",key="",outcome="refused",status="429"}"#, 1.0),
        (r#"{route="llm",tier="alice",key="",outcome="client_gone",status="0"}"#, 1.0),
        (r#"{route="dead",tier="alice",key="",outcome="upstream_failed",status="502"}"#, 1.0),
        (r#"{route="",tier="",key="",outcome="unauthorized",status="401"}"#, 1.0),
        (r#"{route="",tier="alice",key="",outcome="no_route",status="404"}"#, 1.0),
    ] {
        assert_eq!(proxy.metric(&format!("tollgate_requests_total{labels}")).await, count, "{labels}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_a_stream_is_seen_and_nothing_stays_in_flight() {
    let gate = Gate::default();
    let upstream = upstream(&gate).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let mut raw = RawH2::to(&proxy, 65_535).await;
    raw.get(1, "/v1/hang", "alice").await;
    raw.frame_of(crate::harness::raw::DATA, 1).await.expect("the first event");
    assert_eq!(proxy.metric("tollgate_in_flight_requests").await, 1.0);
    raw.send(crate::harness::raw::RST_STREAM, 0, 1, &8_u32.to_be_bytes()).await;
    says(
        &proxy.logged("/v1/hang").await,
        &serde_json::json!({ "status": 200, "outcome": "client_gone", "ending": "client gone", "bytes": 11 }),
    );
    assert_eq!(proxy.metric("tollgate_in_flight_requests").await, 0.0);
}

/// All series of a metric, with their values.
async fn series(proxy: &Proxy, name: &str) -> Vec<(String, f64)> {
    let (_, text) = proxy.admin("/metrics").await;
    let of_metric = text.lines().filter(|line| line.starts_with(name));
    of_metric
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').unwrap();
            (series.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exposition_is_openmetrics_and_names_every_metric() {
    let gate = Gate::default();
    let upstream = upstream(&gate).await;
    let proxy = ProxyBuilder::before(&upstream)
        .server("header_timeout = \"300ms\"")
        .tier("alice", LIMITS)
        // Nobody listens there.
        .redis("redis://127.0.0.1:1", "on_store_failure = \"allow\"")
        .start()
        .await;
    asked(&proxy, "/v1/models", "alice").await;
    // A connection that expires, and one that is none.
    Raw::to(&proxy).await.rest().await;
    let mut plain = tokio::net::TcpStream::connect(proxy.address).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut plain, b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _ = tokio::io::AsyncReadExt::read_to_end(&mut plain, &mut Vec::new()).await;
    let answer = reqwest::get(format!("http://{}/metrics", proxy.admin)).await.unwrap();
    assert_eq!(
        answer.headers()["content-type"],
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    let text = answer.text().await.unwrap();
    assert!(text.ends_with("\n# EOF\n") || text == "# EOF\n", "{text}");
    let mut families = BTreeSet::new();
    for line in text.lines().filter(|line| *line != "# EOF") {
        if let Some(comment) = line.strip_prefix("# ") {
            let mut words = comment.splitn(3, ' ');
            let (kind, name) = (words.next().unwrap(), words.next().unwrap());
            assert!(["HELP", "TYPE", "UNIT"].contains(&kind), "{line}");
            assert!(words.next().is_some_and(|rest| !rest.is_empty()), "{line}");
            families.insert(name.to_owned());
        } else {
            let (series, value) = line.rsplit_once(' ').unwrap();
            assert!(value.parse::<f64>().is_ok(), "{line}");
            let name = series.split('{').next().unwrap();
            assert!(families.iter().any(|family| name.starts_with(&**family)), "{line} has a family");
        }
    }
    let expected = [
        "tollgate_build",
        "tollgate_requests",
        "tollgate_in_flight_requests",
        "tollgate_time_to_first_byte_seconds",
        "tollgate_client_tries",
        "tollgate_limiter_decision_seconds",
        "tollgate_limiter_faults",
        "tollgate_limiter_fallbacks",
        "tollgate_limiter_replicas",
        "tollgate_limiter_store_up",
        "tollgate_connections",
        "tollgate_connections_refused",
        "tollgate_connections_expired",
    ];
    for name in expected {
        assert!(families.contains(name), "{name} is there: {families:?}");
    }
    assert_eq!(proxy.metric("tollgate_limiter_decision_seconds_count").await, 1.0);
    assert_eq!(proxy.metric("tollgate_time_to_first_byte_seconds_count{route=\"llm\"}").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_can_make_a_series_of_its_own() {
    let gate = Gate::default();
    let upstream = upstream(&gate).await;
    let proxy = ProxyBuilder::before(&upstream)
        .upstream("paths = [\"/v1\"]")
        .tier("alice", r#"{ requests = 1000, per = "1h" }"#)
        .start()
        .await;
    let all_kinds = async |n: usize| {
        asked(&proxy, &format!("/v1/{n}"), "alice").await;
        asked(&proxy, &format!("/{n}"), "alice").await;
        asked(&proxy, &format!("/v1/{n}"), &format!("nobody-{n}")).await;
        asked(&proxy, &format!("/v1/%zz{n}"), "alice").await;
    };
    all_kinds(0).await;
    let names = async || {
        let (_, text) = proxy.admin("/metrics").await;
        text.lines().map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect::<BTreeSet<_>>()
    };
    let before = names().await;
    for n in 1..10 {
        all_kinds(n).await;
    }
    assert_eq!(names().await, before);
    assert!(
        before.iter().all(|series| !series.contains("key=") || series.contains("key=\"\"")),
        "key ids are off"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn key_ids_are_labels_where_that_is_wished_for() {
    let gate = Gate::default();
    let upstream = upstream(&gate).await;
    let proxy = ProxyBuilder::before(&upstream)
        .tier("alice", LIMITS)
        .section("[admin]\nlisten = \"127.0.0.1:0\"\nkey_labels = true")
        .start()
        .await;
    asked(&proxy, "/v1/models", "alice").await;
    asked(&proxy, "/v1/models", "mallory").await;
    let requests = series(&proxy, "tollgate_requests_total").await;
    let with_key = |(series, _): &&(String, f64)| series.contains("key=\"alice\"");
    assert_eq!(requests.iter().filter(with_key).count(), 1, "{requests:?}");
    assert!(!requests.iter().any(|(series, _)| series.contains("mallory")), "{requests:?}");
}

/// Text lines are for people; nothing that a request holds may break a line or move a terminal's cursor.
#[tokio::test(flavor = "multi_thread")]
async fn text_lines_escape_what_a_request_or_an_upstream_can_put_into_them() {
    let upstream = Upstream::start(|_| {
        Script::new().send("HTTP/1.1 200 OK\r\nx-request-id: a\tb\r\ncontent-length: 0\r\n\r\n")
    })
    .await;
    let builder = ProxyBuilder::before(&upstream).tier("alice", LIMITS);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("proxy.toml"), builder.text()).unwrap();
    // It logs a format that the harness can't parse, so it writes to a file.
    let mut child = tokio::process::Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .args(["--log-format", "text"])
        .current_dir(folder.path())
        .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let log = || std::fs::read_to_string(folder.path().join("log")).unwrap();
    let address = patiently("the listener", async {
        loop {
            let found = log().lines().find_map(|line| {
                let (_, address) =
                    line.contains(": listening ").then(|| line.split_once("address=")).flatten()?;
                Some(address.to_owned())
            });
            if let Some(address) = found {
                break address;
            }
            tokio::task::yield_now().await;
        }
    })
    .await;
    let port = address.rsplit_once(':').unwrap().1;
    let line = format!(
        "curl -sS --cacert certs/server.crt -H 'x-api-key: {}' 'https://localhost:{port}/v1/a%1b;b?c=d'",
        secret("alice")
    );
    assert_eq!(pasted(folder.path(), &line).await.code, Some(0));
    let line = line.replace("%1b", "");
    assert_eq!(pasted(folder.path(), &line).await.code, Some(0));
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(child.id().unwrap() as i32).unwrap(),
        rustix::process::Signal::TERM,
    )
    .unwrap();
    patiently("the end", child.wait()).await.unwrap();
    let log = log();
    let of_requests: Vec<_> = log.lines().filter(|line| line.contains("tollgate::access")).collect();
    assert_eq!(of_requests.len(), 2, "{log}");
    assert!(of_requests[1].contains("status=200") && of_requests[1].contains("key=\"alice\""), "{log}");
    assert!(of_requests[1].contains(r#"upstream_request_id="a\tb""#), "{log}");
    assert!(!log.contains('\x1b') && !log.contains('\t') && !log.contains("c=d"), "{log:?}");
}

/// An alert on a series that comes with the first fault would miss that fault.
#[tokio::test(flavor = "multi_thread")]
async fn what_can_be_alerted_on_stands_at_zero_from_the_start() {
    let upstream = upstream(&Gate::default()).await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let of = |name: &'static str| {
        let proxy = &proxy;
        async move { series(proxy, name).await.into_iter().collect::<BTreeMap<_, _>>() }
    };
    for (name, label, values) in [
        (
            "tollgate_limiter_faults_total",
            "kind",
            &[
                "timeout",
                "disconnected",
                "not_permitted",
                "read_only",
                "busy",
                "cannot_write",
                "cluster",
                "wrong_type",
                "bad_reply",
                "breaker_open",
                "other",
            ][..],
        ),
        ("tollgate_limiter_fallbacks_total", "policy", &["allow", "deny", "local"]),
        (
            "tollgate_connections_refused_total",
            "reason",
            &["too_many", "too_many_from_address", "accept_failed", "handshake_failed", "handshake_timeout"],
        ),
        ("tollgate_connections_expired_total", "reason", &["slow_head", "idle", "write_stalled"]),
    ] {
        let expected: BTreeMap<_, _> =
            values.iter().map(|value| (format!("{name}{{{label}=\"{value}\"}}"), 0.0)).collect();
        assert_eq!(of(name).await, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_whose_head_is_none_has_a_line_and_a_count_too() {
    let upstream = Upstream::ok().await;
    let proxy = before(&upstream).server("max_header_size = \"8KiB\"").start().await;
    let large = format!("GET / HTTP/1.1\r\nx: {}\r\n\r\n", "x".repeat(60_000));
    for (head, status) in [("GET / HTTP/1.1\r\nno field\r\n\r\n", 400), (&*large, 431)] {
        let mut raw = Raw::to(&proxy).await;
        raw.send(head).await;
        assert_eq!(raw.head().await.expect("an answer").status, status);
        let line = proxy.logs.wait_for("the line", |line| line["fields"]["status"] == status).await;
        assert_eq!(
            (&line["target"], &line["fields"]["outcome"], &line["fields"]["client"]),
            (&"tollgate::access".into(), &"malformed".into(), &"127.0.0.1".into()),
        );
        let labels = format!(r#"{{route="",tier="",key="",outcome="malformed",status="{status}"}}"#);
        assert_eq!(proxy.metric(&format!("tollgate_requests_total{labels}")).await, 1.0);
    }
}

/// R36. A herd of retries is seen before anybody complains, and nothing that a client writes makes a series.
#[tokio::test(flavor = "multi_thread")]
async fn tries_of_clients_are_counted_by_which_retry_they_are() {
    let upstream = upstream(&Gate::default()).await;
    let proxy = before(&upstream).start().await;
    let tries = async |id: &str, counts: &[&str]| {
        for count in counts {
            let request = proxy.client().get(proxy.url("/v1/models")).header("x-api-key", secret(id));
            request.header("x-stainless-retry-count", *count).send().await.unwrap();
        }
    };
    let expected = |counts: [f64; 4]| {
        let series =
            ["0", "1", "2", "3+"].map(|retry| format!("tollgate_client_tries_total{{retry=\"{retry}\"}}"));
        series.into_iter().zip(counts).collect::<BTreeMap<_, _>>()
    };
    let counted =
        async || series(&proxy, "tollgate_client_tries_total").await.into_iter().collect::<BTreeMap<_, _>>();
    assert_eq!(counted().await, expected([0.0; 4]), "they stand there from the start");
    tries("mallory", &["0", "1"]).await;
    tries("alice", &["0", "0", "1", "2", "3", "4", "4294967295", "-1", "one", ""]).await;
    asked(&proxy, "/v1/models", "alice").await;
    assert_eq!(counted().await, expected([2.0, 1.0, 1.0, 3.0]));
    let refused = r#"{route="llm",tier="alice",key="",outcome="refused",status="429"}"#;
    let refused = proxy.metric(&format!("tollgate_requests_total{refused}")).await;
    assert_eq!(refused, 5.0, "a retry uses up the limit like any request");
}
