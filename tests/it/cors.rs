//! Web pages: what a browser asks before, and what it finds in the answer.

use reqwest::{Method, RequestBuilder, Response};
use rustix::process::Signal;

use crate::harness::{Proxy, ProxyBuilder, Script, Upstream, clients, header, secret};

const PAGE: &str = "https://app.example.com";
const LIMITS: &str = r#"{ requests = 2, per = "1m" }"#;
const ON: &str = r#"[cors]
origins = ["https://app.example.com", "https://*.example.org"]
max_age = "5m""#;

fn preflight(proxy: &Proxy, client: &reqwest::Client, path: &str, origin: &str) -> RequestBuilder {
    client
        .request(Method::OPTIONS, proxy.url(path))
        .header("origin", origin)
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization,content-type,x-stainless-os")
}

/// An upstream that has rules of its own for pages.
async fn opinionated() -> Upstream {
    Upstream::start(|request| {
        let status = request.target.rsplit('/').next().and_then(|end| end.parse().ok()).unwrap_or(200);
        Script::new().send(format!(
            "HTTP/1.1 {status} Whatever\r\naccess-control-allow-origin: https://upstream.example\r\n\
             access-control-allow-credentials: true\r\nvary: accept\r\ncontent-length: 2\r\n\r\n{{}}"
        ))
    })
    .await
}

fn names_of_cors(answer: &Response) -> Vec<&str> {
    let names = answer.headers().keys().map(|name| name.as_str());
    names.filter(|name| name.starts_with("access-control-")).collect()
}

fn is_for_the_page(answer: &Response, case: &str) {
    assert_eq!(header(answer, "access-control-allow-origin"), PAGE, "{case}");
    let exposed = header(answer, "access-control-expose-headers").to_ascii_lowercase();
    for name in ["x-ratelimit-remaining", "retry-after", "retry-after-ms", "x-request-id", "request-id"] {
        assert!(exposed.split(", ").any(|exposed| exposed == name), "{case}: {name}");
    }
    let mut vary = answer.headers().get_all("vary").iter();
    assert!(vary.any(|value| value == "Origin"), "{case}: {answer:?}");
    assert!(!answer.headers().contains_key("access-control-allow-credentials"), "{case}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preflight_needs_no_key_and_costs_nothing() {
    let upstream = opinionated().await;
    let proxy = ProxyBuilder::before(&upstream).section(ON).tier("alice", LIMITS).start().await;
    for (protocol, client) in clients(&proxy) {
        for (path, origin) in
            [("/v1/chat/completions", PAGE), ("/v1/messages", "https://a.b.example.org"), ("/nowhere", PAGE)]
        {
            let answer = preflight(&proxy, &client, path, origin).send().await.unwrap();
            assert_eq!(answer.status(), 204, "{protocol}: {path}");
            assert_eq!(header(&answer, "access-control-allow-origin"), origin);
            assert_eq!(header(&answer, "access-control-allow-methods"), "POST");
            let asked = "authorization,content-type,x-stainless-os";
            assert_eq!(header(&answer, "access-control-allow-headers"), asked);
            assert_eq!(header(&answer, "access-control-max-age"), "300");
            let varies = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers";
            assert_eq!(header(&answer, "vary"), varies);
            assert!(!answer.headers().contains_key("x-ratelimit-limit"));
        }
    }
    assert!(upstream.received().is_empty());
    assert_eq!(proxy.logs.request("/nowhere").await["outcome"], "preflight");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_is_told_which_key_to_set() {
    let upstream = opinionated().await;
    let proxy = ProxyBuilder::before(&upstream).section(ON).tier("alice", LIMITS).start().await;
    for (protocol, client) in clients(&proxy) {
        let answer = preflight(&proxy, &client, "/v1/messages", "https://example.org").send().await.unwrap();
        assert_eq!((answer.status().as_u16(), names_of_cors(&answer).len()), (403, 0), "{protocol}");
        let body: serde_json::Value = answer.json().await.unwrap();
        assert_eq!((&body["type"], &body["error"]["type"]), (&"error".into(), &"permission_error".into()));
        assert!(body["error"]["message"].as_str().unwrap().contains("`origins` in [cors]"), "{body}");
        for origin in [None, Some("https://other.example")] {
            let mut request = client.get(proxy.url("/v1/models")).header("x-api-key", secret("nobody"));
            if let Some(origin) = origin {
                request = request.header("origin", origin);
            }
            let answer = request.send().await.unwrap();
            assert_eq!((answer.status().as_u16(), names_of_cors(&answer).len()), (401, 0), "{protocol}");
            assert_eq!(header(&answer, "vary"), "Origin");
        }
    }
    assert!(upstream.received().is_empty());
}

/// Without these fields a page gets no more than "network error", whatever the answer says.
#[tokio::test(flavor = "multi_thread")]
async fn every_answer_can_be_read_by_its_page() {
    let upstream = opinionated().await;
    let builder = ProxyBuilder::before(&upstream).server("max_body_size = 100").section(ON);
    let proxy = builder.upstream("paths = [\"/v1\"]").tier("alice", LIMITS).tier("bob", "").start().await;
    for (protocol, client) in clients(&proxy) {
        let mut fates = vec![];
        for (path, key, length, status) in [
            ("/v1/x/200", "bob", 2, 200),
            ("/v1/x/429", "bob", 2, 429),
            ("/v1/x/500", "bob", 2, 500),
            ("/v1/x", "nobody", 2, 401),
            ("/v2/x", "bob", 2, 404),
            ("/v1/x", "bob", 101, 413),
            ("/v1/a%00", "bob", 2, 400),
        ] {
            let request = client.post(proxy.url(path)).header("origin", PAGE);
            let answer = request.bearer_auth(secret(key)).body("x".repeat(length)).send().await.unwrap();
            assert_eq!(answer.status().as_u16(), status, "{protocol}: {path}");
            is_for_the_page(&answer, &format!("{protocol}: {path}"));
            fates.push(status);
        }
        assert_eq!(fates.len(), 7);
    }
    let (protocol, client) = &clients(&proxy)[1];
    let mut last = 0;
    for _ in 0..3 {
        let answer = proxy.chat(client, "alice").header("origin", PAGE).send().await.unwrap();
        last = answer.status().as_u16();
        is_for_the_page(&answer, protocol);
    }
    assert_eq!(last, 429, "two were admitted, and no preflight was counted");
    for request in upstream.received() {
        assert_eq!(request.header("origin"), None, "the origin has been judged");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_allowed_only_where_they_are_switched_on() {
    let upstream = opinionated().await;
    let on = format!("{ON}\ncredentials = true");
    let proxy = ProxyBuilder::before(&upstream).section(&on).tier("alice", "").start().await;
    for (_, client) in clients(&proxy) {
        for request in
            [preflight(&proxy, &client, "/v1/x", PAGE), proxy.chat(&client, "alice").header("origin", PAGE)]
        {
            let answer = request.send().await.unwrap();
            assert_eq!(header(&answer, "access-control-allow-credentials"), "true");
            assert_eq!(header(&answer, "access-control-allow-origin"), PAGE);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_pages_may_call_where_all_are_allowed() {
    let upstream = opinionated().await;
    let all = "[cors]\norigins = [\"*\"]";
    let proxy = ProxyBuilder::before(&upstream).section(all).tier("alice", "").start().await;
    for (_, client) in clients(&proxy) {
        let answer = proxy.chat(&client, "alice").header("origin", "null").send().await.unwrap();
        assert_eq!(header(&answer, "access-control-allow-origin"), "*");
        assert_eq!(header(&answer, "vary"), "accept");
        let answer = preflight(&proxy, &client, "/v1/x", "https://any.example").send().await.unwrap();
        assert_eq!((answer.status().as_u16(), header(&answer, "access-control-max-age")), (204, "600"));
    }
}

/// Off, a preflight is a request like every other, and what an upstream says of pages passes.
#[tokio::test(flavor = "multi_thread")]
async fn without_cors_pages_are_the_upstreams_business_and_a_reload_changes_that() {
    let upstream = opinionated().await;
    let builder = ProxyBuilder::before(&upstream).tier("alice", LIMITS);
    let proxy = builder.clone().start().await;
    let client = proxy.client();
    let answer = preflight(&proxy, &client, "/v1/x", PAGE).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), names_of_cors(&answer).len()), (401, 0));
    for _ in 0..4 {
        let request = preflight(&proxy, &client, "/v1/x", PAGE).bearer_auth(secret("alice"));
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 200, "an OPTIONS is not counted");
        assert_eq!(header(&answer, "access-control-allow-origin"), "https://upstream.example");
        assert_eq!(upstream.next_request().await.header("origin"), Some(PAGE));
    }
    proxy.write_config(&builder.section(ON));
    proxy.signal(Signal::HUP).await;
    proxy.logs.wait_for("the reload", |line| line["fields"]["message"] == "reloaded").await;
    let answer = preflight(&proxy, &client, "/v1/x", PAGE).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), header(&answer, "access-control-allow-origin")), (204, PAGE));
}
