//! The scripted LLM server. It speaks HTTP/1.1 on a plain socket by hand, so that it can also do what no server should.

use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    sync::{Notify, mpsc},
    task::{JoinHandle, JoinSet},
};

use super::patiently;

/// A request as the upstream got it, byte for byte.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) method: String,
    pub(crate) target: String,
    /// Lower-case names, in order.
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Which connection it came by, counted from 0.
    pub(crate) connection: usize,
}

impl Received {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(known, _)| known == name).map(|(_, value)| &**value);
        let value = values.next();
        assert!(values.next().is_none(), "{name} stands once");
        value
    }
}

/// Opens once, and stays open.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Notify)>);

impl Gate {
    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_waiters();
    }

    pub(crate) async fn opened(&self) {
        loop {
            let mut notified = std::pin::pin!(self.0.1.notified());
            notified.as_mut().enable();
            if *self.0.0.lock().unwrap() {
                return;
            }
            notified.await;
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Send(Vec<u8>),
    Wait(Gate),
    Hang,
    Echo,
    Close,
    Reset,
}

/// What the upstream does about one request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script(Vec<Step>);

impl Script {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn json(status: u16, body: &str) -> Self {
        Self::new().send(format!(
            "HTTP/1.1 {status} Whatever\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ))
    }

    /// The head of a stream of server-sent events; [`Script::event`]s follow.
    pub(crate) fn sse() -> Self {
        Self::new()
            .send("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    }

    pub(crate) fn event(self, data: &str) -> Self {
        self.chunk(&format!("data: {data}\n\n"))
    }

    pub(crate) fn chunk(self, bytes: &str) -> Self {
        self.send(format!("{:x}\r\n{bytes}\r\n", bytes.len()))
    }

    pub(crate) fn end(self) -> Self {
        self.send("0\r\n\r\n")
    }

    pub(crate) fn send(mut self, bytes: impl AsRef<[u8]>) -> Self {
        self.0.push(Step::Send(bytes.as_ref().to_vec()));
        self
    }

    /// Goes on when the test opens the gate.
    pub(crate) fn wait(mut self, gate: &Gate) -> Self {
        self.0.push(Step::Wait(gate.clone()));
        self
    }

    /// Takes its last step only when the test opens the gate.
    pub(crate) fn wait_before_last(mut self, gate: &Gate) -> Self {
        let last = self.0.len() - 1;
        self.0.insert(last, Step::Wait(gate.clone()));
        self
    }

    /// Switches to WebSocket, with these header lines, each with its CRLF.
    pub(crate) fn switch(headers: &str) -> Self {
        Self::new().send(format!(
            "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: websocket\r\n{headers}\r\n"
        ))
    }

    /// Sends back every byte that comes, until the other side closes.
    pub(crate) fn echo(mut self) -> Self {
        self.0.push(Step::Echo);
        self
    }

    /// Does nothing more until the other side closes.
    pub(crate) fn hang(mut self) -> Self {
        self.0.push(Step::Hang);
        self
    }

    /// Closes the connection in an orderly way.
    pub(crate) fn close(mut self) -> Self {
        self.0.push(Step::Close);
        self
    }

    /// Resets the connection.
    pub(crate) fn reset(mut self) -> Self {
        self.0.push(Step::Reset);
        self
    }
}

type Behaviour = Arc<dyn Fn(&Received) -> Script + Send + Sync>;

#[derive(Debug, Default)]
struct Log {
    received: Vec<Received>,
    connections: usize,
}

/// The server. It ends with the test's runtime.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    log: Arc<Mutex<Log>>,
    arrivals: tokio::sync::Mutex<mpsc::UnboundedReceiver<Received>>,
    closed: tokio::sync::Mutex<mpsc::UnboundedReceiver<usize>>,
    server: JoinHandle<()>,
}

impl Upstream {
    /// Answers every request as `behaviour` says.
    pub(crate) async fn start(behaviour: impl Fn(&Received) -> Script + Send + Sync + 'static) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), behaviour).await
    }

    /// The same, at an address that was left by another.
    pub(crate) async fn start_at(
        address: SocketAddr,
        behaviour: impl Fn(&Received) -> Script + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let log = Arc::new(Mutex::new(Log::default()));
        let (arrived, arrivals) = mpsc::unbounded_channel();
        let (gone, closed) = mpsc::unbounded_channel();
        let behaviour: Behaviour = Arc::new(behaviour);
        let shared = log.clone();
        let server = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (log, behaviour, arrived, gone) =
                    (shared.clone(), behaviour.clone(), arrived.clone(), gone.clone());
                connections.spawn(async move {
                    let connection = {
                        let mut log = log.lock().unwrap();
                        log.connections += 1;
                        log.connections - 1
                    };
                    // How a connection ends is the test's business, which sees it on the other side.
                    let _ = serve(socket, connection, &log, &behaviour, &arrived).await;
                    let _ = gone.send(connection);
                });
            }
        });
        Self { address, log, arrivals: arrivals.into(), closed: closed.into(), server }
    }

    /// Drops all connections and frees the port, as a process does that is killed.
    pub(crate) async fn kill(self) -> SocketAddr {
        self.server.abort();
        let _ = self.server.await;
        self.address
    }

    /// Answers every request with a small completion.
    pub(crate) async fn ok() -> Self {
        Self::start(|_| Script::json(200, r#"{"object":"chat.completion"}"#)).await
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests so far.
    pub(crate) fn received(&self) -> Vec<Received> {
        self.log.lock().unwrap().received.clone()
    }

    /// How many connections there have been.
    pub(crate) fn connections(&self) -> usize {
        self.log.lock().unwrap().connections
    }

    /// The next request, when it is there.
    pub(crate) async fn next_request(&self) -> Received {
        let mut arrivals = self.arrivals.lock().await;
        patiently("a request at the upstream", arrivals.recv()).await.unwrap()
    }

    /// The next connection whose end is seen here.
    pub(crate) async fn next_closed(&self) -> usize {
        let mut closed = self.closed.lock().await;
        patiently("the end of a connection at the upstream", closed.recv()).await.unwrap()
    }
}

async fn serve(
    socket: TcpStream,
    connection: usize,
    log: &Mutex<Log>,
    behaviour: &Behaviour,
    arrived: &mpsc::UnboundedSender<Received>,
) -> io::Result<()> {
    socket.set_nodelay(true)?;
    let mut socket = BufReader::new(socket);
    while let Some(mut request) = read_head(&mut socket).await? {
        request.connection = connection;
        request.body = read_body(&mut socket, &request).await?;
        log.lock().unwrap().received.push(request.clone());
        let script = behaviour(&request);
        let _ = arrived.send(request);
        for step in script.0 {
            match step {
                Step::Send(bytes) => socket.write_all(&bytes).await?,
                Step::Wait(gate) => gate.opened().await,
                Step::Hang => drop(socket.read_u8().await?),
                Step::Echo => {
                    let (mut read, mut write) = tokio::io::split(&mut socket);
                    tokio::io::copy_buf(&mut BufReader::new(&mut read), &mut write).await?;
                    return Ok(());
                }
                Step::Close => return Ok(()),
                Step::Reset => return socket.get_ref().set_zero_linger(),
            }
        }
    }
    Ok(())
}

pub(super) async fn read_head(socket: &mut BufReader<TcpStream>) -> io::Result<Option<Received>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if socket.read_line(&mut line).await? == 0 {
            return Ok(None);
        }
        let line = line.strip_suffix("\r\n").expect("every line ends in CRLF").to_owned();
        if line.is_empty() {
            break;
        }
        lines.push(line);
    }
    let mut words = lines[0].split(' ').map(str::to_owned);
    let (method, target) = (words.next().unwrap(), words.next().unwrap());
    let header = |line: &String| {
        let (name, value) = line.split_once(':').expect("a header has a colon");
        (name.to_ascii_lowercase(), value.trim().to_owned())
    };
    let headers = lines[1..].iter().map(header).collect();
    Ok(Some(Received { method, target, headers, body: Vec::new(), connection: 0 }))
}

pub(super) async fn read_body(socket: &mut BufReader<TcpStream>, request: &Received) -> io::Result<Vec<u8>> {
    let headers: HashMap<_, _> = request.headers.iter().cloned().collect();
    let mut body = Vec::new();
    if let Some(length) = headers.get("content-length") {
        assert!(!headers.contains_key("transfer-encoding"), "one framing only");
        body.resize(length.parse().unwrap(), 0);
        socket.read_exact(&mut body).await?;
    } else if headers.contains_key("transfer-encoding") {
        loop {
            let mut line = String::new();
            socket.read_line(&mut line).await?;
            let size = usize::from_str_radix(line.trim(), 16).map_err(io::Error::other)?;
            let start = body.len();
            body.resize(start + size, 0);
            socket.read_exact(&mut body[start..]).await?;
            socket.read_line(&mut line).await?;
            if size == 0 {
                break;
            }
        }
    }
    Ok(body)
}
