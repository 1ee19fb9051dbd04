//! The configuration as a whole: files that are right or wrong, and every problem in them at its line and column. What a
//! fixture is to be told stands at its top.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use tollgate::{
    config::{
        problems::{Position, Problems},
        *,
    },
    dialect::Dialect,
    limit::redis::topology::Topology,
    media::{SizeBounds, UNBOUNDED},
    uncounted::Uncounted,
};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/config");

fn environment(name: &str) -> Option<String> {
    match name {
        "OPENAI_API_KEY" => Some("sk-PLANTED-variable".to_owned()),
        "REDIS_PASSWORD" => Some("PLANTED".to_owned()),
        "TRAILING_NEWLINE" => Some("PLANTED\n".to_owned()),
        "HOST" => Some("backend".to_owned()),
        "EMPTY" => Some(String::new()),
        _ => None,
    }
}

fn fixtures(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(Path::new(FIXTURES).join(folder)).unwrap();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty(), "no fixtures in {folder}");
    files
}

fn parse_file(path: &Path) -> (String, Result<Config, Problems>) {
    let text = fs::read_to_string(path).unwrap();
    let config = parse(&text, path, &environment);
    (text, config)
}

/// The lines `#! LINE:COLUMN TEXT` at the top of a fixture.
fn expected(text: &str) -> Vec<(usize, usize, &str)> {
    let lines = text.lines().map_while(|line| line.strip_prefix("#! "));
    lines
        .map(|line| {
            let (place, text) = line.split_once(' ').unwrap();
            let (line, column) = place.split_once(':').unwrap();
            (line.parse().unwrap(), column.parse().unwrap(), text)
        })
        .collect()
}

#[test]
fn every_invalid_file_has_exactly_the_problems_it_states() {
    for path in fixtures("invalid") {
        let (text, config) = parse_file(&path);
        let problems = config.expect_err("an invalid fixture was accepted");
        let shown = problems.to_string();
        let expected = expected(&text);
        assert_eq!(problems.list().len(), expected.len(), "{shown}");
        for (problem, (line, column, text)) in problems.list().iter().zip(expected) {
            assert_eq!(problem.at, Some(Position { line, column }), "{shown}");
            assert!(problem.message.contains(text), "`{text}` is not in\n{shown}");
        }
    }
}

#[test]
fn no_message_repeats_a_secret() {
    let mut planted = 0;
    for path in fixtures("invalid") {
        let (text, config) = parse_file(&path);
        let problems = config.unwrap_err();
        assert!(!format!("{problems} {problems:?}").contains("PLANTED"), "{problems}");
        planted += text.matches("PLANTED").count();
    }
    assert!(planted > 10, "only {planted} secrets were planted");
}

#[test]
fn valid_files_are_accepted() {
    for path in fixtures("valid") {
        let config = parse_file(&path).1.unwrap_or_else(|problems| panic!("{problems}"));
        assert!(!format!("{config:?}").contains("PLANTED"));
    }
}

#[test]
fn the_shipped_file_runs_as_it_is() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("proxy.toml");
    let text = fs::read_to_string(&path).unwrap();
    let config = parse(&text, &path, &|_| None).unwrap_or_else(|problems| panic!("{problems}"));
    let tiers: Vec<_> = config.tiers.iter().map(|tier| (&*tier.name, tier.limits.len())).collect();
    assert_eq!(tiers, [("free", 1), ("paid", 2), ("enterprise", 1)]);
    assert!(matches!(config.limiter.store, Store::Memory));
    assert!(config.keys.is_empty());
    assert!(config.upstreams[0].endpoints[0].credential.is_none());
}

/// What the shipped file shows in comments is right, too.
#[test]
fn the_shipped_examples_are_valid() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("proxy.toml");
    let text = fs::read_to_string(&path).unwrap();
    let examples: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("# ")).collect();
    let is_setting = |line: &&&str| line.starts_with("[[") || line.contains(" = ") && !line.contains("`");
    let upstream = examples.iter().position(|line| *line == "[[upstreams]]").unwrap();
    let settings: Vec<_> = examples[upstream..].iter().filter(is_setting).copied().collect();
    let example = format!("[tiers]\nfree.limits = []\n{}", settings.join("\n"));
    let config =
        parse(&example, &path, &|_| Some("x".to_owned())).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!((config.upstreams.len(), config.keys.len()), (3, 1), "{example}");
}

#[test]
fn what_is_left_out_has_its_default() {
    let config = parse_file(&Path::new(FIXTURES).join("valid/smallest.toml")).1.unwrap();
    let Server { listen, drain_timeout, body_sizes, public_url, tls, bounds, .. } = config.server;
    assert_eq!(public_url, None);
    assert_eq!(listen, ["[::]:8443".parse().unwrap()]);
    assert_eq!(drain_timeout, Duration::from_secs(600));
    assert!(tls.certificate.ends_with("valid/certs/server.crt"), "{}", tls.certificate.display());
    assert_eq!((bounds.max_connections, bounds.max_connections_per_ip), (10_000, 1000));
    assert_eq!((bounds.max_header_size, bounds.max_headers), (64 << 10, 256));
    assert_eq!(bounds.model_lookahead, 8 << 20);
    assert_eq!(body_sizes, SizeBounds { text: 64 << 20, file: 512 << 20 });
    assert_eq!(bounds.idle_timeout, Duration::from_secs(75));
    let admin = config.admin.unwrap();
    assert_eq!((admin.listen, admin.key_labels), ("127.0.0.1:9090".parse().unwrap(), false));
    assert_eq!((&*config.log.level, config.log.format), ("info", LogFormat::Text));
    assert_eq!((config.limiter.on_store_failure, config.limiter.replicas), (OnStoreFailure::Local, None));
    assert!(config.cors.is_none() && config.limiter.uncounted == Uncounted::default());
    let [upstream] = &config.upstreams[..] else { panic!("one upstream") };
    assert_eq!((&*upstream.paths, upstream.strip_prefix.as_deref()), (&["/".to_owned()][..], None));
    assert_eq!((&upstream.matches, upstream.body_sizes), (&Match::default(), body_sizes));
    assert_eq!(upstream.connection.connect_timeout, Duration::from_secs(5));
    assert_eq!(upstream.connection.pool_idle_timeout, Duration::from_secs(10));
    assert_eq!(upstream.connection.max_answer_header_size, 64 << 10);
    assert_eq!((upstream.websocket, upstream.websocket_idle_timeout), (true, Duration::from_secs(3600)));
    assert!(upstream.dialect.is_none() && upstream.connection.ca_file.is_none());
    assert!(upstream.endpoints.len() == 1 && upstream.endpoints[0].credential.is_none());
}

#[test]
fn what_is_written_is_read() {
    let config = parse_file(&Path::new(FIXTURES).join("valid/everything.toml")).1.unwrap();
    let Server { listen, workers, drain_timeout, body_sizes, public_url, tls, bounds } = config.server;
    assert_eq!(public_url.as_deref(), Some("https://LLM.example.com:8443"));
    assert_eq!((listen.len(), workers.get(), drain_timeout), (4, 2, Duration::ZERO));
    assert!(tls.certificate.ends_with("config/valid/a.crt"));
    assert_eq!(tls.private_key, Path::new("/b.key"));
    assert_eq!(tls.client_ca_file.as_deref(), Some(Path::new("/clients.pem")));
    assert_eq!((bounds.max_connections_per_ip, bounds.max_headers), (0, 300));
    assert_eq!(bounds.max_header_size, 0x4000);
    assert_eq!((bounds.model_lookahead, bounds.write_timeout), (64 << 10, Duration::from_secs(5)));
    assert_eq!(body_sizes, SizeBounds { text: 1 << 30, file: UNBOUNDED });
    let cors = config.cors.unwrap();
    assert_eq!((cors.origins.len(), cors.max_age, cors.credentials), (2, Duration::from_secs(3600), true));
    assert_eq!(config.limiter.uncounted, ["/v1/files/*".parse().unwrap()].into_iter().collect());
    let [upstream, other, ..] = &config.upstreams[..] else { panic!("several upstreams") };
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    assert_eq!((upstream.total_timeout, upstream.keepalive), (seconds(18_000), seconds(15)));
    assert_eq!((other.total_timeout, other.keepalive), (None, None));
    let Store::Redis(redis) = config.limiter.store else { panic!("redis") };
    let whole = Topology::Single("rediss://:PLANTED@redis:6379/0".parse().unwrap());
    assert_eq!((redis.topology, redis.timeout), (whole, Duration::from_millis(20)));
}

#[test]
fn connections_are_read() {
    let config = parse_file(&Path::new(FIXTURES).join("valid/everything.toml")).1.unwrap();
    let Connection { http2, ca_file, client_certificate, server_name, proxy, tls_timeout, .. } =
        config.upstreams[0].connection.clone();
    assert!(http2 && ca_file.is_some());
    assert_eq!(client_certificate.unwrap().private_key, Path::new("/client.key"));
    assert_eq!(server_name.as_deref(), Some("llm.internal"));
    assert_eq!(tls_timeout, Some(Duration::from_secs(1)));
    let Proxying::Through(Proxy { authority, authorization: Some(_) }) = proxy else { panic!("a proxy") };
    assert_eq!(authority, "proxy.internal:3128");
    assert_eq!(config.upstreams[1].connection.proxy, Proxying::Direct);
    assert!(matches!(config.upstreams[2].connection.proxy, Proxying::Environment(_)));
}

#[test]
fn a_proxy_of_the_environment_that_is_wrong_is_reported_where_it_would_be_used() {
    let text = "[tiers]\nfree.limits = []\n[[upstreams]]\nname = \"llm\"\n";
    let problems = |url: &str, more: &str| {
        let environment = |name: &str| match name {
            "https_proxy" => Some("socks5://ada:PLANTED@proxy:1080".to_owned()),
            "NO_PROXY" => Some("internal".to_owned()),
            _ => None,
        };
        let text = format!("{text}url = \"{url}\"\n{more}\n");
        parse(&text, Path::new("proxy.toml"), &environment).map_err(|problems| problems.to_string()).err()
    };
    let shown = problems("https://api.example", "").expect("the proxy is no HTTP proxy");
    assert!(shown.contains("environment variable `https_proxy`") && !shown.contains("PLANTED"), "{shown}");
    for (url, more) in [
        ("https://llm.internal", ""),
        ("http://api.example", ""),
        ("https://localhost", ""),
        ("https://api.example", "proxy = \"none\""),
    ] {
        assert_eq!(problems(url, more), None, "{url} {more}");
    }
}

fn redis_of(file: &str) -> Redis {
    match parse_file(&Path::new(FIXTURES).join(file)).1.unwrap().limiter.store {
        Store::Redis(redis) => redis,
        Store::Memory => panic!("{file} counts in Redis"),
    }
}

#[test]
fn every_topology_is_read() {
    let cluster = redis_of("valid/redis-cluster.toml");
    let endpoints: Vec<_> =
        cluster.topology.servers().iter().map(|server| server.endpoint.to_string()).collect();
    assert_eq!(endpoints, ["10.0.0.1:7000", "::1:7001"]);
    let login = cluster.topology.login();
    assert_eq!((login.username.as_deref(), login.password.as_deref()), (Some("tollgate"), Some("PLANTED")));
    assert!(cluster.topology.is_encrypted() && cluster.ca_file.unwrap().ends_with("valid/ca.pem"));
    assert!(cluster.client_certificate.unwrap().private_key.ends_with("valid/client.key"));
    let Topology::Sentinel { primary, sentinels, login } = redis_of("valid/redis-sentinel.toml").topology
    else {
        panic!("Sentinels")
    };
    assert_eq!((&*primary, login.database, login.password.as_deref()), ("mymaster", 2, Some("PLANTED-file")));
    let endpoints: Vec<_> = sentinels.iter().map(|server| server.endpoint.to_string()).collect();
    assert_eq!(endpoints, ["one:26379", "two:7000"]);
    assert_eq!(sentinels[0].login.password.as_deref(), Some("of-sentinels-PLANTED"));
}

#[test]
fn keys_point_at_their_tiers() {
    let config = parse_file(&Path::new(FIXTURES).join("valid/everything.toml")).1.unwrap();
    let tiers: Vec<_> = config.tiers.iter().map(|tier| &*tier.name).collect();
    assert_eq!(tiers, ["free", "paid", "enterprise", "internal"]);
    let paid = &config.tiers[1].limits;
    let day = Duration::from_secs(86_400);
    assert_eq!((paid[2].requests.get(), paid[2].window.length()), (u32::MAX, 366 * day));
    assert_eq!([paid[0].count_refused, paid[1].count_refused], [false, true]);
    let [alice, bob] = &config.keys[..] else { panic!("two keys") };
    assert_eq!((alice.id.as_str(), alice.tier, alice.disabled), ("alice", 1, false));
    assert_eq!((bob.id.as_str(), bob.tier, bob.disabled), ("bob", 3, true));
    assert_eq!(alice.expires, bob.expires, "both are midnight in UTC");
    assert_eq!(alice.expires, Some("2027-01-01T00:00:00Z".parse().unwrap()));
    assert!(alice.limits.is_none());
    assert_eq!(bob.limits.as_ref().unwrap()[0].window.length(), Duration::from_secs(7200));
}

#[test]
fn upstreams_are_complete() {
    let config = parse_file(&Path::new(FIXTURES).join("valid/everything.toml")).1.unwrap();
    let [openai, local, beta, eu, ..] = &config.upstreams[..] else { panic!("four upstreams") };
    assert_eq!(openai.paths, ["/v1", "/openai"]);
    assert_eq!(openai.body_sizes, SizeBounds { text: UNBOUNDED, file: 2 << 30 });
    assert_eq!(local.body_sizes, config.server.body_sizes);
    assert_eq!(beta.strip_prefix.as_deref(), Some("/v1"));
    assert!(
        eu.matches.hosts.iter().all(|host| host.matches("eu.example.com") || host.matches("a.example.org"))
    );
    assert!((eu.matches.models.len(), eu.matches.hosts.len()) == (1, 2) && eu.paths == ["/"]);
    assert_eq!(openai.dialect, Some(Dialect::Openai));
    assert_eq!(openai.idle_timeout, Duration::from_secs(3 * 3600));
    assert_eq!(openai.connection.max_answer_header_size, 128 << 10);
    assert!(openai.header_rules.forwarded && openai.header_rules.via);
    assert_eq!(openai.header_rules.hide, ["x-ratelimit-*".parse().unwrap()].into_iter().collect());
    assert_eq!(local.header_rules, HeaderRules::default());
    assert_eq!((openai.websocket, openai.websocket_idle_timeout), (false, Duration::from_secs(2 * 3600)));
    let credential = openai.endpoints[0].credential.as_ref().unwrap();
    assert_eq!(
        (credential.header.as_str(), credential.value.to_str().unwrap()),
        ("authorization", "Bearer sk-PLANTED-variable")
    );
    assert!(credential.value.is_sensitive());
    assert_eq!(local.endpoints[0].credential.as_ref().unwrap().value, "sk-PLANTED-file");
    assert_eq!((local.endpoints[0].url.path(), beta.endpoints[0].url.host()), ("/base", Some("backend")));
    assert!(openai.connection.ca_file.as_ref().unwrap().ends_with("valid/../ca.pem"));
}

#[test]
fn several_endpoints_and_a_fallback_are_read() {
    let config = parse_file(&Path::new(FIXTURES).join("valid/everything.toml")).1.unwrap();
    let [.., several, spare] = &config.upstreams[..] else { panic!("two upstreams") };
    let endpoint = |endpoint: &Endpoint| {
        let credential = endpoint.credential.as_ref().unwrap();
        (endpoint.name.to_string(), endpoint.weight.get(), credential.value.to_str().unwrap().to_owned())
    };
    assert_eq!(
        several.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        [
            ("one.example.com".to_owned(), 1, "PLANTED-several".to_owned()),
            ("two".to_owned(), 3, "Bearer PLANTED-two".to_owned()),
            ("one.example.com#2".to_owned(), 1, "PLANTED-several".to_owned()),
        ]
    );
    let retry = several.retry.as_ref().unwrap();
    assert_eq!((retry.attempts.get(), retry.on.len(), retry.max_body), (3, 5, 64 << 10));
    assert_eq!(retry.within, Duration::from_secs(2));
    assert_eq!(several.fallback, Some(config.upstreams.len() - 1));
    assert!(spare.stands_in && spare.paths.is_empty() && spare.retry.is_none());
}

#[test]
fn a_choice_is_made_use_of_unless_something_else_is_said() {
    let read = |lines: &str| {
        let text = format!("upstreams = [{lines}]");
        parse(&text, Path::new("proxy.toml"), &|_| None)
            .unwrap_or_else(|problems| panic!("{problems}"))
            .upstreams
    };
    assert_eq!(read(r#"{ name = "a", url = "http://b" }"#)[0].retry, None);
    let several = read(r#"{ name = "a", endpoints = [{ url = "http://b" }, { url = "http://c" }] }"#);
    assert_eq!(several[0].retry, Some(Retry::default()));
    let spared =
        read(r#"{ name = "a", url = "http://b", fallback = "c" }, { name = "c", url = "http://d" }"#);
    assert_eq!((&spared[0].retry, spared[0].fallback), (&Some(Retry::default()), Some(1)));
    assert_eq!((&spared[0].paths[..], &spared[1].paths[..]), (&["/".to_owned()][..], &[][..]));
}

#[test]
fn the_admin_listener_can_be_off() {
    let path = Path::new("proxy.toml");
    let text = "admin.enabled = false\nupstreams = [{ name = \"a\", url = \"http://b\" }]";
    let config = parse(text, path, &|_| None).unwrap();
    assert!(config.admin.is_none());
    assert_eq!(config.server.tls.certificate, Path::new("certs/server.crt"));
}

#[test]
fn a_file_that_is_not_there_is_a_problem_with_a_way_out() {
    let problems = load(Path::new("/nowhere/proxy.toml")).unwrap_err();
    let [problem] = problems.list() else { panic!("{problems}") };
    assert_eq!(problem.at, None);
    assert!(problem.message.contains("--config") && problem.message.contains("No such file"), "{problems}");
    assert!(load(&Path::new(FIXTURES).join("valid/smallest.toml")).is_ok());
}

/// A file that an editor has half written must not end the process that watches it.
#[test]
fn a_broken_file_is_reported_and_never_more() {
    let path = Path::new(FIXTURES).join("valid/everything.toml");
    let text = fs::read_to_string(&path).unwrap();
    for (cut, _) in text.char_indices().step_by(3) {
        let without = format!("{}{}", &text[..cut], &text[cut + 1..]);
        for broken in [&text[..cut], &text[cut..], &without] {
            if let Err(problems) = parse(broken, &path, &environment) {
                assert!(!problems.list().is_empty());
                assert!(!problems.to_string().contains("PLANTED"), "{problems}");
            }
        }
    }
}
