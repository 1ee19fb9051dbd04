//! An upstream whose bytes the test reads and writes itself, for what no script can say.

use std::io;

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
};

use super::{
    Received, patiently,
    upstream::{read_body, read_head},
};

/// It listens, and does nothing else by itself.
#[derive(Debug)]
pub(crate) struct Wire(TcpListener);

/// One connection that came.
#[derive(Debug)]
pub(crate) struct Link(BufReader<TcpStream>);

impl Wire {
    pub(crate) async fn listen() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.0.local_addr().unwrap())
    }

    pub(crate) async fn accept(&self) -> Link {
        let (socket, _) = patiently("a connection to the upstream", self.0.accept()).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Link(BufReader::new(socket))
    }

    /// Frees the port, so that connections are refused.
    pub(crate) fn close(self) {
        drop(self);
    }
}

impl Link {
    /// The head of a request; its body stays where it is.
    pub(crate) async fn head(&mut self) -> Received {
        let head = patiently("the head of a request at the upstream", read_head(&mut self.0)).await;
        head.unwrap().expect("a request and not the end of the connection")
    }

    /// A whole request.
    pub(crate) async fn request(&mut self) -> Received {
        let mut request = self.head().await;
        let body = patiently("a request's body at the upstream", read_body(&mut self.0, &request)).await;
        request.body = body.unwrap();
        request
    }

    /// So many bytes of a body.
    pub(crate) async fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        patiently("bytes at the upstream", self.0.read_exact(&mut bytes)).await.unwrap();
        bytes
    }

    /// The next chunk of a body; an empty one is the last.
    pub(crate) async fn chunk(&mut self) -> Vec<u8> {
        let mut line = String::new();
        patiently("a chunk at the upstream", self.0.read_line(&mut line)).await.unwrap();
        let mut chunk = self.bytes(usize::from_str_radix(line.trim_end(), 16).unwrap() + 2).await;
        assert_eq!(chunk.split_off(chunk.len() - 2), b"\r\n");
        chunk
    }

    /// The next frame of HTTP/2: its type and its payload.
    pub(crate) async fn frame(&mut self) -> (u8, Vec<u8>) {
        let head = self.bytes(9).await;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        (head[3], self.bytes(length as usize).await)
    }

    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(bytes.as_ref()).await.unwrap();
    }

    /// Whether the other side, which may have closed, still takes this.
    pub(crate) async fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.0.get_mut().write_all(bytes.as_ref()).await.is_ok()
    }

    /// Says that nothing more will be sent; what comes can still be read.
    pub(crate) async fn close_one_way(&mut self) {
        self.0.get_mut().shutdown().await.unwrap();
    }

    /// Closes the socket with a reset in place of an orderly end.
    pub(crate) fn reset(self) {
        self.0.get_ref().set_zero_linger().unwrap();
    }

    /// The connection itself.
    pub(crate) fn into_stream(self) -> BufReader<TcpStream> {
        self.0
    }

    /// A small answer, after which the connection can be used again.
    pub(crate) async fn ok(&mut self) {
        self.send("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
    }

    /// Waits until the other side has closed, and returns what it sent before.
    pub(crate) async fn ended(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        let end = patiently("the end of a connection at the upstream", self.0.read_to_end(&mut rest)).await;
        if let Err(error) = end {
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}");
        }
        rest
    }
}
