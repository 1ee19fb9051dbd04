//! An HTTP/1.1 client that writes its bytes itself.

use std::io;

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

use super::{Proxy, patiently, secret};

/// One connection to the proxy.
#[derive(Debug)]
pub(crate) struct Plain(BufReader<TlsStream<TcpStream>>);

/// An answer as it stands on the wire.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Lower-case names, in order.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(known, _)| known == name).map(|(_, value)| &**value);
        let value = values.next();
        assert!(values.next().is_none(), "{name} stands once");
        value
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

impl Plain {
    pub(crate) async fn connect(proxy: &Proxy) -> Self {
        Self(BufReader::new(proxy.connect(Some("http/1.1")).await))
    }

    /// Sends a request line, a valid credential of this key and these header lines, each with its CRLF.
    pub(crate) async fn request(&mut self, line: &str, id: &str, headers: &str) {
        let secret = secret(id);
        let head = format!("{line} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {secret}\r\n{headers}\r\n");
        self.send(head).await.unwrap();
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) -> io::Result<()> {
        self.0.get_mut().write_all(bytes.as_ref()).await?;
        self.0.get_mut().flush().await
    }

    /// The next head, an interim one too.
    pub(crate) async fn head(&mut self) -> io::Result<Answer> {
        patiently("the head of an answer", self.read_head()).await
    }

    /// The next whole answer, with a body in either framing.
    pub(crate) async fn answer(&mut self) -> io::Result<Answer> {
        let mut answer = self.head().await?;
        answer.body = patiently("the body of an answer", self.read_body(&answer)).await?;
        Ok(answer)
    }

    /// So many bytes that follow a head.
    pub(crate) async fn bytes(&mut self, count: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        patiently("bytes after a head", self.0.read_exact(&mut bytes)).await?;
        Ok(bytes)
    }

    /// What comes until the other side closes.
    pub(crate) async fn rest(&mut self) -> io::Result<Vec<u8>> {
        let mut rest = Vec::new();
        patiently("the end of a connection", self.0.read_to_end(&mut rest)).await?;
        Ok(rest)
    }

    /// Says that nothing more will be sent; what comes can still be read.
    pub(crate) async fn close_one_way(&mut self) {
        self.0.get_mut().shutdown().await.unwrap();
    }

    /// The connection itself.
    pub(crate) fn into_stream(self) -> BufReader<TlsStream<TcpStream>> {
        self.0
    }

    /// Closes the socket with a reset in place of an orderly end.
    pub(crate) fn reset(self) {
        self.0.get_ref().get_ref().0.set_zero_linger().unwrap();
    }

    /// Closes its own side of the socket, and says nothing in TLS before.
    pub(crate) async fn half_close(&mut self) {
        self.0.get_mut().get_mut().0.shutdown().await.unwrap();
    }

    /// Closes its own side of the TLS connection, and leaves the socket open.
    pub(crate) async fn close_notify(&mut self) {
        self.0.get_mut().get_mut().1.send_close_notify();
        self.0.get_mut().flush().await.unwrap();
    }

    async fn read_head(&mut self) -> io::Result<Answer> {
        let status = self.line().await?;
        let status = status.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status line");
        let mut answer = Answer { status, ..Answer::default() };
        loop {
            let line = self.line().await?;
            if line.is_empty() {
                return Ok(answer);
            }
            let (name, value) = line.split_once(':').expect("a header has a colon");
            answer.headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
    }

    async fn read_body(&mut self, answer: &Answer) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        if let Some(length) = answer.header("content-length") {
            assert_eq!(answer.header("transfer-encoding"), None, "one framing only");
            body.resize(length.parse().unwrap(), 0);
            self.0.read_exact(&mut body).await?;
            return Ok(body);
        }
        assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
        loop {
            let chunk = self.chunk().await?;
            if chunk.is_empty() {
                return Ok(body);
            }
            body.extend(chunk);
        }
    }

    /// The next chunk of a body; an empty one is the last.
    pub(crate) async fn chunk(&mut self) -> io::Result<Vec<u8>> {
        let size = usize::from_str_radix(&self.line().await?, 16).map_err(io::Error::other)?;
        let mut chunk = vec![0; size];
        self.0.read_exact(&mut chunk).await?;
        assert_eq!(self.line().await?, "");
        Ok(chunk)
    }

    async fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        self.0.read_line(&mut line).await?;
        match line.strip_suffix("\r\n") {
            Some(line) => Ok(line.to_owned()),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}
