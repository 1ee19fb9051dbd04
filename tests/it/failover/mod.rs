//! Several endpoints and fallbacks: which one gets a request, what is tried again elsewhere, and what never is.

mod bodies;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use redis::Commands;
use reqwest::{Client, Response};
use serde_json::Value;

use crate::{
    harness::{
        Gate, Plain, Proxy, ProxyBuilder, Redis, Script, Upstream, Wire, header, patiently, rest_of, secret,
    },
    reload::reload,
};

const LIMITS: &str = r#"{ requests = 1000, per = "1h" }"#;

/// Before these endpoints, with a key `alice` and more lines for the upstream.
fn before(urls: &[String], lines: &str) -> ProxyBuilder {
    ProxyBuilder::before_endpoints(urls).upstream(lines).tier("alice", LIMITS)
}

fn of(upstreams: &[&Upstream]) -> Vec<String> {
    upstreams.iter().map(|upstream| upstream.url()).collect()
}

/// An address at which connections are refused.
async fn nobody() -> String {
    let wire = Wire::listen().await;
    let url = wire.url();
    wire.close();
    url
}

async fn post(proxy: &Proxy, client: &Client, path: &str, body: impl Into<reqwest::Body>) -> Response {
    let request = client.post(proxy.url(path)).bearer_auth(secret("alice")).body(body).send();
    patiently("the head of an answer", request).await.unwrap()
}

/// Posts to one path after the other until a request took two attempts; its line.
async fn until_tried_twice(proxy: &Proxy) -> Value {
    let client = proxy.client();
    for n in 0..100 {
        let path = format!("/v1/until-{n}");
        post(proxy, &client, &path, "{}").await.bytes().await.unwrap();
        let line = proxy.logs.request(&path).await;
        if line["attempts"] == 2 {
            return line;
        }
    }
    panic!("each request was answered by the first that was asked");
}

fn attempts(endpoint: &str, outcome: &str) -> String {
    format!(
        "tollgate_upstream_attempts_total{{upstream=\"llm\",endpoint=\"{endpoint}\",outcome=\"{outcome}\"}}"
    )
}

async fn is_available(proxy: &Proxy, endpoint: &str) -> bool {
    let series = format!("tollgate_upstream_endpoint_available{{upstream=\"llm\",endpoint=\"{endpoint}\"}}");
    proxy.metric(&series).await == 1.0
}

async fn said(proxy: &Proxy, message: &str) -> Value {
    let line = proxy.logs.wait_for(message, |line| line["fields"]["message"] == message).await;
    line["fields"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_nobody_takes_goes_to_the_next_endpoint() {
    let good = Upstream::ok().await;
    let proxy = before(&[nobody().await, good.url()], "").start().await;
    let line = until_tried_twice(&proxy).await;
    assert_eq!((&line["status"], &line["endpoint"]), (&200.into(), &"e1".into()));
    assert_eq!(line["fallback"], Value::Null);
    assert_eq!(proxy.metric(&attempts("e0", "connect")).await, 1.0);
    assert_eq!(proxy.metric(&attempts("e1", "answered")).await, good.received().len() as f64);
    let told = said(&proxy, "an endpoint fails and is left out").await;
    assert_eq!((&told["upstream"], &told["endpoint"]), (&"llm".into(), &"e0".into()));
    assert!(is_available(&proxy, "e1").await);
}

/// What a provider wants of the key that one client brings is no reason to leave an endpoint out for others.
#[tokio::test(flavor = "multi_thread")]
async fn a_pause_for_a_clients_own_key_keeps_nobody_else_away() {
    let busy = Upstream::start(|_| {
        Script::new().send("HTTP/1.1 429 No\r\nretry-after: 3600\r\ncontent-length: 2\r\n\r\n{}")
    })
    .await;
    let good = Upstream::ok().await;
    let proxy = before(&of(&[&busy, &good]), "").start().await;
    let client = proxy.client();
    let asks_both = async {
        while busy.received().len() < 2 {
            let request = client.post(proxy.url("/v1/x")).header("x-api-key", secret("alice"));
            let answer = request.bearer_auth("their-own").body("{}").send().await.unwrap();
            assert_eq!(answer.status(), 200);
        }
    };
    patiently("a second 429", asks_both).await;
    assert!(is_available(&proxy, "e0").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failing_status_is_tried_elsewhere_and_no_other_one() {
    let bad = Upstream::start(|request| {
        Script::json(request.target.rsplit('/').next().unwrap().parse().unwrap(), "{}")
    })
    .await;
    let good = Upstream::ok().await;
    // Those that fail are left out after three of them, so each status has a proxy of its own.
    for (status, given) in
        [(500, 200), (502, 200), (503, 200), (504, 200), (529, 200), (501, 501), (400, 400)]
    {
        let proxy = before(&of(&[&bad, &good]), "").start().await;
        let client = proxy.client();
        let before = bad.received().len();
        let answer = loop {
            let answer = post(&proxy, &client, &format!("/v1/{status}"), "{}").await;
            if bad.received().len() > before {
                break answer;
            }
        };
        assert_eq!(answer.status(), given, "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_providers_pause_is_kept_and_a_request_counts_once() {
    for pause in
        ["retry-after: 3600", "retry-after-ms: 3600000", "retry-after: Fri, 31 Dec 2100 23:59:59 GMT"]
    {
        let busy = Upstream::start(move |_| {
            Script::new()
                .send(format!("HTTP/1.1 429 Too Many Requests\r\n{pause}\r\ncontent-length: 2\r\n\r\n{{}}"))
        })
        .await;
        let good = Upstream::ok().await;
        let proxy = before(&of(&[&busy, &good]), "").start().await;
        let client = proxy.client();
        for n in 1..=40 {
            let answer = post(&proxy, &client, "/v1/x", "{}").await;
            assert_eq!(answer.status(), 200, "{pause}");
            assert_eq!(header(&answer, "x-ratelimit-remaining"), (1000 - n).to_string());
        }
        assert_eq!((busy.received().len(), good.received().len()), (1, 40), "{pause}");
        assert!(!is_available(&proxy, "e0").await);
        assert_eq!(proxy.metric(&attempts("e0", "429")).await, 1.0);
        let told = said(&proxy, "an endpoint is over its provider's limit and is left out").await;
        assert_eq!(told["pause"], "60s", "it is bounded: {told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_nothing_betters_is_passed_on_as_it_is() {
    const BUSY: &str = "HTTP/1.1 429 Slow Down\r\nretry-after: 37\r\nx-vendor: theirs\r\n\
                        content-type: application/json\r\ncontent-length: 14\r\n\r\n{\"scripted\":1}";
    let busy = || Upstream::start(|_| Script::new().send(BUSY));
    let (one, two) = (busy().await, busy().await);
    for urls in [of(&[&one, &two]), vec![one.url(), nobody().await], vec![two.url()]] {
        let lines = if urls.len() == 1 { "retry = {}" } else { "" };
        let proxy = before(&urls, lines).start().await;
        let answer = post(&proxy, &proxy.client(), "/v1/x", "{}").await;
        assert_eq!(answer.status(), 429);
        assert_eq!((header(&answer, "retry-after"), header(&answer, "x-vendor")), ("37", "theirs"));
        assert!(!answer.headers().contains_key("x-ratelimit-source"), "it is not ours");
        assert_eq!(header(&answer, "x-ratelimit-remaining"), "999");
        assert_eq!(answer.text().await.unwrap(), "{\"scripted\":1}");
        let line = proxy.logs.request("/v1/x").await;
        assert_eq!(line["attempts"], 2, "{urls:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silence_and_broken_connections_are_tried_again_where_that_is_wanted() {
    for (on, wanted) in [("timeout", Script::new().hang()), ("broken", Script::new().close())] {
        let bad = Upstream::start(move |_| wanted.clone()).await;
        let good = Upstream::ok().await;
        let lines =
            format!("first_byte_timeout = \"300ms\"\nretry = {{ on = [\"{on}\"], within = \"60s\" }}");
        let proxy = before(&of(&[&bad, &good]), &lines).start().await;
        let line = until_tried_twice(&proxy).await;
        assert_eq!((&line["status"], &line["endpoint"]), (&200.into(), &"e1".into()), "{on}");
        assert_eq!(proxy.metric(&attempts("e0", on)).await, 1.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_tried_again_after_a_byte_of_an_answer() {
    for begun in ["HTTP/1.1 200 OK\r\ncontent-le", "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nbeg"] {
        let bad = || Upstream::start(move |_| Script::new().send(begun).close());
        let (one, two) = (bad().await, bad().await);
        let proxy =
            before(&of(&[&one, &two]), "retry = { on = [\"timeout\", \"broken\", \"5xx\"] }").start().await;
        let mut answer = post(&proxy, &proxy.client(), "/v1/x", "{}").await;
        let ends_well = answer.status() == 200 && rest_of(&mut answer).await.is_ok();
        assert!(!ends_well, "{begun}");
        assert_eq!(one.received().len() + two.received().len(), 1, "{begun}");
        assert_eq!(proxy.logs.request("/v1/x").await["attempts"], 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_tried_for_a_client_that_is_gone() {
    let silent = || Upstream::start(|_| Script::new().hang());
    let (one, two) = (silent().await, silent().await);
    let proxy = before(&of(&[&one, &two]), "retry = { on = [\"broken\", \"timeout\"] }").start().await;
    let mut client = Plain::connect(&proxy).await;
    client.request("GET /v1/x", "alice", "").await;
    let (first, second) = tokio::select! {
        _ = one.next_request() => (&one, &two),
        _ = two.next_request() => (&two, &one),
    };
    client.reset();
    first.next_closed().await;
    let line = proxy.logs.request("/v1/x").await;
    assert_eq!((&line["outcome"], &line["attempts"]), (&"client_gone".into(), &1.into()));
    assert_eq!(second.connections(), 0);
    let gone =
        proxy.metric(&attempts("e0", "abandoned")).await + proxy.metric(&attempts("e1", "abandoned")).await;
    assert_eq!(gone, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_attempt_begins_after_its_time() {
    let gate = Gate::default();
    let held = gate.clone();
    let slow = move |_: &_| Script::json(500, "{}").wait_before_last(&held);
    let (one, two) = (Upstream::start(slow.clone()).await, Upstream::start(slow).await);
    let proxy = before(&of(&[&one, &two]), "retry = { within = \"100ms\" }").start().await;
    let client = proxy.client();
    let answer = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        gate.open();
    };
    let (answer, ()) = tokio::join!(post(&proxy, &client, "/v1/x", "{}"), answer);
    assert_eq!(answer.status(), 500);
    assert_eq!(one.received().len() + two.received().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fallback_gets_what_nobody_else_takes_with_its_own_credential() {
    let spare = Upstream::ok().await;
    let fallback = format!(
        "[[upstreams]]\nname = \"spare\"\nurl = \"{}/base\"\ncredential = {{ header = \"x-api-key\", value = \"spares\" }}",
        spare.url()
    );
    let credential =
        "credential = { header = \"authorization\", value = \"Bearer first\" }\nfallback = \"spare\"";
    let proxy = before(&[nobody().await, nobody().await], credential).section(&fallback).start().await;
    let client = proxy.client();
    let answer = post(&proxy, &client, "/v1/x?a=b", "{}").await;
    assert_eq!(answer.status(), 200);
    let [request] = &spare.received()[..] else { panic!("one request") };
    assert_eq!((&*request.target, request.header("x-api-key")), ("/base/v1/x?a=b", Some("spares")));
    assert_eq!((request.header("authorization"), &*request.body), (None, &b"{}"[..]));
    let line = proxy.logs.request("/v1/x").await;
    assert_eq!(
        (&line["route"], &line["fallback"], &line["attempts"]),
        (&"llm".into(), &"spare".into(), &3.into())
    );
    post(&proxy, &client, "/v1/y", "{}").await;
    let line = proxy.logs.request("/v1/y").await;
    assert_eq!(
        (&line["fallback"], &line["attempts"]),
        (&"spare".into(), &1.into()),
        "the others are left out"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_never_fails_by_a_guess() {
    let (one, two) = (Upstream::ok().await, Upstream::ok().await);
    let urls = of(&[&one, &two]);
    let addresses = [one.kill().await, two.kill().await];
    let proxy = before(&urls, "").start().await;
    let client = proxy.client();
    assert_eq!(post(&proxy, &client, "/v1/x", "{}").await.status(), 502);
    for endpoint in ["e0", "e1"] {
        assert_eq!(proxy.metric(&attempts(endpoint, "connect")).await, 1.0);
    }
    let ok = |_: &_| Script::json(200, "{}");
    let _back = [Upstream::start_at(addresses[0], ok).await, Upstream::start_at(addresses[1], ok).await];
    assert_eq!(post(&proxy, &client, "/v1/x", "{}").await.status(), 200);
    said(&proxy, "an endpoint answers again").await;
    assert!(is_available(&proxy, "e0").await || is_available(&proxy, "e1").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_spread_by_weight() {
    for (weights, expected) in [([1, 1], [4, 4]), ([1, 3], [2, 6])] {
        let gate = Gate::default();
        let script = Script::sse().event("one").wait(&gate).end();
        let behaviour = move |_: &_| script.clone();
        let (one, two) = (Upstream::start(behaviour.clone()).await, Upstream::start(behaviour).await);
        let endpoint = |upstream: &Upstream, weight: u32| {
            format!("[[upstreams.endpoints]]\nurl = \"{}\"\nweight = {weight}\n", upstream.url())
        };
        let endpoints = format!("{}{}", endpoint(&one, weights[0]), endpoint(&two, weights[1]));
        let proxy = ProxyBuilder::default()
            .tier("alice", LIMITS)
            .section(&format!("[[upstreams]]\nname = \"llm\"\n{endpoints}"))
            .start()
            .await;
        // Several connections, so that both workers have some.
        let mut streams = Vec::new();
        for _ in 0..8 {
            streams.push(post(&proxy, &proxy.client(), "/v1/x", "{}").await);
        }
        assert_eq!([one.received().len(), two.received().len()], expected, "{weights:?}");
        gate.open();
        for mut stream in streams {
            rest_of(&mut stream).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_forgets_nothing_about_an_endpoint_that_stays() {
    let busy = Upstream::start(|_| {
        Script::new().send("HTTP/1.1 429 X\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n")
    })
    .await;
    let good = Upstream::ok().await;
    let builder = before(&of(&[&busy, &good]), "");
    let proxy = builder.clone().start().await;
    until_tried_twice(&proxy).await;
    proxy.write_config(&builder.tier("bob", LIMITS));
    reload(&proxy, "reloaded").await;
    let client = proxy.client();
    for _ in 0..30 {
        assert_eq!(post(&proxy, &client, "/v1/x", "{}").await.status(), 200);
    }
    assert_eq!(busy.received().len(), 1);
    let other = before(&of(&[&good, &good]), "");
    proxy.write_config(&other);
    reload(&proxy, "reloaded").await;
    let (_, metrics) = proxy.admin("/metrics").await;
    assert_eq!(
        metrics.matches("tollgate_upstream_endpoint_available{").count(),
        2,
        "what is gone is not shown"
    );
    assert!(is_available(&proxy, "e0").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn all_replicas_keep_a_pause_that_one_was_told_of() {
    let busy = Upstream::start(|_| {
        Script::new().send("HTTP/1.1 429 X\r\nretry-after: 50\r\ncontent-length: 0\r\n\r\n")
    })
    .await;
    let (good, mut redis) = (Upstream::ok().await, Redis::start().await);
    let builder = before(&of(&[&busy, &good]), "").redis(&redis.url(), "on_store_failure = \"local\"");
    let (told, hearing) = (builder.clone().start().await, builder.start().await);
    until_tried_twice(&told).await;
    let heard = said(&hearing, "an endpoint is over its provider's limit and is left out").await;
    assert_eq!(heard["endpoint"], "e0");
    let client = hearing.client();
    for _ in 0..30 {
        assert_eq!(post(&hearing, &client, "/v1/x", "{}").await.status(), 200);
    }
    assert_eq!(busy.received().len(), 1, "the other one has never asked");
    let pauses = "ratelimit:{~cooldowns}:1";
    let names: Vec<String> = redis.connection().zrange(pauses, 0, -1).unwrap();
    assert_eq!(names, ["llm/e0"]);
    let expires_in: i64 = redis.connection().pttl(pauses).unwrap();
    assert!((1..=51_000).contains(&expires_in), "{expires_in} ms");
    redis.kill().await;
    assert_eq!(post(&hearing, &client, "/v1/x", "{}").await.status(), 200);
    assert_eq!(busy.received().len(), 1, "what was heard stays known");
}

/// What a killed endpoint had taken is asked of the other one, and when it is back it takes its part again.
#[tokio::test(flavor = "multi_thread")]
async fn nobody_notices_that_endpoints_die_and_come_back() {
    const CLIENTS: usize = 8;
    let served = Arc::new(AtomicUsize::new(0));
    let behaviour = {
        let served = served.clone();
        move |_: &_| {
            served.fetch_add(1, Relaxed);
            Script::json(200, "{}")
        }
    };
    let mut upstreams =
        [Some(Upstream::start(behaviour.clone()).await), Some(Upstream::start(behaviour.clone()).await)];
    let urls: Vec<_> = upstreams.iter().flatten().map(Upstream::url).collect();
    let on = "retry = { on = [\"connect\", \"broken\"], within = \"60s\" }";
    let proxy = Arc::new(before(&urls, on).tier("bob", "").start().await);
    let done = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let (proxy, done) = (proxy.clone(), done.clone());
        clients.spawn(async move {
            let (client, mut sent) = (proxy.client(), 0);
            while !done.load(Relaxed) {
                let answer = patiently("an answer", proxy.chat(&client, "bob").send()).await.unwrap();
                assert_eq!(answer.status(), 200, "request {sent}");
                assert_eq!(answer.text().await.unwrap(), "{}");
                sent += 1;
            }
            sent
        });
    }
    for round in 0..4 {
        serves(&served, 100).await;
        let killed = &mut upstreams[round % 2];
        let address = killed.take().unwrap().kill().await;
        serves(&served, 100).await;
        let back = Upstream::start_at(address, behaviour.clone()).await;
        patiently("a request after the restart", back.next_request()).await;
        upstreams[round % 2] = Some(back);
    }
    done.store(true, Relaxed);
    let sent: usize = patiently("the clients", clients.join_all()).await.into_iter().sum();
    assert!(sent >= 800, "{sent} requests");
    let counted = ["e0", "e1"].map(|endpoint| attempts(endpoint, "answered"));
    let answered = proxy.metric(&counted[0]).await + proxy.metric(&counted[1]).await;
    assert_eq!(answered, sent as f64);
}

/// Waits until so many more requests were served.
async fn serves(served: &AtomicUsize, more: usize) {
    let target = served.load(Relaxed) + more;
    let reached = async {
        while served.load(Relaxed) < target {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    patiently("requests to be served", reached).await;
}
