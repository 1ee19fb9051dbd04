//! The URLs of uploads lead back here, and stand for the key there.

use reqwest::{Client, Method, Response};

use crate::harness::{Proxy, ProxyBuilder, Received, Script, Upstream, header, key, secret};

const LIMITS: &str = r#"{ requests = 100, per = "1h" }"#;

const FILES: &str = "/upload/v1beta/files";

/// Speaks Google's protocol of uploads: the first request is told where the rest goes.
fn google(request: &Received) -> Script {
    let begins = request.header("x-goog-upload-command") == Some("start");
    let field = if request.target.starts_with("/upload/gcs") { "location" } else { "x-goog-upload-url" };
    let host = request.header("host").unwrap();
    let origin = match &*request.target {
        "/upload/elsewhere" => "https://storage.example".to_owned(),
        _ => format!("http://{host}"),
    };
    let path = request.target.split('?').next().unwrap();
    Script::new().send(if begins {
        let url = format!("{origin}{path}?upload_id=x-1_2&upload_protocol=resumable");
        format!(
            "HTTP/1.1 200 OK\r\n{field}: {url}\r\nx-goog-upload-status: active\r\ncontent-length: 0\r\n\r\n"
        )
    } else {
        "HTTP/1.1 200 OK\r\nx-goog-upload-status: final\r\ncontent-length: 2\r\n\r\n{}".to_owned()
    })
}

async fn start(upstream: &Upstream, build: impl FnOnce(ProxyBuilder) -> ProxyBuilder) -> Proxy {
    let proxy = ProxyBuilder::before(upstream)
        .upstream("credential = { header = \"x-goog-api-key\", value = \"theirs\" }")
        .tier("alice", LIMITS);
    build(proxy).start().await
}

/// Begins an upload, and returns the URL that the rest is to go to.
async fn begin(proxy: &Proxy, client: &Client, path: &str, field: &str) -> String {
    let request = client.post(proxy.url(path)).header("x-goog-api-key", secret("alice"));
    let answer = request.header("x-goog-upload-command", "start").body("{}").send().await.unwrap();
    assert_eq!((answer.status(), header(&answer, "x-ratelimit-limit")), (reqwest::StatusCode::OK, "100"));
    header(&answer, field).to_owned()
}

/// The rest, without a key as the SDKs send it.
async fn send(client: &Client, method: Method, url: &str) -> Response {
    let request = client.request(method, url).header("x-goog-upload-command", "upload, finalize");
    request.body("contents").send().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_through_the_proxy_and_counts_once() {
    let upstream = Upstream::start(google).await;
    let proxy = start(&upstream, |proxy| proxy).await;
    for (client, field, path, method) in [
        (proxy.client(), "x-goog-upload-url", FILES, Method::POST),
        (proxy.client_builder().http1_only().build().unwrap(), "location", "/upload/gcs", Method::PUT),
    ] {
        let url = begin(&proxy, &client, path, field).await;
        assert!(url.starts_with(&proxy.url(path)) && !url.contains(&secret("alice")), "{url}");
        upstream.next_request().await;
        for _ in 0..3 {
            let answer = send(&client, method.clone(), &url).await;
            assert_eq!(answer.status(), 200);
            assert_eq!(answer.headers().get("x-ratelimit-limit"), None, "it is not counted");
            let request = upstream.next_request().await;
            assert_eq!(request.target, format!("{path}?upload_id=x-1_2&upload_protocol=resumable"));
            assert_eq!(
                (request.header("x-goog-api-key"), &*request.body),
                (Some("theirs"), &b"contents"[..])
            );
        }
    }
    let answer = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    assert_eq!(header(&answer, "x-ratelimit-remaining"), "97", "two beginnings and this");
    let rest = proxy.logs.wait_for("the rest", |line| line["fields"]["decision"] == "uncounted").await;
    assert_eq!((&rest["fields"]["key"], &rest["fields"]["path"]), (&"alice".into(), &FILES.into()));
    assert!(!format!("{:?}", proxy.logs.all()).contains("tollgate-upload"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_url_opens_its_upload_and_nothing_else() {
    let upstream = Upstream::start(google).await;
    let proxy = start(&upstream, |proxy| proxy).await;
    let client = proxy.client();
    let url = begin(&proxy, &client, FILES, "x-goog-upload-url").await;
    upstream.next_request().await;
    for (method, url) in [
        (Method::POST, url.replace(FILES, "/upload/v1beta/other")),
        (Method::POST, url.replace(FILES, "/v1/chat/completions")),
        (Method::POST, url.replace("upload_id=x", "upload_id=y")),
        (Method::POST, url.replace("upload_id=x-1_2&", "")),
        (Method::POST, format!("{url}&more=1")),
        (Method::POST, format!("{url}x")),
        (Method::POST, url.replace("tollgate-upload=1", "tollgate-upload=9")),
        (Method::GET, url.clone()),
        (Method::DELETE, url.clone()),
    ] {
        let answer = send(&client, method.clone(), &url).await;
        assert_eq!(answer.status(), 401, "{method} {url}");
    }
    assert_eq!(upstream.received().len(), 1);
    let forged = url.replace("upload_id=x", "upload_id=y");
    let request = client.post(&forged).header("x-api-key", secret("alice")).body("{}");
    let answer = request.send().await.unwrap();
    assert_eq!(
        header(&answer, "x-ratelimit-remaining"),
        "98",
        "a key beside it is judged as ever, and counts"
    );
    let passed = upstream.next_request().await;
    assert!(!passed.target.contains("tollgate"), "{}", passed.target);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_replica_knows_a_url_until_it_expires_or_its_key_goes() {
    let upstream = Upstream::start(google).await;
    let proxy = start(&upstream, |proxy| proxy).await;
    let url = begin(&proxy, &proxy.client(), FILES, "x-goog-upload-url").await;
    let target = url.strip_prefix(&proxy.url("")).unwrap();
    let replica = start(&upstream, |proxy| proxy).await;
    assert_eq!(send(&replica.client(), Method::POST, &replica.url(target)).await.status(), 200);
    let tomorrow = start(&upstream, |proxy| proxy.clock("+25h")).await;
    let client = tomorrow.client_builder().danger_accept_invalid_certs(true).build().unwrap();
    assert_eq!(send(&client, Method::POST, &tomorrow.url(target)).await.status(), 401);

    let without = ProxyBuilder::before(&upstream)
        .section(&format!("[tiers.alice]\nlimits = []\n{}disabled = true", key("alice", "alice")));
    replica.write_config(&without);
    replica.signal(rustix::process::Signal::HUP).await;
    replica.logs.wait_for("the reload", |line| line["fields"]["message"] == "reloaded").await;
    assert_eq!(send(&replica.client(), Method::POST, &replica.url(target)).await.status(), 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_url_goes_before_what_clients_say() {
    let upstream = Upstream::start(google).await;
    let proxy = start(&upstream, |proxy| proxy.server("public_url = \"https://llm.example/\"")).await;
    let url = begin(&proxy, &proxy.client(), FILES, "x-goog-upload-url").await;
    let target = url.strip_prefix("https://llm.example").unwrap();
    assert_eq!(send(&proxy.client(), Method::POST, &proxy.url(target)).await.status(), 200);
}

/// What the clients of Google and curl say of it, if anything, is that it is a form.
#[tokio::test(flavor = "multi_thread")]
async fn the_rest_of_an_upload_is_a_file_whatever_its_content_type() {
    let upstream = Upstream::start(google).await;
    let bounds = "max_body_size = \"1KiB\"\nmax_file_size = \"4KiB\"";
    let proxy = start(&upstream, |proxy| proxy.server(bounds)).await;
    let client = proxy.client();
    let url = begin(&proxy, &client, FILES, "x-goog-upload-url").await;
    for (length, status) in [(4096, 200), (4097, 413)] {
        for kind in [None, Some("application/x-www-form-urlencoded"), Some("application/json")] {
            let request = client.post(&url).body(vec![b'x'; length]);
            let request =
                kind.into_iter().fold(request, |request, kind| request.header("content-type", kind));
            assert_eq!(request.send().await.unwrap().status().as_u16(), status, "{kind:?}");
        }
    }
}

/// Nobody else knows of it.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_at_the_endpoint_that_began_it() {
    let upstreams = [Upstream::start(google).await, Upstream::start(google).await];
    let urls = upstreams.each_ref().map(Upstream::url);
    let builder = ProxyBuilder::before_endpoints(&urls).tier("alice", LIMITS);
    let (proxy, replica) = (builder.clone().start().await, builder.start().await);
    let mut begun = [0, 0];
    while begun.contains(&0) {
        let url = begin(&proxy, &proxy.client(), FILES, "x-goog-upload-url").await;
        let counts = upstreams.each_ref().map(|upstream| upstream.received().len());
        let first = usize::from(counts[0] == begun[0]);
        for proxy in [&proxy, &replica, &proxy, &replica] {
            let target = url.split_once("/upload").unwrap().1;
            let url = proxy.url(&format!("/upload{target}"));
            assert_eq!(send(&proxy.client(), Method::POST, &url).await.status(), 200);
        }
        let now = upstreams.each_ref().map(|upstream| upstream.received().len());
        assert_eq!((now[first], now[1 - first]), (counts[first] + 4, counts[1 - first]));
        begun = now;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn urls_of_others_stay_as_they_are() {
    let upstream = Upstream::start(google).await;
    let proxy = start(&upstream, |proxy| proxy).await;
    let client = proxy.client();
    let url = begin(&proxy, &client, "/upload/elsewhere", "x-goog-upload-url").await;
    assert_eq!(url, "https://storage.example/upload/elsewhere?upload_id=x-1_2&upload_protocol=resumable");
    let url = begin(&proxy, &client, "/v1beta/files", "x-goog-upload-url").await;
    assert!(url.starts_with(&upstream.url()), "only uploads are led back: {url}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_web_page_may_read_where_its_upload_goes_on() {
    let upstream = Upstream::start(google).await;
    let cors = "[cors]\norigins = [\"https://app.example\"]";
    let proxy = start(&upstream, |proxy| proxy.section(cors)).await;
    let request = proxy.client().post(proxy.url(FILES)).header("x-goog-api-key", secret("alice"));
    let request = request.header("x-goog-upload-command", "start").header("origin", "https://app.example");
    let answer = request.body("{}").send().await.unwrap();
    let exposed: Vec<_> = header(&answer, "access-control-expose-headers").split(", ").collect();
    for field in ["x-goog-upload-url", "x-goog-upload-status", "location"] {
        assert!(exposed.contains(&field), "{field}: {exposed:?}");
    }
}

/// Elsewhere than at its host, a route is not found.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_goes_on_at_the_host_that_its_route_asks_for() {
    let upstream = Upstream::start(google).await;
    let proxy = start(&upstream, |proxy| {
        proxy.upstream("match = { host = \"localhost\" }").server("public_url = \"https://llm.example\"")
    })
    .await;
    let url = begin(&proxy, &proxy.client(), FILES, "x-goog-upload-url").await;
    assert!(url.starts_with(&proxy.url(FILES)), "{url}");
    assert_eq!(send(&proxy.client(), Method::POST, &url).await.status(), 200);
}
