//! The way in: versions of TLS, ALPN, what is no TLS at all, addresses and certificates.

use std::{fs, net::SocketAddr, path::Path};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::rustls::version::{TLS12, TLS13};

use crate::harness::{Certificates, Proxy, ProxyBuilder, Said, Upstream, patiently, secret, tollgate};
use crate::reload::reload;

const LIMITS: &str = r#"{ requests = 1000, per = "1m" }"#;

async fn started(builder: impl FnOnce(ProxyBuilder) -> ProxyBuilder) -> (Upstream, Proxy) {
    let upstream = Upstream::ok().await;
    let proxy = builder(ProxyBuilder::before(&upstream).tier("alice", LIMITS)).start().await;
    (upstream, proxy)
}

async fn is_served(proxy: &Proxy) {
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(answer.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_version_of_tls_agrees_on_every_protocol() {
    let (_upstream, proxy) = started(|builder| builder).await;
    for version in [&TLS12, &TLS13] {
        for (offered, agreed) in
            [(&["h2", "http/1.1"][..], Some("h2")), (&["http/1.1"], Some("http/1.1")), (&[], None)]
        {
            let mut stream = proxy.connect_speaking(&[version], offered).await;
            let connection = stream.get_ref().1;
            assert_eq!(connection.protocol_version(), Some(version.version));
            assert_eq!(connection.alpn_protocol(), agreed.map(str::as_bytes));
            if agreed != Some("h2") {
                let key = secret("alice");
                let request = format!(
                    "GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\nconnection: close\r\n\r\n"
                );
                stream.write_all(request.as_bytes()).await.unwrap();
                let mut answer = String::new();
                patiently("an answer", stream.read_to_string(&mut answer)).await.unwrap();
                assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            }
        }
    }
    for client in [
        proxy.client_builder().http1_only(),
        proxy.client_builder().http2_prior_knowledge().tls_version_max(reqwest::tls::Version::TLS_1_2),
    ] {
        let answer = proxy.chat(&client.build().unwrap(), "alice").send().await.unwrap();
        assert_eq!(answer.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_tls_is_closed_and_the_next_client_is_served() {
    let (upstream, proxy) = started(|builder| builder).await;
    let garbage = [
        &b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x80\x2e\x01\x00\x02SSLv2 in its youth",
        b"\x16\x03\x01\xff\xff",
        &[0xff; 2000],
        b"",
    ];
    for bytes in garbage {
        let mut socket = TcpStream::connect(proxy.address).await.unwrap();
        socket.write_all(bytes).await.unwrap();
        socket.shutdown().await.unwrap();
        let mut answer = Vec::new();
        let _ = patiently("the end of the connection", socket.read_to_end(&mut answer)).await;
        assert!(!answer.starts_with(b"HTTP"), "plain HTTP is not spoken");
        is_served(&proxy).await;
    }
    assert_eq!(upstream.received().len(), garbage.len());
    let failed = proxy.metric("tollgate_connections_refused_total{reason=\"handshake_failed\"}").await;
    assert_eq!(failed, garbage.len() as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_distrusts_the_certificate_disturbs_nobody() {
    let (_upstream, proxy) = started(|builder| builder).await;
    let distrustful = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("https://127.0.0.1:{}/v1/models", proxy.address.port());
    assert!(distrustful.get(url).send().await.is_err());
    is_served(&proxy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_addresses_are_listened_on() {
    let (_upstream, proxy) =
        started(|builder| builder.server(r#"listen = ["127.0.0.1:0", "127.0.0.2:0"]"#)).await;
    let second = |line: &serde_json::Value| {
        let address = line["fields"]["address"].as_str().unwrap_or_default();
        line["fields"]["message"] == "listening" && address.starts_with("127.0.0.2:")
    };
    let line = proxy.logs.wait_for("the second listener", second).await;
    let address = line["fields"]["address"].as_str().unwrap().parse().unwrap();
    is_served(&proxy).await;
    let client = proxy.client_builder().resolve_to_addrs("localhost", &[address]).build().unwrap();
    let url = format!("https://localhost:{}/v1/models", address.port());
    let answer = client.get(url).header("x-api-key", secret("alice")).send().await.unwrap();
    assert_eq!(answer.status(), 200);
}

/// R33.
#[tokio::test(flavor = "multi_thread")]
async fn one_listener_takes_both_families_and_the_name_of_this_machine() {
    let (_upstream, proxy) = started(|builder| builder.server("listen = \"[::]:0\"")).await;
    for address in [&["127.0.0.1"][..], &["::1"], &["::1", "127.0.0.1"]] {
        let address: Vec<_> = address.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 0)).collect();
        let client = proxy.client_builder().resolve_to_addrs("localhost", &address).build().unwrap();
        assert_eq!(proxy.chat(&client, "alice").send().await.unwrap().status(), 200, "{address:?}");
    }
    let clients: Vec<_> = proxy.logs.requests().iter().map(|line| line["client"].clone()).collect();
    assert!(clients.contains(&"127.0.0.1".into()), "an IPv4 address is shown as one: {clients:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_shows_a_certificate_where_one_is_asked_for() {
    let certificates = [Certificates::for_names(&["client"]), Certificates::for_names(&["stranger"])];
    let asking = |nth: usize| {
        format!("[server.tls]\nclient_ca_file = \"{}\"", Certificates::path(&certificates[nth], "ca.crt"))
    };
    let (upstream, proxy) = started(|builder| builder.section(&asking(0))).await;
    let asked = async |shown: Option<&Certificates>| {
        let mut builder = proxy.client_builder();
        if let Some(certificates) = shown {
            let [certificate, key] = ["client.crt", "client.key"].map(|name| certificates.path(name));
            let pem = [fs::read(certificate).unwrap(), fs::read(key).unwrap()].concat();
            builder = builder.identity(reqwest::Identity::from_pem(&pem).unwrap());
        }
        proxy
            .chat(&builder.build().unwrap(), "alice")
            .send()
            .await
            .map(|answer| answer.status().as_u16())
            .ok()
    };
    assert_eq!(asked(Some(&certificates[0])).await, Some(200));
    assert_eq!((asked(Some(&certificates[1])).await, asked(None).await), (None, None));
    assert_eq!(upstream.received().len(), 1);
    let failed = "tollgate_connections_refused_total{reason=\"handshake_failed\"}";
    assert_eq!(proxy.metric(failed).await, 2.0);

    // Whom to let in can be changed while it runs, and what can't be used changes nothing.
    let now_asking = |section: &str| {
        proxy.write_config(&ProxyBuilder::before(&upstream).section(section).tier("alice", LIMITS));
    };
    now_asking(&asking(1));
    reload(&proxy, "reloaded").await;
    assert_eq!((asked(Some(&certificates[0])).await, asked(Some(&certificates[1])).await), (None, Some(200)));
    now_asking("[server.tls]\nclient_ca_file = \"nowhere.pem\"");
    reload(&proxy, "not reloaded").await;
    assert_eq!((asked(None).await, asked(Some(&certificates[1])).await), (None, Some(200)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_was_made_is_kept_for_the_next_start() {
    let folder = tempfile::tempdir().unwrap();
    let (_upstream, first) = started(|builder| builder.certificates(folder.path().to_owned())).await;
    let made = fs::read(folder.path().join("server.crt")).unwrap();
    let mode = std::os::unix::fs::MetadataExt::mode(&folder.path().join("server.key").metadata().unwrap());
    assert_eq!(mode & 0o777, 0o600, "the key is its owner's alone");
    let (_upstream, second) = started(|builder| builder.certificates(folder.path().to_owned())).await;
    assert_eq!(fs::read(folder.path().join("server.crt")).unwrap(), made);
    is_served(&first).await;
    is_served(&second).await;
}

/// What a start in this folder says, which must fail.
async fn fails_to_start(folder: &Path, server: &str) -> String {
    let builder = ProxyBuilder::before_url("http://127.0.0.1:1").tier("alice", LIMITS).server(server);
    fs::write(folder.join("proxy.toml"), builder.text()).unwrap();
    let Said { code, stdout, stderr } = tollgate(folder, &[]).await;
    assert_eq!((code, &*stdout), (Some(1), ""), "{stderr}");
    stderr
}

/// A certificate and its key, as PEM.
fn certificate(days: std::ops::Range<i64>) -> (String, String) {
    let key = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
    let year = |offset: i64| rcgen::date_time_ymd(i32::try_from(2026 + offset).unwrap(), 1, 1);
    (parameters.not_before, parameters.not_after) = (year(days.start), year(days.end));
    (parameters.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_certificate_is_told_of_and_nothing_starts() {
    let ((good, key), (expired, its_key), (future, future_key)) =
        (certificate(-1..20), certificate(-9..-8), certificate(100..101));
    let other = rcgen::KeyPair::generate().unwrap().serialize_pem();
    let cases = [
        ("the key is missing", Some(&good), None, "server.crt is there but"),
        ("the certificate is missing", None, Some(&key), "server.key is there but"),
        ("it has expired", Some(&expired), Some(&its_key), "expired at 2018-01-01"),
        ("it is not valid yet", Some(&future), Some(&future_key), "is not valid before 2126-01-01"),
        ("the key is another's", Some(&good), Some(&other), "does not belong to the first certificate"),
        ("it is not PEM", Some(&"hello".to_owned()), Some(&key), "it must be PEM"),
        ("the key is not PEM", Some(&good), Some(&"hello".to_owned()), "there is no private key in"),
        ("the two are swapped", Some(&key), Some(&good), "swapped?"),
        ("it is empty", Some(&String::new()), Some(&key), "there is no certificate in"),
    ];
    for (case, certificate, key, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("certs")).unwrap();
        for (name, text) in [("server.crt", certificate), ("server.key", key)] {
            if let Some(text) = text {
                fs::write(folder.path().join("certs").join(name), text).unwrap();
            }
        }
        let said = fails_to_start(folder.path(), "").await;
        assert!(said.contains(expected), "{case}: {said}");
        assert!(said.starts_with("tollgate: ") && said.lines().count() == 1, "{case}: {said}");
    }
}

/// As OpenSSL and its kin write them: several kinds of keys, several kinds of PEM.
#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_a_key_in_the_clear_is_served() {
    for (form, generate) in [
        ("EC with its parameters", "openssl ecparam -name prime256v1 -genkey -out server.key"),
        ("EC alone", "openssl ecparam -name secp384r1 -genkey -noout -out server.key"),
        ("RSA of old", "openssl genrsa -traditional -out server.key 2048"),
        ("RSA in PKCS #8", "openssl genpkey -algorithm rsa -pkeyopt rsa_keygen_bits:2048 -out server.key"),
        ("Ed25519", "openssl genpkey -algorithm ed25519 -out server.key"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let certify = "openssl req -x509 -key server.key -subj /CN=localhost -days 2 -out server.crt \
                       -addext subjectAltName=DNS:localhost -addext basicConstraints=critical,CA:FALSE";
        // Windows' ends of lines, and the two in one file, as some tools deliver them.
        let bend = "cat server.crt server.key | sed 's/$/\\r/' >both; cp both server.crt; cp both server.key";
        for command in [&format!("{generate} && {certify}"), bend] {
            let made =
                std::process::Command::new("sh").args(["-c", command]).current_dir(folder.path()).output();
            let made = made.unwrap();
            assert!(made.status.success(), "{form}: {}", String::from_utf8_lossy(&made.stderr));
            let (_upstream, proxy) = started(|builder| builder.certificates(folder.path().to_owned())).await;
            is_served(&proxy).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_told_of_whoever_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let somebody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (_upstream, tollgate) = started(|builder| builder).await;
    for address in [somebody.local_addr().unwrap(), tollgate.address] {
        let said = fails_to_start(folder.path(), &format!("listen = \"{address}\"")).await;
        let expected = format!("can't listen on {address}");
        assert!(said.contains(&expected) && said.contains("another process does"), "{said}");
    }
    is_served(&tollgate).await;
}
