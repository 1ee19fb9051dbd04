//! The pure parts of a request's path, one by one: `cargo bench --manifest-path benches/Cargo.toml`.
//!
//! They repeat to a few per cent where a whole request does not, so a change of one of them shows here first.

use std::{fmt::Write as _, hint::black_box, path::Path, sync::Arc, time::Duration};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use hyper::{HeaderMap, Request, header::HeaderValue, http::request::Parts};
use jiff::Timestamp;
use tollgate::{
    auth, config,
    dialect::Dialect,
    events::EventStream,
    headers::{self, PolicyField},
    keys::ApiKey,
    limit::{Limit, Status, Window, window::Logs},
    metrics::{KnownLabels, Metrics},
    policy::Policy,
    upstream::EndpointStates,
};

/// The secret of the `number`th key of [`policy`].
fn secret(number: usize) -> String {
    format!("sk-tg-key{number}-0123456789abcdef0123456789abcdef0123456789abcdef")
}

fn policy(keys: usize) -> Policy {
    let mut text = "[tiers.t]\nlimits = [{ requests = 100, per = \"1m\" }]\n\
                    [[upstreams]]\nname = \"u\"\nurl = \"http://127.0.0.1:1\"\npaths = [\"/v1\", \"/v1beta\"]\n"
        .to_owned();
    for number in 0..keys {
        let hash = ApiKey::new(&secret(number)).expect("it has the form of a key").hash();
        let _ = write!(text, "[[keys]]\nid = \"key{number}\"\nhash = \"{hash}\"\ntier = \"t\"\n");
    }
    let config =
        config::parse(&text, Path::new("proxy.toml"), &|_| None).expect("the configuration is valid");
    let states = EndpointStates::new(Arc::new(Metrics::new(false, &KnownLabels::default())));
    Policy::compile(&config, &states).expect("plain HTTP needs no certificates")
}

fn request(authorization: &str) -> Parts {
    let request = Request::post("/v1/chat/completions")
        .header("host", "localhost")
        .header("connection", "keep-alive")
        .header("accept", "application/json")
        .header("authorization", authorization)
        .header("content-type", "application/json")
        .header("x-stainless-lang", "python")
        .body(());
    request.expect("the parts are valid").into_parts().0
}

fn authenticate(c: &mut Criterion) {
    let mut group = c.benchmark_group("authenticate");
    for keys in [10, 10_000, 1_000_000] {
        let policy = policy(keys);
        let known = request(&format!("Bearer {}", secret(keys / 2)));
        let unknown = request("Bearer sk-tg-nobody-0123456789abcdef0123456789abcdef0123456789abcdef");
        let now = Timestamp::now();
        for (name, request) in [("known", known), ("unknown", unknown)] {
            group.bench_function(BenchmarkId::new(name, keys), |b| {
                b.iter(|| auth::authenticate(&policy.keys, black_box(&request), now).is_ok());
            });
        }
    }
}

fn route(c: &mut Criterion) {
    let policy = policy(0);
    for path in ["/v1/chat/completions", "/chat/completions", "/v1beta/models/m:generateContent"] {
        c.bench_function(&format!("route {path}"), |b| {
            b.iter(|| policy.routes.resolve("localhost", black_box(path)).is_ok());
        });
    }
}

fn limit(requests: u32, seconds: u64) -> Limit {
    let window = Window::new(Duration::from_secs(seconds)).expect("a window may be so long");
    Limit::new(requests.try_into().expect("it is not zero"), window)
}

fn head(c: &mut Criterion) {
    let limits = [limit(100, 60), limit(5000, 86_400)];
    let field = PolicyField::new(&limits);
    let status = |limit: u32, remaining: u32| Status {
        limit,
        remaining,
        reset_after: Duration::from_millis(12_345),
        over: false,
    };
    let statuses = [status(100, 42), status(5000, 4321)];
    c.bench_function("headers of two limits", |b| {
        b.iter(|| {
            let mut fields = HeaderMap::new();
            headers::set_statuses(&mut fields, &field, black_box(&statuses));
            fields
        });
    });
    let request = request("Bearer x");
    c.bench_function("remove hop-by-hop fields", |b| {
        b.iter_batched(
            || request.headers.clone(),
            |mut fields| {
                headers::remove_hop_by_hop(&mut fields);
                fields
            },
            criterion::BatchSize::SmallInput,
        );
    });
}

fn window(c: &mut Criterion) {
    let mut group = c.benchmark_group("window");
    for count in [1, 10] {
        let limits: Vec<_> = (0..count).map(|n| limit(1000, 60 + n)).collect();
        // A steady caller at its limit: each admission lets one leave.
        let (mut logs, mut now) = (Logs::default(), 1);
        group.bench_function(BenchmarkId::new("decide, limits", count), |b| {
            b.iter(|| {
                now += 70_000;
                logs.decide(black_box(&limits), now)
            });
        });
    }
}

/// What it takes to know, after each piece of a stream, whether it stands between two events.
fn events(c: &mut Criterion) {
    let mut head = HeaderMap::new();
    head.insert("content-type", HeaderValue::from_static("text/event-stream"));
    let mut stream = EventStream::of_answer(&head, Dialect::Openai, "/v1/chat/completions")
        .expect("the head is an event stream's");
    let piece =
        b"data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"word \"},\"finish_reason\":null}]}\n\n";
    c.bench_function("a piece of an event stream", |b| b.iter(|| stream.passed(black_box(piece))));
}

criterion_group!(benches, authenticate, route, head, window, events);
criterion_main!(benches);
