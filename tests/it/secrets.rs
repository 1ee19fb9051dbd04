//! Secrets stay in: after all that can be done with them, none is where it does not belong.

use std::fs;

use reqwest::{Client, RequestBuilder};

use crate::harness::{Proxy, ProxyBuilder, Redis, Script, Upstream, key, raw::Raw, secret};

const CREDENTIAL: &str = "sk-upstream-credential-0123456789abcdef";

/// What must not be found: the callers' secrets, also in part, their hashes, and words that only look like keys.
fn forbidden() -> Vec<String> {
    let mut all: Vec<_> = ["alice", "bob", "carol", "mallory"].map(secret).into();
    all.extend(["alice", "bob", "carol"].map(|id| {
        let hash = tollgate::keys::ApiKey::new(&secret(id)).unwrap().hash().to_string();
        hash["sha256:".len()..].to_owned()
    }));
    // What every secret of the harness has after its id, in case that an id alone was cut out.
    all.push(secret("alice").rsplit_once('-').unwrap().1.to_owned());
    all
}

/// A request with the key of this id in each slot, and some that fail later.
fn requests_of(proxy: &Proxy, client: &Client, id: &str) -> [RequestBuilder; 11] {
    let secret = &secret(id);
    [
        client.get(proxy.url("/v1/models")).bearer_auth(secret),
        client.get(proxy.url("/v1/models")).header("authorization", format!("bEARER  {secret}")),
        client.get(proxy.url("/v1/models")).header("x-api-key", secret),
        client.get(proxy.url("/v1/models")).header("api-key", secret),
        client.get(proxy.url("/v1/models")).header("x-goog-api-key", secret),
        client.get(proxy.url(&format!("/v1/models?a=b&key={secret}&c=d"))),
        client.get(proxy.url("/v1/models")).header("x-api-key", secret).bearer_auth(secret),
        client.get(proxy.url("/v1/broken")).header("x-api-key", secret),
        client.get(proxy.url("/v1/garbage")).header("x-api-key", secret),
        client.get(proxy.url("/nowhere")).header("x-api-key", secret),
        client.get(proxy.url("/v1/%zz")).header("x-api-key", secret),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn no_secret_is_where_it_does_not_belong() {
    let upstream = Upstream::start(|request| match &*request.target {
        "/v1/broken" => Script::sse().event("one").close(),
        "/v1/garbage" => Script::new().send("what?\r\n\r\n").close(),
        _ => Script::json(200, "{}"),
    })
    .await;
    let mut redis = Redis::start().await;
    let disabled = key("bob", "alice").replace("[[keys]]", "[[keys]]\ndisabled = true");
    let expired = key("carol", "alice").replace("[[keys]]", "[[keys]]\nexpires = 2020-01-01T00:00:00Z");
    let proxy = ProxyBuilder::before(&upstream)
        .upstream("credential = { header = \"authorization\", value = \"Bearer ${UPSTREAM_KEY}\" }")
        .upstream("paths = [\"/v1\"]")
        .tier("alice", r#"{ requests = 20, per = "1h" }"#)
        .section(&disabled)
        .section(&expired)
        .section("[admin]\nlisten = \"127.0.0.1:0\"\nkey_labels = true")
        .redis(&redis.url(), "")
        .env("UPSTREAM_KEY", CREDENTIAL)
        .start()
        .await;

    let client = proxy.client();
    let mut answers = String::new();
    for id in ["alice", "bob", "carol", "mallory"] {
        for request in requests_of(&proxy, &client, id) {
            let answer = request.send().await.unwrap();
            answers.push_str(&format!("{:?}", answer.headers()));
            answers.push_str(&answer.text().await.unwrap_or_default());
        }
    }
    for _ in 0..20 {
        answers.push_str(&proxy.chat(&client, "alice").send().await.unwrap().text().await.unwrap());
    }
    // hyper refuses this one itself.
    let mut raw = Raw::to(&proxy).await;
    raw.send(format!("GET /v1/x HTTP/1.1\r\nhost: a\r\nx-api-key : {}\r\n\r\n", secret("alice"))).await;
    raw.rest().await;
    let dump = redis.dump();
    redis.kill().await;
    let unavailable = proxy.chat(&client, "alice").send().await.unwrap();
    // The deny cache may still know the answer.
    assert!([429, 503].contains(&unavailable.status().as_u16()));

    let arguments = fs::read_to_string(format!("/proc/{}/cmdline", proxy.pid().await)).unwrap();
    let captured: String = upstream.received().iter().map(|request| format!("{request:?}\n")).collect();
    let places = [
        ("the log", proxy.logs.all().iter().map(|line| format!("{line}\n")).collect::<String>()),
        ("the metrics", proxy.admin("/metrics").await.1),
        ("Redis", format!("{dump:?}")),
        ("the command line", arguments),
        ("what the upstream got", captured.clone()),
        ("the answers", answers),
    ];
    for (place, text) in &places {
        assert!(!text.is_empty(), "{place} was looked at");
        for secret in forbidden() {
            assert!(!text.contains(&secret), "{secret} is in {place}: {text}");
        }
        if *place != "what the upstream got" {
            assert!(!text.contains(CREDENTIAL), "the upstream's credential is in {place}: {text}");
        }
    }
    assert!(!dump.is_empty() && dump.iter().all(|(key, _)| key.contains("alice")), "{dump:?}");
    for request in upstream.received() {
        assert_eq!(request.header("authorization"), Some(&*format!("Bearer {CREDENTIAL}")));
        assert!(
            ["/v1/models", "/v1/models?a=b&c=d", "/v1/broken", "/v1/garbage", "/v1/chat/completions"]
                .contains(&&*request.target),
            "{}",
            request.target
        );
    }
    assert_eq!(proxy.logs.requests().len(), 44 + 20 + 1);
}
