//! What the upstream gets is what the client sent, but for credentials, the host and what belongs to one connection.

use reqwest::Method;
use serde_json::Value;

use crate::harness::{
    Answer, Plain, Proxy, ProxyBuilder, Received, Script, Upstream, clients, header, secret,
};

async fn start(upstream: &Upstream) -> Proxy {
    ProxyBuilder::before(upstream).tier("alice", "").start().await
}

fn has_no_secret(received: &Received) {
    let shown = format!("{} {:?}", received.target, received.headers);
    assert!(!shown.contains("sk-tg"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_target_keeps_its_bytes_and_the_host_is_the_upstreams() {
    let upstream = Upstream::ok().await;
    let proxy = start(&upstream).await;
    let mut plain = Plain::connect(&proxy).await;
    for target in [
        "/v1/models/org%2Fmodel:tag",
        "/v1/a%20b;x=1/%E2%82%AC",
        "/v1/messages?beta=true",
        "/openai/deployments/d/chat/completions?api-version=2024-06-01",
        "/v1beta/models/g:streamGenerateContent?alt=sse",
        "/v1/x?b=2&a=1&empty=&flag&b=3&c=%26+%2B",
        "/v1/x?",
        "/v1/x/",
        "/v1/x//y",
        "/",
    ] {
        plain.request(&format!("GET {target}"), "alice", "").await;
        assert_eq!(plain.answer().await.unwrap().status, 200, "{target}");
        let received = upstream.next_request().await;
        assert_eq!(received.target, target);
        assert_eq!(Some(received.header("host").unwrap()), upstream.url().strip_prefix("http://"));
        has_no_secret(&received);
    }
    // The line is found by its path, which has no query.
    proxy.logs.request("/v1/messages").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_pass_but_for_those_of_the_connection() {
    let upstream = Upstream::start(|_| {
        Script::new().send(
            "HTTP/1.1 200 OK\r\nconnection: keep-alive, x-private\r\nkeep-alive: timeout=5\r\nx-private: 1\r\n\
             proxy-authenticate: Basic\r\nserver: up\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nvary: a\r\nvary: b\r\n\
             content-length: 2\r\n\r\n{}",
        )
    })
    .await;
    let proxy = start(&upstream).await;
    let mut plain = Plain::connect(&proxy).await;
    let headers = "anthropic-version: 2023-06-01\r\nanthropic-beta: a\r\nanthropic-beta: b\r\n\
                   X-Stainless-Lang: python\r\nuser-agent: OpenAI/Python\r\nx-unheard-of: caf\u{e9}\r\naccept-encoding: gzip\r\n\
                   connection: keep-alive, x-secret, x-stays\r\nx-secret: 1\r\nkeep-alive: 5\r\nte: trailers\r\n\
                   proxy-authorization: Basic eA==\r\nproxy-connection: keep-alive\r\nupgrade: h2c\r\nhttp2-settings: AAA\r\n";
    plain.request("GET /v1/x", "alice", headers).await;
    let answer = plain.answer().await.unwrap();
    let received = upstream.next_request().await;
    let mut names: Vec<_> = received.headers.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    let expected = [
        "accept-encoding",
        "anthropic-beta",
        "anthropic-beta",
        "anthropic-version",
        "host",
        "user-agent",
        "x-request-id",
        "x-stainless-lang",
        "x-unheard-of",
    ];
    assert_eq!(names, expected);
    let betas = received.headers.iter().filter(|(name, _)| name == "anthropic-beta");
    assert_eq!(betas.map(|(_, value)| &**value).collect::<Vec<_>>(), ["a", "b"]);
    assert_eq!(received.header("x-unheard-of"), Some("caf\u{e9}"));

    // HTTP/2 knows none of them: its clients would take the answer for a broken one.
    let multiplexed = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!((multiplexed.version(), multiplexed.status().as_u16()), (reqwest::Version::HTTP_2, 200));
    for gone in ["connection", "keep-alive", "x-private", "proxy-authenticate"] {
        assert_eq!(answer.header(gone), None, "{gone}");
        assert_eq!(multiplexed.headers().get(gone), None, "{gone}");
    }
    assert_eq!(answer.header("server"), Some("up"));
    assert_eq!(answer.header("date"), Some("Thu, 01 Jan 2026 00:00:00 GMT"));
    assert_eq!(answer.headers.iter().filter(|(name, _)| name == "vary").count(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn cookies_that_http2_splits_arrive_as_one_field() {
    let upstream = Upstream::ok().await;
    let proxy = start(&upstream).await;
    let request = proxy.client().get(proxy.url("/v1/x")).bearer_auth(secret("alice"));
    let answer = request.header("cookie", "a=1").header("cookie", "b=2").send().await.unwrap();
    assert_eq!(answer.version(), reqwest::Version::HTTP_2);
    assert_eq!(upstream.next_request().await.header("cookie"), Some("a=1; b=2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_can_have_a_header_of_the_proxy_deleted() {
    let upstream = Upstream::start(|_| {
        Script::new()
            .send("HTTP/1.1 200 OK\r\nconnection: x-ratelimit-remaining\r\ncontent-length: 2\r\n\r\n{}")
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", r#"{ requests = 5, per = "1h" }"#);
    let proxy =
        proxy.upstream("credential = { header = \"authorization\", value = \"Bearer up\" }").start().await;
    let mut plain = Plain::connect(&proxy).await;
    let headers = "connection: authorization, host, x-request-id, x-api-key\r\n";
    plain.request("GET /v1/x", "alice", headers).await;
    let answer = plain.answer().await.unwrap();
    assert_eq!((answer.status, answer.header("x-ratelimit-remaining")), (200, Some("4")));
    let received = upstream.next_request().await;
    assert_eq!(received.header("authorization"), Some("Bearer up"));
    assert!(received.header("host").is_some() && received.header("x-request-id").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_clients_key_goes_from_every_slot_and_the_upstreams_comes_in() {
    let upstream = Upstream::ok().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, "from-file\n").unwrap();
    let from_file = format!("{{ header = \"x-api-key\", value_file = \"{}\" }}", file.display());
    for (credential, name, value) in [
        (
            "{ header = \"authorization\", value = \"Bearer ${UPSTREAM_KEY}\" }",
            "authorization",
            "Bearer from-env",
        ),
        (&*from_file, "x-api-key", "from-file"),
        ("{ header = \"api-key\", value = \"${UPSTREAM_KEY}\" }", "api-key", "from-env"),
        ("{ header = \"x-goog-api-key\", value = \"${UPSTREAM_KEY}\" }", "x-goog-api-key", "from-env"),
    ] {
        let proxy = ProxyBuilder::before(&upstream).upstream(&format!("credential = {credential}"));
        let proxy = proxy.env("UPSTREAM_KEY", "from-env").tier("alice", "").start().await;
        let secret = secret("alice");
        for (protocol, client) in clients(&proxy) {
            let url = proxy.url(&format!("/v1/x?a=1&key={secret}&b=2"));
            let request = client.get(url).bearer_auth(&secret).header("api-key", &secret);
            let request = request.header("x-goog-api-key", &secret).header("x-api-key", "sk-stale");
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status(), 200, "{protocol}: one valid slot is enough");
            assert!(!format!("{:?}", answer.headers()).contains(value));
            let received = upstream.next_request().await;
            assert_eq!(received.target, "/v1/x?a=1&b=2");
            assert_eq!(received.header(name), Some(value));
            for other in ["authorization", "x-api-key", "api-key", "x-goog-api-key"] {
                assert!(other == name || received.header(other).is_none(), "{other}");
            }
            has_no_secret(&received);
        }
        proxy.logs.request("/v1/x").await;
        let logs = format!("{:?}", proxy.logs.all());
        assert!(!logs.contains(&secret) && !logs.contains("from-env") && !logs.contains("from-file"));
    }
}

/// R1. What stands in the other slot may be the same key, or a client's own key for the upstream, which passes.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_opens_in_every_slot_whatever_stands_in_another() {
    let upstream = Upstream::ok().await;
    let proxy = start(&upstream).await;
    let ours = secret("alice");
    let slots = ["authorization", "x-api-key", "api-key", "x-goog-api-key"];
    let held = |slot: &str, key: &str| {
        if slot == "authorization" { format!("Bearer {key}") } else { key.to_owned() }
    };
    for (protocol, client) in clients(&proxy) {
        let others = |slot| slots.into_iter().filter(move |other| *other != slot);
        let pairs = slots.into_iter().flat_map(|slot| others(slot).map(move |other| (slot, other)));
        for (slot, other, beside) in
            pairs.flat_map(|(slot, other)| ["", "same", "their-own"].map(|beside| (slot, other, beside)))
        {
            let request = client.get(proxy.url("/v1/models")).header(slot, held(slot, &ours));
            let request = match beside {
                "" => request,
                "same" => request.header(other, held(other, &ours)),
                own => request.header(other, held(other, own)),
            };
            let case = format!("{protocol}: {slot} and {beside:?} in {other}");
            assert_eq!(request.send().await.unwrap().status(), 200, "{case}");
            let received = upstream.next_request().await;
            assert_eq!(received.header(slot), None, "{case}");
            let kept = (beside == "their-own").then(|| held(other, "their-own"));
            assert_eq!(received.header(other), kept.as_deref(), "{case}");
            has_no_secret(&received);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_requests_id_is_kept_or_made_sent_and_returned() {
    let upstream = Upstream::ok().await;
    let proxy = start(&upstream).await;
    let mut plain = Plain::connect(&proxy).await;
    plain.request("GET /v1/kept", "alice", "x-request-id: mine-1\r\n").await;
    assert_eq!(plain.answer().await.unwrap().header("x-request-id"), Some("mine-1"));
    assert_eq!(upstream.next_request().await.header("x-request-id"), Some("mine-1"));
    assert_eq!(proxy.logs.request("/v1/kept").await["request_id"], "mine-1");

    let long = format!("x-request-id: {}\r\n", "x".repeat(200));
    for (path, headers) in [("/v1/made", ""), ("/v1/blank", "x-request-id: a b\r\n"), ("/v1/long", &*long)] {
        plain.request(&format!("GET {path}"), "alice", headers).await;
        let answer = plain.answer().await.unwrap();
        let made = answer.header("x-request-id").unwrap();
        assert!(made.len() == 32 && made.bytes().all(|byte| byte.is_ascii_hexdigit()), "{made}");
        assert_eq!(upstream.next_request().await.header("x-request-id"), Some(made));
        assert_eq!(proxy.logs.request(path).await["request_id"], made);
    }
    plain.request("GET /v1/refused", "nobody", "x-request-id: mine-2\r\n").await;
    let refused = plain.answer().await.unwrap();
    assert_eq!(
        (refused.header("x-request-id"), refused.header("request-id")),
        (Some("mine-2"), Some("mine-2"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn base_urls_that_are_slightly_off_still_work() {
    let upstream = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).upstream("paths = [\"/v1\"]").tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    for (asked, sent) in [
        ("//v1/messages", "/v1/messages"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/messages?beta=true", "/v1/messages?beta=true"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/responses", "/v1/responses"),
        ("/embeddings", "/v1/embeddings"),
        ("/models", "/v1/models"),
        ("//models/m", "/v1/models/m"),
        ("/v1/models/", "/v1/models/"),
    ] {
        plain.request(&format!("GET {asked}"), "alice", "").await;
        assert_eq!(plain.answer().await.unwrap().status, 200, "{asked}");
        assert_eq!(upstream.next_request().await.target, sent, "{asked}");
    }
}

async fn ask(plain: &mut Plain, path: &str, id: &str, status: u16) -> Value {
    plain.request(&format!("POST {path}"), id, "content-length: 0\r\n").await;
    let answer: Answer = plain.answer().await.unwrap();
    assert_eq!(answer.status, status, "{path}");
    assert_eq!(answer.header("content-type"), Some("application/json"));
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_have_the_shape_that_the_paths_clients_read() {
    let upstream = Upstream::ok().await;
    let proxy =
        ProxyBuilder::before(&upstream).upstream("paths = [\"/only\"]").tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    for (id, status, openai, anthropic, gemini) in [
        ("nobody", 401, "invalid_api_key", "authentication_error", "UNAUTHENTICATED"),
        ("alice", 404, "not_found", "not_found_error", "NOT_FOUND"),
    ] {
        let body = ask(&mut plain, "/v1/chat/completions", id, status).await;
        assert_eq!(body["error"]["code"], openai);
        let body = ask(&mut plain, "/v1/messages", id, status).await;
        assert_eq!((&body["type"], &body["error"]["type"]), (&"error".into(), &anthropic.into()));
        for path in ["/v1beta/models/g:generateContent", "/v1/models/g:streamGenerateContent"] {
            let body = ask(&mut plain, path, id, status).await;
            assert_eq!((&body["error"]["code"], &body["error"]["status"]), (&status.into(), &gemini.into()));
        }
        for path in ["/api/chat", "//api/chat"] {
            assert!(ask(&mut plain, path, id, status).await["error"].is_string(), "{path}");
        }
        assert_eq!(ask(&mut plain, "/anything", id, status).await["error"]["code"], openai);
    }
    assert!(upstream.received().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_https_upstream_is_trusted_by_its_ca_file_and_by_nothing_else() {
    let upstream = Upstream::ok().await;
    let secure = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let stranger = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let before = |trusted: &Proxy| {
        let certificate = trusted.certificates.join("server.crt");
        let credential =
            format!("credential = {{ header = \"x-api-key\", value = \"{}\" }}", secret("alice"));
        let proxy = ProxyBuilder::before_url(&secure.url("")).upstream(&credential);
        proxy.upstream(&format!("ca_file = \"{}\"", certificate.display())).tier("bob", "")
    };
    let trusting = before(&secure).start().await;
    let answer = trusting.chat(&trusting.client(), "bob").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let between = secure.logs.request("/v1/chat/completions").await;
    assert_eq!(header(&answer, "x-request-id"), between["request_id"]);
    assert_eq!(upstream.received().len(), 1);

    let wary = before(&stranger).start().await;
    let answer = wary.client().request(Method::POST, wary.url("/v1/wary")).bearer_auth(secret("bob"));
    let answer = answer.send().await.unwrap();
    assert_eq!(answer.status(), 502);
    assert!(!answer.text().await.unwrap().contains("certificate"));
    let reason = wary.logs.request("/v1/wary").await["reason"].to_string();
    assert!(reason.contains("certificate"), "{reason}");
    assert_eq!(upstream.received().len(), 1, "nothing was sent to whom we do not trust");
}
