//! The ways to an upstream: private authorities, client certificates, other names, proxies, and what the log says of each
//! that is barred.

use std::net::SocketAddr;

use serde_json::Value;

use crate::harness::{
    Certificates, Greeting, Http2Upstream, Proxy, ProxyBuilder, TlsFront, TunnelProxy, Upstream, Wire,
    patiently, tollgate,
};

const LIMITS: &str = r#"{ requests = 50, per = "1h" }"#;

async fn proxy(url: &str, lines: &str) -> Proxy {
    ProxyBuilder::before_url(url).upstream(lines).tier("alice", LIMITS).start().await
}

/// The status of one request, and the log line about it.
async fn outcome(proxy: &Proxy) -> (u16, Value) {
    let answer = patiently("an answer", proxy.chat(&proxy.client(), "alice").send()).await.unwrap();
    let status = answer.status().as_u16();
    let body = answer.text().await.unwrap();
    let line = proxy.logged("/v1/chat/completions").await;
    if let Some(reason) = line["reason"].as_str() {
        assert!(!body.contains(reason), "the operator's business: {body}");
    }
    (status, line)
}

fn reason(line: &Value) -> &str {
    line["reason"].as_str().unwrap_or_default()
}

fn trust(certificates: &Certificates) -> String {
    format!("ca_file = \"{}\"", certificates.path("ca.crt"))
}

fn identity(certificates: &Certificates) -> String {
    let [certificate, key] = ["client.crt", "client.key"].map(|name| certificates.path(name));
    format!("client_certificate = \"{certificate}\"\nclient_key = \"{key}\"")
}

fn secure(address: SocketAddr) -> String {
    format!("https://localhost:{}", address.port())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_authority_is_trusted_where_it_is_named_and_else_the_log_says_what_is_wrong() {
    let upstream = Upstream::ok().await;
    let certificates = Certificates::for_names(&["localhost", "127.0.0.1"]);
    let front = TlsFront::before(upstream.address, &certificates, &["http/1.1"], false).await;
    let by_address = format!("https://{}", front.address);
    for url in [secure(front.address), by_address] {
        assert_eq!(outcome(&proxy(&url, &trust(&certificates)).await).await.0, 200, "{url}");
    }
    let other = Certificates::for_names(&["elsewhere"]);
    let (status, line) = outcome(&proxy(&secure(front.address), &trust(&other)).await).await;
    assert_eq!((status, &line["route"], &line["outcome"]), (502, &"llm".into(), &"upstream_failed".into()));
    for word in ["certificate of localhost is not accepted", "UnknownIssuer", "ca_file"] {
        assert!(reason(&line).contains(word), "{line}");
    }
    let named = Certificates::for_names(&["localhost"]);
    let front = TlsFront::before(upstream.address, &named, &[], false).await;
    let (status, line) = outcome(&proxy(&format!("https://{}", front.address), &trust(&named)).await).await;
    assert!(status == 502 && reason(&line).contains("certificate of 127.0.0.1 is not accepted"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_certificate_is_shown_to_who_asks() {
    let upstream = Upstream::ok().await;
    let certificates = Certificates::for_names(&["localhost"]);
    let front = TlsFront::before(upstream.address, &certificates, &[], true).await;
    let lines = format!("{}\n{}", trust(&certificates), identity(&certificates));
    assert_eq!(outcome(&proxy(&secure(front.address), &lines).await).await.0, 200);
    assert!(front.greetings()[0].showed_certificate);
    let (status, line) = outcome(&proxy(&secure(front.address), &trust(&certificates)).await).await;
    assert!(status == 502 && reason(&line).contains("CertificateRequired"), "{line}");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_name_is_asked_for_and_verified_while_host_stays() {
    let upstream = Upstream::ok().await;
    let certificates = Certificates::for_names(&["llm.internal"]);
    let front = TlsFront::before(upstream.address, &certificates, &["http/1.1"], false).await;
    let url = format!("https://{}", front.address);
    let named = format!("{}\nserver_name = \"llm.internal\"", trust(&certificates));
    assert_eq!(outcome(&proxy(&url, &named).await).await.0, 200);
    let greeting = Greeting {
        protocol: Some("http/1.1".to_owned()),
        server_name: Some("llm.internal".to_owned()),
        showed_certificate: false,
    };
    assert_eq!(front.greetings(), [greeting]);
    assert_eq!(upstream.received()[0].header("host"), Some(&*front.address.to_string()));
    assert_eq!(outcome(&proxy(&url, &trust(&certificates)).await).await.0, 502);
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_is_spoken_where_the_server_chooses_it() {
    let (plain, multiplexed) = (Upstream::ok().await, Http2Upstream::start().await);
    let certificates = Certificates::for_names(&["localhost"]);
    let [old, new] = [(plain.address, &["http/1.1"][..]), (multiplexed.address, &["h2", "http/1.1"])];
    let old = TlsFront::before(old.0, &certificates, old.1, false).await;
    let new = TlsFront::before(new.0, &certificates, new.1, false).await;
    let lines = format!("{}\nhttp2 = true", trust(&certificates));
    let answers = multiplexed.answer_all();
    let asked = async {
        assert_eq!(outcome(&proxy(&secure(new.address), &lines).await).await.0, 200);
        assert_eq!(outcome(&proxy(&secure(old.address), &lines).await).await.0, 200);
    };
    tokio::select! {
        () = answers => unreachable!("it never ends"),
        () = asked => {}
    }
    assert_eq!(new.greetings()[0].protocol.as_deref(), Some("h2"));
    assert_eq!(old.greetings()[0].protocol.as_deref(), Some("http/1.1"));
    let unasked = proxy(&secure(old.address), &trust(&certificates)).await;
    assert_eq!(outcome(&unasked).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_falls_back_serves_requests_at_the_same_time() {
    let gate = crate::harness::Gate::default();
    let held = gate.clone();
    let upstream =
        Upstream::start(move |_| crate::harness::Script::json(200, "{}").wait_before_last(&held)).await;
    let certificates = Certificates::for_names(&["localhost"]);
    let front = TlsFront::before(upstream.address, &certificates, &["http/1.1"], false).await;
    let proxy = proxy(&secure(front.address), &format!("{}\nhttp2 = true", trust(&certificates))).await;
    let client = proxy.client();
    let asked: Vec<_> = (0..10).map(|_| tokio::spawn(proxy.chat(&client, "alice").send())).collect();
    for _ in 0..10 {
        upstream.next_request().await;
    }
    gate.open();
    for asked in asked {
        assert_eq!(patiently("an answer", asked).await.unwrap().unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_does_not_end_is_504_and_is_named() {
    let silent = Wire::listen().await;
    let url = silent.url().replace("http:", "https:");
    let (status, line) = outcome(&proxy(&url, "tls_timeout = \"300ms\"").await).await;
    assert_eq!((status, &line["outcome"]), (504, &"upstream_timeout".into()));
    assert_eq!(reason(&line), "the TLS handshake took too long");
    let (status, line) = outcome(&proxy(&url, "connect_timeout = \"300ms\"").await).await;
    assert_eq!((status, reason(&line)), (504, "connecting took too long"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_is_asked_for_a_tunnel_to_the_name_with_its_credential() {
    let upstream = Upstream::ok().await;
    let certificates = Certificates::for_names(&["llm.invalid"]);
    let front = TlsFront::before(upstream.address, &certificates, &["http/1.1"], false).await;
    let trust = trust(&certificates);
    for (server, url, destination, lines) in [
        (upstream.address, "http://llm.invalid/v1", "llm.invalid:80", ""),
        (front.address, "https://llm.invalid/v1", "llm.invalid:443", &*trust),
        (front.address, "https://llm.invalid:8443", "llm.invalid:8443", &*trust),
    ] {
        let way = TunnelProxy::before(server, "200 Connection established").await;
        let lines = format!("{lines}\nproxy = \"http://ada:PLANTED%21@{}\"", way.address);
        let proxy = proxy(url, &lines).await;
        assert_eq!(outcome(&proxy).await.0, 200, "{url}");
        let asked = &way.asked()[0];
        assert_eq!(
            (&*asked.method, &*asked.target, asked.header("host")),
            ("CONNECT", destination, Some(destination))
        );
        // ada:PLANTED!
        assert_eq!(asked.header("proxy-authorization"), Some("Basic YWRhOlBMQU5URUQh"));
        assert_eq!(asked.header("x-api-key"), None);
        let logs = format!("{:?}", proxy.logs.all());
        assert!(!logs.contains("PLANTED") && !logs.contains("YWRhOlBMQU5URUQh"), "{logs}");
    }
    let hosts: Vec<_> =
        upstream.received().iter().map(|request| request.header("host").unwrap().to_owned()).collect();
    assert_eq!(hosts, ["llm.invalid", "llm.invalid", "llm.invalid:8443"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_opens_no_tunnel_is_502_with_its_status_in_the_log() {
    let upstream = Upstream::ok().await;
    for (answer, said) in [
        ("407 Proxy Authentication Required", "answered 407"),
        ("503 Service Unavailable\r\ncontent-length: 2\r\n\r\nno", "answered 503"),
        ("200", "can't be reached"),
        ("x", "does not answer as a proxy"),
    ] {
        let way = TunnelProxy::before(upstream.address, answer).await;
        let address = if answer == "200" { "127.0.0.1:1".to_owned() } else { way.address.to_string() };
        let lines = format!("proxy = \"http://ada:PLANTED@{address}\"");
        let (status, line) = outcome(&proxy("http://llm.invalid", &lines).await).await;
        assert_eq!((status, &line["outcome"]), (502, &"upstream_failed".into()), "{line}");
        assert!(reason(&line).contains(said) && reason(&line).contains(&address), "{line}");
        assert!(!line.to_string().contains("PLANTED"), "{line}");
    }
    assert!(upstream.received().is_empty());
}

/// An address that reaches this machine, and is none of its loopback addresses to those who look at it.
fn not_loopback(address: SocketAddr) -> String {
    format!("http://0.0.0.0:{}", address.port())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_word_of_the_file_the_environment_decides() {
    let upstream = Upstream::ok().await;
    for (variables, lines, through) in [
        (&["http_proxy"][..], "", true),
        (&["HTTP_PROXY"], "", true),
        (&["ALL_PROXY"], "", true),
        (&["HTTPS_PROXY"], "", false),
        (&["HTTP_PROXY"], "proxy = \"none\"", false),
        (&["HTTP_PROXY"], "proxy = \"\"", false),
        (&["HTTP_PROXY", "NO_PROXY"], "", false),
        (&["http_proxy", "no_proxy"], "", false),
    ] {
        let way = TunnelProxy::before(upstream.address, "200 OK").await;
        let builder = ProxyBuilder::before_url(&not_loopback(upstream.address)).upstream(lines);
        let builder = variables.iter().fold(builder.tier("alice", LIMITS), |builder, name| {
            let value = if name.to_lowercase() == "no_proxy" {
                "example.com, 0.0.0.0"
            } else {
                &*format!("http://{}", way.address)
            };
            builder.env(name, value)
        });
        assert_eq!(outcome(&builder.start().await).await.0, 200, "{variables:?}");
        assert_eq!(way.asked().len(), usize::from(through), "{variables:?} {lines}");
    }
    let way = TunnelProxy::before(upstream.address, "200 OK").await;
    let local = ProxyBuilder::before(&upstream).env("HTTP_PROXY", &format!("http://{}", way.address));
    assert_eq!(outcome(&local.tier("alice", LIMITS).start().await).await.0, 200);
    assert!(way.asked().is_empty(), "this machine is not reached through a proxy");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_used_are_told_with_the_upstream_and_a_reload_changes_nothing() {
    let upstream = Upstream::ok().await;
    let certificates = Certificates::for_names(&["localhost"]);
    let front = TlsFront::before(upstream.address, &certificates, &[], false).await;
    let builder =
        |lines: &str| ProxyBuilder::before_url(&secure(front.address)).upstream(lines).tier("alice", LIMITS);
    let running = builder(&trust(&certificates)).start().await;
    let nothing = "ca_file = \"/nowhere/ca.pem\"".to_owned();
    let swapped = format!(
        "{}\nclient_certificate = \"{}\"\nclient_key = \"{}\"",
        trust(&certificates),
        certificates.path("client.key"),
        certificates.path("client.crt")
    );
    let foreign = identity(&certificates).replace("client.key", "server.key");
    for (lines, said) in [
        (nothing, "can't read /nowhere/ca.pem"),
        (swapped, "swapped"),
        (format!("{}\n{foreign}", trust(&certificates)), "does not belong to"),
    ] {
        let folder = running.certificates.parent().unwrap();
        std::fs::write(folder.join("broken.toml"), builder(&lines).text()).unwrap();
        let stopped = tollgate(folder, &["--config", "broken.toml"]).await;
        assert_eq!(stopped.code, Some(1), "{lines}");
        for word in ["upstream `llm`: ", said] {
            assert!(stopped.stderr.contains(word), "{}", stopped.stderr);
        }
        running.write_config(&builder(&lines));
        let line = crate::reload::reload(&running, "not reloaded").await;
        let error = line["fields"]["error"].as_str().unwrap();
        assert!(error.contains("upstream `llm`: ") && error.contains(said), "{error}");
    }
    assert_eq!(outcome(&running).await.0, 200);
}
