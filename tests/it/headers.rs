//! Header fields, both ways: what is told, hidden, kept and bounded.

use reqwest::{Response, StatusCode};

use crate::harness::{Plain, Proxy, ProxyBuilder, Received, Script, Upstream, clients, header, secret};

const LIMITS: &str = r#"{ requests = 1000, per = "1m" }"#;

async fn asked(proxy: &Proxy, client: &reqwest::Client, fields: &[(&str, &str)]) -> Response {
    let mut request = client.get(proxy.url("/v1/models")).header("x-api-key", secret("alice"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    request.send().await.unwrap()
}

/// All values of a field, in order.
fn values<'a>(received: &'a Received, name: &str) -> Vec<&'a str> {
    received.headers.iter().filter(|(known, _)| known == name).map(|(_, value)| &**value).collect()
}

/// An upstream that answers with these lines in its head.
async fn saying(status: &'static str, lines: String) -> Upstream {
    Upstream::start(move |_| {
        Script::new().send(format!("HTTP/1.1 {status}\r\n{lines}content-length: 2\r\n\r\n{{}}"))
    })
    .await
}

const CLAIMS: [(&str, &str); 5] = [
    ("x-forwarded-for", "6.6.6.6"),
    ("x-forwarded-host", "evil"),
    ("x-real-ip", "6.6.6.6"),
    ("forwarded", "for=6.6.6.6"),
    ("via", "1.1 front"),
];

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_knows_its_clients_only_where_it_is_told_of_them() {
    let upstream = Upstream::ok().await;
    let silent = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let telling = ProxyBuilder::before(&upstream).upstream("forwarded = true\nvia = true").tier("alice", "");
    let telling = telling.start().await;
    for ((protocol, client), spoken) in clients(&silent).into_iter().zip(["1.1 ", "2 "]) {
        let answer = asked(&silent, &client, &[]).await;
        assert!(!answer.headers().contains_key("via"), "{protocol}");
        let received = upstream.next_request().await;
        for name in ["x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "via", "forwarded"] {
            assert_eq!(received.header(name), None, "{protocol}: {name}");
        }
        asked(&silent, &client, &CLAIMS).await;
        let received = upstream.next_request().await;
        for (name, value) in CLAIMS {
            assert_eq!(received.header(name), Some(value), "{protocol}: what was sent passes as it is");
        }

        let client = clients(&telling).into_iter().find(|(known, _)| *known == protocol).unwrap().1;
        let answer = asked(&telling, &client, &CLAIMS).await;
        assert_eq!(header(&answer, "via"), "1.1 tollgate");
        let received = upstream.next_request().await;
        assert_eq!(received.header("x-forwarded-for"), Some("6.6.6.6, 127.0.0.1"), "{protocol}");
        assert_eq!(received.header("x-forwarded-proto"), Some("https"));
        let host = format!("localhost:{}", telling.address.port());
        assert_eq!(received.header("x-forwarded-host"), Some(&*host), "{protocol}");
        assert_eq!(values(&received, "via"), ["1.1 front", &format!("{spoken}tollgate")]);
        assert_eq!((received.header("x-real-ip"), received.header("forwarded")), (None, None));
    }
}

/// Whatever a client names in `Connection`, what Tollgate sets and what a request needs stay.
#[tokio::test(flavor = "multi_thread")]
async fn connection_removes_nothing_of_ours() {
    let upstream = Upstream::ok().await;
    let credential =
        "forwarded = true\nvia = true\ncredential = { header = \"x-upstream\", value = \"theirs\" }";
    let proxy = ProxyBuilder::before(&upstream).upstream(credential).tier("alice", "").start().await;
    let own = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    let named = "connection: x-request-id, authorization, host, content-length, content-type, x-upstream, x-api-key\r\n\
                 connection: x-forwarded-for, X-Forwarded-Proto, via, close, x-private\r\nx-private: 1\r\n\
                 content-type: application/json\r\nauthorization: Bearer their-own\r\ncontent-length: 2\r\n";
    for (proxy, is_told) in [(&proxy, true), (&own, false)] {
        let mut plain = Plain::connect(proxy).await;
        plain.request("POST /v1/x", "alice", named).await;
        plain.send("{}").await.unwrap();
        assert_eq!(plain.answer().await.unwrap().status, 200);
        let received = upstream.next_request().await;
        assert!(received.header("x-request-id").is_some() && received.header("host").is_some());
        assert_eq!(
            (received.header("content-type"), &*received.body),
            (Some("application/json"), &b"{}"[..])
        );
        assert_eq!((received.header("x-private"), received.header("x-api-key")), (None, None));
        assert_eq!(received.header("x-upstream"), is_told.then_some("theirs"));
        assert_eq!(received.header("x-forwarded-for"), is_told.then_some("127.0.0.1"));
        assert_eq!(received.header("x-forwarded-proto"), is_told.then_some("https"));
        assert_eq!(received.header("via"), is_told.then_some("1.1 tollgate"));
        let own = received.header("authorization");
        assert_eq!(own, (!is_told).then_some("Bearer their-own"), "a client's own upstream key stays");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_has_one_date_one_server_and_no_way_around() {
    let lines = "date: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: one\r\ndate: Fri, 02 Jan 2026 00:00:00 GMT\r\n\
                 server: two\r\nalt-svc: h3=\":443\"\r\nstrict-transport-security: max-age=9\r\nvary: a\r\nx-b: 1\r\nvary: b\r\n";
    let upstream = saying("200 OK", lines.to_owned()).await;
    let bare = Upstream::ok().await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let other = ProxyBuilder::before(&bare).tier("alice", LIMITS).start().await;
    for (protocol, client) in clients(&proxy) {
        let answer = asked(&proxy, &client, &[]).await;
        assert_eq!(header(&answer, "date"), "Thu, 01 Jan 2026 00:00:00 GMT", "{protocol}");
        assert_eq!(header(&answer, "server"), "one");
        for gone in ["alt-svc", "strict-transport-security"] {
            assert!(!answer.headers().contains_key(gone), "{protocol}: {gone}");
        }
        let vary: Vec<_> = answer.headers().get_all("vary").iter().collect();
        assert_eq!(vary, ["a", "b"], "{protocol}");
    }
    for (protocol, client) in clients(&other) {
        for key in ["alice", "nobody"] {
            let request = client.get(other.url("/v1/models")).header("x-api-key", secret(key));
            let answer = request.send().await.unwrap();
            assert!(header(&answer, "date").ends_with(" GMT"), "{protocol}");
            assert!(!answer.headers().contains_key("server"), "{protocol}: Tollgate does not say what it is");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_hidden_stays_hidden_and_ours_is_said() {
    let lines = "openai-organization: org-1\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nx-request-id: up-1\r\n\
                 x-ratelimit-limit: 9\r\nx-ratelimit-remaining-requests: 8\r\nopenai-processing-ms: 7\r\n";
    for status in ["200 OK", "500 Oh"] {
        let upstream = saying(status, lines.to_owned()).await;
        let proxy = ProxyBuilder::before(&upstream)
            .upstream("hide = [\"OpenAI-Organization\", \"x-ratelimit-*\", \"set-cookie\", \"x-request-id\"]")
            .tier("alice", LIMITS)
            .start()
            .await;
        for (protocol, client) in clients(&proxy) {
            let answer = asked(&proxy, &client, &[]).await;
            for hidden in ["openai-organization", "set-cookie", "x-ratelimit-remaining-requests"] {
                assert!(!answer.headers().contains_key(hidden), "{protocol}: {hidden}");
            }
            assert_eq!(header(&answer, "openai-processing-ms"), "7");
            assert_eq!(header(&answer, "x-ratelimit-limit"), "1000");
            assert_eq!(header(&answer, "x-request-id").len(), 32, "{protocol}: ours");
        }
        let line = proxy.logs.request("/v1/models").await;
        assert_eq!(line["upstream_request_id"], "up-1", "the operator sees it");
    }
}

/// R20, R21: what a provider says of its own limits passes, next to ours, and nobody takes its refusal for ours.
#[tokio::test(flavor = "multi_thread")]
async fn an_upstreams_own_limits_pass_and_are_not_taken_for_ours() {
    let kept = [
        ("retry-after", "37"),
        ("retry-after-ms", "36500"),
        ("x-should-retry", "true"),
        ("x-ratelimit-remaining-tokens", "0"),
        ("x-ratelimit-reset-requests", "6m0s"),
        ("anthropic-ratelimit-requests-reset", "2026-11-30T00:00:00Z"),
        ("openai-processing-ms", "5"),
    ];
    let mut lines: String = kept.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    lines += "X-RateLimit-Limit: 999999\r\nx-ratelimit-limit: 888888\r\nX-RateLimit-Remaining: 999999\r\n\
              x-ratelimit-reset: 1700000000\r\nratelimit: \"x\";r=1\r\nx-ratelimit-source: tollgate\r\n";
    for status in [200_u16, 429, 500, 503, 529] {
        let upstream = saying(
            ["200 OK", "429 No", "500 Oh", "503 No", "529 Busy"]
                .into_iter()
                .find(|line| line.starts_with(&status.to_string()))
                .unwrap(),
            lines.clone(),
        )
        .await;
        let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
        for (protocol, client) in clients(&proxy) {
            let answer = asked(&proxy, &client, &[]).await;
            assert_eq!(answer.status().as_u16(), status, "{protocol}");
            for (name, value) in kept {
                assert_eq!(header(&answer, name), value, "{protocol}, {status}");
            }
            assert_eq!(header(&answer, "x-ratelimit-limit"), "1000");
            assert!(header(&answer, "x-ratelimit-remaining").parse::<u32>().unwrap() < 1000);
            assert!(header(&answer, "x-ratelimit-reset").parse::<u32>().unwrap() <= 60);
            assert!(header(&answer, "ratelimit").starts_with("\"1m\";"), "{protocol}");
            assert!(!answer.headers().contains_key("x-ratelimit-source"), "{protocol}: it is not ours");
        }
    }
}

/// R41.
#[tokio::test(flavor = "multi_thread")]
async fn unusual_names_and_values_pass_as_they_are() {
    let upstream = Upstream::start(|_| {
        let head = b"HTTP/1.1 200 OK\r\nx_under_score: 1\r\nx-latin: caf\xe9\r\ncontent-length: 2\r\n\r\n{}";
        Script::new().send(head)
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", "").start().await;
    for (protocol, client) in clients(&proxy) {
        // Not UTF-8, so the scripted upstream would not read it.
        let utf8 = reqwest::header::HeaderValue::from_bytes("naïve".as_bytes()).unwrap();
        let request = client.get(proxy.url("/v1/models")).header("x-api-key", secret("alice"));
        let request = request.header("x_under_score", "1").header("x-utf8", utf8).header("x-empty", "");
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{protocol}");
        assert_eq!(header(&answer, "x_under_score"), "1");
        assert_eq!(answer.headers()["x-latin"].as_bytes(), b"caf\xe9", "{protocol}");
        let received = upstream.next_request().await;
        assert_eq!(received.header("x_under_score"), Some("1"), "{protocol}");
        assert_eq!((received.header("x-utf8"), received.header("x-empty")), (Some("naïve"), Some("")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_in_latin_1_reaches_the_upstream() {
    let upstream = crate::harness::Wire::listen().await;
    let proxy = ProxyBuilder::before_url(&upstream.url()).tier("alice", "").start().await;
    let mut plain = Plain::connect(&proxy).await;
    let head = format!("GET /v1/x HTTP/1.1\r\nhost: a\r\nx-api-key: {}\r\nx-latin: caf", secret("alice"));
    plain.send([head.as_bytes(), b"\xe9\r\n\r\n"].concat()).await.unwrap();
    let mut link = upstream.accept().await;
    let mut got = Vec::new();
    while !got.ends_with(b"\r\n\r\n") {
        got.extend(link.bytes(1).await);
    }
    assert!(got.windows(15).any(|part| part == b"x-latin: caf\xe9\r\n"), "{}", got.escape_ascii());
    link.ok().await;
    assert_eq!(plain.answer().await.unwrap().status, 200);
}

/// R25: a head that some clients do not read passes with a warning, and one beyond the bound never in silence.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_head_of_an_answer_passes_is_warned_about_and_has_a_bound() {
    let upstream = Upstream::start(|request| {
        let bytes = if request.target == "/v1/beyond" { 70_000 } else { 20_000 };
        let many = if request.target == "/v1/many" { "x-a: 1\r\n".repeat(101) } else { String::new() };
        let large = "x".repeat(bytes);
        Script::new()
            .send(format!("HTTP/1.1 200 OK\r\nx-large: {large}\r\n{many}content-length: 2\r\n\r\n{{}}"))
    })
    .await;
    let proxy = ProxyBuilder::before(&upstream).tier("alice", LIMITS).start().await;
    let mut plain = Plain::connect(&proxy).await;
    for _ in 0..2 {
        plain.request("GET /v1/large", "alice", "").await;
        let answer = plain.answer().await.unwrap();
        assert_eq!((answer.status, answer.header("x-large").map(str::len)), (200, Some(20_000)));
        assert_eq!(answer.header("x-ratelimit-limit"), Some("1000"));
    }
    for path in ["/v1/beyond", "/v1/many"] {
        plain.request(&format!("GET {path}"), "alice", "").await;
        let answer = plain.answer().await.unwrap();
        assert_eq!((answer.status, answer.json()["error"]["type"].as_str()), (502, Some("server_error")));
        let line = proxy.logs.request(path).await;
        let reason = line["reason"].as_str().unwrap();
        assert!(reason.contains("65536 bytes or 100 fields"), "{reason}");
    }
    let warnings = proxy.logs.all();
    let is_it = |line: &&serde_json::Value| line["fields"]["message"].to_string().contains("clients on Node");
    let warnings: Vec<_> = warnings.iter().filter(is_it).collect();
    assert_eq!((warnings.len(), &warnings[0]["level"]), (1, &"WARN".into()), "once for each upstream");
}
