//! Clients that write the bytes themselves, to do what no library does.

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};
use tokio_rustls::client::TlsStream;

use super::{Proxy, patiently, secret};

/// An answer as it came.
#[derive(Clone, Debug)]
pub(crate) struct RawAnswer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Whether the body came to the end that its framing promises.
    pub(crate) whole: bool,
}

impl RawAnswer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| &**value)
    }
}

/// HTTP/1.1 by hand.
#[derive(Debug)]
pub(crate) struct Raw(BufReader<TlsStream<TcpStream>>);

impl Raw {
    pub(crate) async fn to(proxy: &Proxy) -> Self {
        Self(BufReader::new(proxy.connect(Some("http/1.1")).await))
    }

    /// Sends as much as the other side takes: it may have closed already, which the test sees when it reads.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        let sent = self.0.write_all(bytes.as_ref()).await.is_ok();
        sent && self.0.flush().await.is_ok()
    }

    /// A GET on behalf of the key with this id.
    pub(crate) async fn get(&mut self, path: &str, id: &str) {
        let key = secret(id);
        self.send(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {key}\r\n\r\n")).await;
    }

    /// The next answer, or nothing if the connection ends before its head is complete.
    pub(crate) async fn answer(&mut self) -> Option<RawAnswer> {
        patiently("an answer", async {
            let mut answer = self.head().await?;
            answer.whole = match answer.header("content-length") {
                Some(length) => {
                    answer.body.resize(length.parse().unwrap(), 0);
                    self.0.read_exact(&mut answer.body).await.is_ok()
                }
                None => self.chunks(&mut answer.body).await.is_some(),
            };
            Some(answer)
        })
        .await
    }

    /// The next head, with its body still to come.
    pub(crate) async fn head(&mut self) -> Option<RawAnswer> {
        let status = self.line().await?.split(' ').nth(1)?.parse().ok()?;
        let mut headers = Vec::new();
        loop {
            let line = self.line().await?;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        Some(RawAnswer { status, headers, body: Vec::new(), whole: false })
    }

    async fn chunks(&mut self, body: &mut Vec<u8>) -> Option<()> {
        loop {
            let size = usize::from_str_radix(&self.line().await?, 16).ok()?;
            let start = body.len();
            body.resize(start + size, 0);
            self.0.read_exact(&mut body[start..]).await.ok()?;
            self.line().await?;
            if size == 0 {
                return Some(());
            }
        }
    }

    /// The next line of whatever comes.
    pub(crate) async fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let read = patiently("a line", self.0.read_line(&mut line)).await;
        read.ok().filter(|&bytes| bytes > 0)?;
        Some(line.trim_end().to_owned())
    }

    /// What still comes until the connection ends, in order or not.
    pub(crate) async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        let _ = patiently("the end of the connection", self.0.read_to_end(&mut rest)).await;
        rest
    }
}

/// A frame of HTTP/2.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;

/// The bytes of a frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = &(payload.len() as u32).to_be_bytes()[1..];
    [length, &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// HTTP/2 by hand.
#[derive(Debug)]
pub(crate) struct RawH2(TlsStream<TcpStream>);

impl RawH2 {
    /// Says hello, with a window of so many bytes for each stream.
    pub(crate) async fn to(proxy: &Proxy, stream_window: u32) -> Self {
        let mut this = Self(proxy.connect(Some("h2")).await);
        this.0.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let initial_window_size = [&[0, 4][..], &stream_window.to_be_bytes()].concat();
        this.send(SETTINGS, 0, 0, &initial_window_size).await;
        this
    }

    pub(crate) async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        // The other side may have closed, which the test sees when it reads.
        let _ = self.0.write_all(&frame(kind, flags, stream, payload)).await;
        let _ = self.0.flush().await;
    }

    /// A GET on behalf of the key with this id.
    pub(crate) async fn get(&mut self, stream: u32, path: &str, id: &str) {
        let key = secret(id);
        let fields = [
            (":method", "GET"),
            (":scheme", "https"),
            (":authority", "localhost"),
            (":path", path),
            ("x-api-key", &key),
        ];
        let mut block = Vec::new();
        for (name, value) in fields {
            // Literals that are neither indexed nor compressed (RFC 7541 §6.2.2).
            block.push(0);
            for text in [name, value] {
                block.push(u8::try_from(text.len()).ok().filter(|&length| length < 127).unwrap());
                block.extend(text.as_bytes());
            }
        }
        self.send(HEADERS, END_STREAM | END_HEADERS, stream, &block).await;
    }

    /// Closes the socket with a reset in place of an orderly end.
    pub(crate) fn reset(self) {
        self.0.get_ref().0.set_zero_linger().unwrap();
    }

    /// The next frame, or nothing when the connection has ended.
    pub(crate) async fn frame(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        patiently("a frame", self.0.read_exact(&mut head)).await.ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        let mut payload = vec![0; length as usize];
        patiently("a frame's payload", self.0.read_exact(&mut payload)).await.ok()?;
        Some(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// The next frame of this kind on this stream.
    pub(crate) async fn frame_of(&mut self, kind: u8, stream: u32) -> Option<Frame> {
        loop {
            let frame = self.frame().await?;
            if (frame.kind, frame.stream) == (kind, stream) {
                return Some(frame);
            }
        }
    }
}
