//! The real binary before an upstream.

use std::{
    fmt::Write as _,
    io,
    net::SocketAddr,
    path::PathBuf,
    process::{ExitStatus, Stdio},
    sync::{Arc, Mutex},
};

use reqwest::{Certificate, Client, ClientBuilder, RequestBuilder};
use serde_json::Value;
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
    sync::Notify,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ALL_VERSIONS, ClientConfig, RootCertStore, SupportedProtocolVersion,
        pki_types::{CertificateDer, pem::PemObject},
    },
};

use super::{Upstream, patiently};

/// The secret of the key with this id.
pub(crate) fn secret(id: &str) -> String {
    format!("sk-tg-{id}-0123456789abcdefghijABCDEFGHIJ0123456789abc")
}

/// The `[[keys]]` entry of a key whose secret is [`secret`].
pub(crate) fn key(id: &str, tier: &str) -> String {
    let secret = secret(id);
    let hash = tollgate::keys::ApiKey::new(&secret).unwrap().hash();
    format!("[[keys]]\nid = \"{id}\"\nhash = \"{hash}\"\ntier = \"{tier}\"\n")
}

/// This process' environment but for the proxies on the way out, which are no test's business that does not name them.
fn surroundings() -> impl Iterator<Item = (std::ffi::OsString, std::ffi::OsString)> {
    std::env::vars_os().filter(|(name, _)| {
        let name = name.to_string_lossy().to_ascii_lowercase();
        !["http_proxy", "https_proxy", "all_proxy", "no_proxy"].contains(&&*name)
    })
}

/// What a proxy is started with. Addresses, certificate and upstream have defaults that fit a test.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProxyBuilder {
    server: String,
    upstream: String,
    rest: String,
    certificates: Option<PathBuf>,
    environment: Vec<(String, String)>,
}

impl ProxyBuilder {
    pub(crate) fn before(upstream: &Upstream) -> Self {
        Self::before_url(&upstream.url())
    }

    pub(crate) fn before_url(url: &str) -> Self {
        Self { upstream: format!("[[upstreams]]\nname = \"llm\"\nurl = \"{url}\"\n"), ..Self::default() }
    }

    /// An upstream of several endpoints, which are called `e0`, `e1` and so on.
    pub(crate) fn before_endpoints(urls: &[String]) -> Self {
        let endpoint = |(n, url): (usize, &String)| format!("{{ name = \"e{n}\", url = \"{url}\" }}");
        let endpoints: Vec<_> = urls.iter().enumerate().map(endpoint).collect();
        let upstream = format!("[[upstreams]]\nname = \"llm\"\nendpoints = [{}]\n", endpoints.join(", "));
        Self { upstream, ..Self::default() }
    }

    /// More keys for `[server]`.
    pub(crate) fn server(mut self, lines: &str) -> Self {
        writeln!(self.server, "{lines}").unwrap();
        self
    }

    /// More keys for the upstream.
    pub(crate) fn upstream(mut self, lines: &str) -> Self {
        writeln!(self.upstream, "{lines}").unwrap();
        self
    }

    /// A tier with these limits, and a key of the same name.
    pub(crate) fn tier(self, name: &str, limits: &str) -> Self {
        let key = key(name, name);
        self.section(&format!("[tiers.{name}]\nlimits = [{limits}]\n{key}"))
    }

    /// Counts in this Redis, with a deadline that no busy machine misses. `lines` go to `[limiter]`; unless they say
    /// otherwise, a request on which Redis does not decide is turned away, so that no test passes by the fallback.
    pub(crate) fn redis(self, url: &str, lines: &str) -> Self {
        let policy = if lines.contains("on_store_failure") { "" } else { "on_store_failure = \"deny\"" };
        self.section(&format!(
            "[limiter]\nstore = \"redis\"\n{policy}\n{lines}\n[limiter.redis]\nurl = \"{url}\"\ntimeout = \"20s\"\n"
        ))
    }

    /// Counts in the Redis that these lines of `[limiter.redis]` describe, and turns requests away on which it does not
    /// decide.
    pub(crate) fn counting_in(self, lines: &str) -> Self {
        self.section(&format!(
            "[limiter]\nstore = \"redis\"\non_store_failure = \"deny\"\n[limiter.redis]\n{lines}\n"
        ))
    }

    /// Any other sections.
    pub(crate) fn section(mut self, lines: &str) -> Self {
        writeln!(self.rest, "{lines}").unwrap();
        self
    }

    /// Uses the certificate in this folder in place of a fresh one.
    pub(crate) fn certificates(mut self, folder: PathBuf) -> Self {
        self.certificates = Some(folder);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs it with a wall clock that is wrong by so much, such as `+1h`. Its monotonic clock goes on as it is.
    pub(crate) fn clock(self, offset: &str) -> Self {
        // The wrapper knows where its library lies, and what the variable is called here.
        let wrapper = std::process::Command::new("faketime").args(["-f", "+0", "env"]).output();
        let told =
            String::from_utf8(wrapper.expect("faketime is installed; tests/run does that").stdout).unwrap();
        let preload = |line: &str| {
            let (name, library) = line.split_once('=')?;
            (name == "LD_PRELOAD" || name.starts_with("DYLD_")).then(|| (name.to_owned(), library.to_owned()))
        };
        told.lines()
            .filter_map(preload)
            .fold(self, |builder, (name, value)| builder.env(&name, &value))
            .env("FAKETIME", offset)
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .env("DONT_FAKE_MONOTONIC", "1")
    }

    pub(crate) fn text(&self) -> String {
        let Self { server, upstream, rest, .. } = self;
        let listen = if server.contains("listen") { "" } else { "listen = \"127.0.0.1:0\"" };
        let admin = if rest.contains("[admin]") { "" } else { "[admin]\nlisten = \"127.0.0.1:0\"" };
        format!("[server]\n{listen}\n{server}\n{admin}\n{rest}\n{upstream}")
    }

    /// Starts it, and waits until it listens.
    pub(crate) async fn start(self) -> Proxy {
        let folder = tempfile::tempdir().unwrap();
        let certificates = self.certificates.clone().unwrap_or_else(|| folder.path().join("certs"));
        if self.certificates.is_some() {
            std::os::unix::fs::symlink(&certificates, folder.path().join("certs")).unwrap();
        }
        let config = folder.path().join("proxy.toml");
        std::fs::write(&config, self.text()).unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["--log-format", "json", "--log-level", "debug", "--config"])
            .arg(&config)
            .env_clear()
            .envs(surroundings())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let logs = Logs::default();
        logs.collect(child.stderr.take().unwrap());
        let address = |line: &Value| line["fields"]["address"].as_str().unwrap().parse().unwrap();
        let listening = logs.wait_for("the listener", |line| line["fields"]["message"] == "listening").await;
        let admin =
            logs.wait_for("the admin listener", |line| line["fields"]["message"] == "admin listening").await;
        let (address, admin) = (address(&listening), address(&admin));
        Proxy { child: tokio::sync::Mutex::new(child), address, admin, logs, certificates, folder }
    }
}

/// A running Tollgate. It is killed at the end of its test.
#[derive(Debug)]
pub(crate) struct Proxy {
    child: tokio::sync::Mutex<Child>,
    pub(crate) address: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) logs: Logs,
    pub(crate) certificates: PathBuf,
    folder: TempDir,
}

impl Proxy {
    /// Writes its configuration anew, with another list of sections.
    pub(crate) fn write_config(&self, builder: &ProxyBuilder) {
        std::fs::write(self.folder.path().join("proxy.toml"), builder.text()).unwrap();
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://localhost:{}{path}", self.address.port())
    }

    fn certificate_pem(&self) -> Vec<u8> {
        std::fs::read(self.certificates.join("server.crt")).unwrap()
    }

    /// A client that trusts this proxy's certificate and nothing else.
    pub(crate) fn client_builder(&self) -> ClientBuilder {
        let roots = Certificate::from_pem_bundle(&self.certificate_pem()).unwrap();
        let address = [self.address];
        Client::builder().tls_certs_only(roots).no_proxy().resolve_to_addrs("localhost", &address)
    }

    pub(crate) fn client(&self) -> Client {
        self.client_builder().build().unwrap()
    }

    /// A chat completion on behalf of the key with this id.
    pub(crate) fn chat(&self, client: &Client, id: &str) -> RequestBuilder {
        client
            .post(self.url("/v1/chat/completions"))
            .bearer_auth(secret(id))
            .header("content-type", "application/json")
            .body(r#"{"model":"m","messages":[]}"#)
    }

    /// A TLS connection for a test that writes the bytes itself.
    pub(crate) async fn connect(&self, alpn: Option<&str>) -> TlsStream<TcpStream> {
        self.connect_speaking(ALL_VERSIONS, alpn.as_slice()).await
    }

    /// The same, with these versions of TLS and these protocols on offer.
    pub(crate) async fn connect_speaking(
        &self,
        versions: &[&'static SupportedProtocolVersion],
        alpn: &[&str],
    ) -> TlsStream<TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(
            CertificateDer::pem_slice_iter(&self.certificate_pem()).map(Result::unwrap),
        );
        let mut config = ClientConfig::builder_with_protocol_versions(versions)
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let socket = TcpStream::connect(self.address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        connector.connect("localhost".try_into().unwrap(), socket).await.unwrap()
    }

    /// The text of an admin page, and its status.
    pub(crate) async fn admin(&self, path: &str) -> (u16, String) {
        let client = Client::builder().no_proxy().build().unwrap();
        let answer = client.get(format!("http://{}{path}", self.admin)).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    /// The value of one metric, with its labels as they are written.
    pub(crate) async fn metric(&self, series: &str) -> f64 {
        let (_, text) = self.admin("/metrics").await;
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.parse().unwrap())
    }

    /// The access-log line of the request with this path, once it is written.
    pub(crate) async fn logged(&self, path: &str) -> Value {
        let is_it = |line: &Value| line["target"] == "tollgate::access" && line["fields"]["path"] == path;
        self.logs.wait_for(path, is_it).await["fields"].clone()
    }

    /// Waits for the end of the look at Redis that follows a start.
    pub(crate) async fn has_looked_at_redis(&self) {
        self.logs.wait_for("the look at Redis", |line| line["fields"]["message"] == "looked at Redis").await;
    }

    pub(crate) async fn pid(&self) -> u32 {
        self.child.lock().await.id().expect("it is running")
    }

    /// Bytes of memory that it has.
    pub(crate) async fn resident_bytes(&self) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid().await)).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    }

    pub(crate) async fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid().await as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) async fn ended(&self) -> ExitStatus {
        let status = patiently("the end of the proxy", self.child.lock().await.wait()).await.unwrap();
        self.logs.wait_for("the last line", |line| *line == Logs::end()).await;
        status
    }
}

/// The log lines so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Logs(Arc<(Mutex<Vec<Value>>, Notify)>);

impl Logs {
    fn collect(&self, stderr: tokio::process::ChildStderr) {
        let logs = self.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let line = serde_json::from_str(&line).unwrap_or(Value::String(line));
                logs.0.0.lock().unwrap().push(line);
                logs.0.1.notify_waiters();
            }
            logs.0.0.lock().unwrap().push(Self::end());
            logs.0.1.notify_waiters();
        });
    }

    /// Stands behind the last line.
    fn end() -> Value {
        io::ErrorKind::UnexpectedEof.to_string().into()
    }

    pub(crate) fn all(&self) -> Vec<Value> {
        self.0.0.lock().unwrap().clone()
    }

    /// The first line, past or future, that this is true of.
    pub(crate) async fn wait_for(&self, what: &str, is_it: impl Fn(&Value) -> bool) -> Value {
        let seen = async {
            loop {
                let mut notified = std::pin::pin!(self.0.1.notified());
                notified.as_mut().enable();
                let lines = self.all();
                if let Some(line) = lines.iter().find(|line| is_it(line)) {
                    return line.clone();
                }
                let ended = lines.last() == Some(&Self::end());
                assert!(!ended, "the proxy ended before {what} was logged: {lines:#?}");
                notified.await;
            }
        };
        patiently(what, seen).await
    }

    /// The access-log line of the first request to this path that has ended or will end.
    pub(crate) async fn request(&self, path: &str) -> Value {
        let is_it = |line: &Value| line["target"] == "tollgate::access" && line["fields"]["path"] == path;
        self.wait_for(&format!("the request to {path}"), is_it).await["fields"].clone()
    }

    /// The access-log lines of ended requests.
    pub(crate) fn requests(&self) -> Vec<Value> {
        let of_request = |line: &Value| line["target"] == "tollgate::access";
        self.all().into_iter().filter(of_request).map(|line| line["fields"].clone()).collect()
    }
}
