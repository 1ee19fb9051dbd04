//! Who is asked, and what.

use std::{collections::BTreeMap, io};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    Request, Uri,
    client::conn::http1::{self, SendRequest},
    header::{CONTENT_TYPE, HOST},
};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::Aim;

const ASK: &str = r#"{"model":"made-up","messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Say hello."}]}"#;

pub(crate) type Connection = SendRequest<Full<Bytes>>;
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

pub(crate) struct Target {
    url: Uri,
    key: String,
    body: Bytes,
    tls: Option<TlsConnector>,
}

impl Target {
    /// Asks for a completion.
    pub(crate) fn new(Aim { url, key }: Aim) -> Self {
        let tls = (url.scheme_str() == Some("https")).then(benches::connector);
        Self { url, key, body: Bytes::from_static(ASK.as_bytes()), tls }
    }

    /// Asks for it in `events` pieces, `pace` milliseconds apart.
    pub(crate) fn asking_for_a_stream(mut self, events: u32, pace: u32) -> Self {
        let rest = ASK.strip_prefix('{').unwrap_or_default();
        self.body = Bytes::from(format!("{{\"stream\":true,\"events\":{events},\"pace\":{pace},{rest}"));
        self
    }

    pub(crate) async fn connect(&self) -> Result<Connection, Failure> {
        let authority = self.url.authority().ok_or("the URL has no host")?;
        let socket = TcpStream::connect(authority.as_str()).await?;
        socket.set_nodelay(true)?;
        match &self.tls {
            None => speak_http(socket).await,
            Some(tls) => speak_http(tls.connect("localhost".try_into()?, socket).await?).await,
        }
    }

    pub(crate) fn request(&self) -> Request<Full<Bytes>> {
        let target = self.url.path_and_query().map_or("/", |target| target.as_str());
        Request::post(target)
            .header(HOST, self.url.authority().map_or("localhost", |authority| authority.as_str()))
            .header(CONTENT_TYPE, "application/json")
            .header("x-api-key", &self.key)
            .body(Full::from(self.body.clone()))
            .expect("the parts are valid")
    }

    /// Asks for a completion and reads it: its status.
    pub(crate) async fn complete(&self, connection: &mut Connection) -> Result<u16, Failure> {
        connection.ready().await?;
        let answer = connection.send_request(self.request()).await?;
        let status = answer.status().as_u16();
        answer.into_body().collect().await?;
        Ok(status)
    }
}

async fn speak_http<T>(io: T) -> Result<Connection, Failure>
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, driver) = http1::handshake(TokioIo::new(io)).await?;
    // Whoever uses the connection sees how it ended.
    tokio::spawn(driver);
    Ok(sender)
}

/// What one request gets; `error` where it gets nothing.
pub(crate) async fn one(target: &Target) -> Value {
    match ask_once(target).await {
        Ok(answer) => answer,
        Err(error) => json!({ "error": error.to_string() }),
    }
}

async fn ask_once(target: &Target) -> Result<Value, Failure> {
    let mut connection = target.connect().await?;
    let answer = connection.send_request(target.request()).await?;
    let status = answer.status().as_u16();
    let fields: BTreeMap<_, _> = answer
        .headers()
        .iter()
        .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
        .collect();
    let body = answer.into_body().collect().await?.to_bytes();
    Ok(json!({ "status": status, "headers": fields, "body": String::from_utf8_lossy(&body) }))
}

/// Waits until standard input ends, which is how whoever started this says that it is enough.
pub(crate) async fn until_told() {
    let told = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink()));
    let _ = told.await;
}
