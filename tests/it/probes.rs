//! Who only asks whether somebody is there, and what else uses up no limit.

use reqwest::Method;
use rustix::process::Signal;

use crate::harness::{ProxyBuilder, Upstream, clients, header, raw::Raw, secret};

const LIMITS: &str = r#"{ requests = 1, per = "1m" }"#;

#[tokio::test(flavor = "multi_thread")]
async fn probes_need_no_key_and_reach_nobody() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let probes = [
        (Method::HEAD, "/"),
        (Method::GET, "/healthz"),
        (Method::HEAD, "/healthz"),
        (Method::GET, "/api/hello"),
        (Method::HEAD, "/api/hello"),
    ];
    for (protocol, client) in clients(&proxy) {
        for (method, path) in &probes {
            let request = client.request(method.clone(), proxy.url(path));
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), 200, "{protocol}: {method} {path}");
            assert_eq!(header(&answer, "content-type"), "application/json");
            let expected = if *method == Method::GET { r#"{"status":"ok"}"# } else { "" };
            assert_eq!(answer.text().await.unwrap(), expected, "{protocol}: {method} {path}");
        }
        // What is no probe needs a key, as ever.
        for (method, path) in [(Method::GET, "/"), (Method::POST, "/healthz"), (Method::GET, "/healthz/")] {
            let answer = client.request(method, proxy.url(path)).send().await.unwrap();
            assert_eq!(answer.status(), 401, "{protocol}: {path}");
        }
    }
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!((answer.status().as_u16(), header(&answer, "x-ratelimit-remaining")), (200, "0"));
    assert_eq!(upstream.received().len(), 1);

    let (_, metrics) = proxy.admin("/metrics").await;
    let counted = metrics.lines().find(|line| line.contains("outcome=\"probe\"")).unwrap();
    assert!(counted.ends_with(&format!(" {}", 2 * probes.len())), "{counted}");
    proxy.logs.request("/v1/chat/completions").await;
    let lines = proxy.logs.all();
    let of_probes: Vec<_> = lines.iter().filter(|line| line["fields"]["message"] == "probe").collect();
    assert_eq!(of_probes.len(), 2 * probes.len());
    assert!(of_probes.iter().all(|line| line["level"] == "DEBUG"));
    assert!(lines.iter().all(|line| line["level"] != "WARN" || !line.to_string().contains("healthz")));
}

/// Whatever reads a path otherwise than the gate does, nothing behind it is reached without a key.
#[tokio::test(flavor = "multi_thread")]
async fn no_spelling_of_a_path_passes_without_a_key() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for path in [
        "/v1/models",
        "/%76%31/models",
        "//v1/models",
        "/V1/models",
        "/v1/models;x",
        "/healthz/../v1/models",
        "/healthz/%2e%2e/v1/models",
        "/healthz%2f..%2fv1/models",
        "/healthz/v1/models",
        "/healthz;/v1/models",
        "/healthz%00/v1/models",
        "/api/hello/../../v1/models",
        "/metrics/../v1/models",
        "https://localhost/v1/models",
        "http://localhost/healthz/../v1/models",
    ] {
        for method in ["GET", "HEAD", "POST", "OPTIONS"] {
            let mut raw = Raw::to(&proxy).await;
            raw.send(format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n"))
                .await;
            let status = raw.head().await.unwrap().status;
            assert!([400, 401].contains(&status), "{method} {path}: {status}");
        }
    }
    assert!(upstream.received().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_can_have_a_probes_path_for_itself() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream)
        .upstream("paths = [\"/v1\", \"/api\", \"/healthz\"]")
        .tier("alice", "")
        .start()
        .await;
    let client = proxy.client();
    let status = async |path: &str| client.get(proxy.url(path)).send().await.unwrap().status().as_u16();
    assert_eq!(status("/healthz").await, 401, "it is the route's");
    assert_eq!(status("/api/hello").await, 200, "it is only covered by one");
    let answer = client.get(proxy.url("/healthz")).bearer_auth(secret("alice")).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), upstream.next_request().await.target.as_str()), (200, "/healthz"));
}

#[tokio::test(flavor = "multi_thread")]
async fn counting_tokens_uses_up_nothing() {
    let upstream = Upstream::ok().await;
    let builder = ProxyBuilder::before(&upstream).tier("alice", LIMITS);
    let proxy = builder.clone().start().await;
    for (protocol, client) in clients(&proxy) {
        for path in
            ["/v1/messages/count_tokens?beta=true", "//messages/count_tokens", "/v1/responses/input_tokens"]
        {
            let request = client.post(proxy.url(path)).header("x-api-key", secret("alice")).body("{}");
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), 200, "{protocol}: {path}");
            assert!(!answer.headers().contains_key("x-ratelimit-limit"), "nothing was counted");
            let stranger = client.post(proxy.url(path)).header("x-api-key", secret("nobody")).body("{}");
            assert_eq!(stranger.send().await.unwrap().status(), 401, "{protocol}: {path}");
        }
    }
    assert_eq!(upstream.received().len(), 6);
    assert_eq!(proxy.logs.request("/v1/responses/input_tokens").await["decision"], "uncounted");
    let client = proxy.client();
    for expected in [200, 429] {
        assert_eq!(proxy.chat(&client, "alice").send().await.unwrap().status(), expected);
    }

    // An operator may see it the other way, and change that while it runs.
    proxy.write_config(&builder.section("[limiter]\nuncounted = [\"/v1/chat/*\"]"));
    proxy.signal(Signal::HUP).await;
    proxy.logs.wait_for("the reload", |line| line["fields"]["message"] == "reloaded").await;
    assert_eq!(proxy.chat(&client, "alice").send().await.unwrap().status(), 200);
    let request = client.post(proxy.url("/v1/messages/count_tokens")).bearer_auth(secret("alice")).body("{}");
    assert_eq!(request.send().await.unwrap().status(), 429);
}

/// What other methods do by OPTIONS is not for nothing.
#[tokio::test(flavor = "multi_thread")]
async fn an_options_with_a_body_is_counted() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    for (_, client) in clients(&proxy) {
        let options = || client.request(Method::OPTIONS, proxy.url("/v1/x")).bearer_auth(secret("alice"));
        assert_eq!(options().send().await.unwrap().status(), 200);
    }
    let client = proxy.client();
    for expected in [200, 429] {
        let request = client.request(Method::OPTIONS, proxy.url("/v1/x")).bearer_auth(secret("alice"));
        assert_eq!(request.body("{}").send().await.unwrap().status(), expected);
    }
}
