//! A TCP proxy before Redis that fails as it is told, for what no redis-server does on demand.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};

use super::{Gate, Redis, patiently};

/// It ends with the test's runtime.
#[derive(Debug)]
pub(crate) struct WeakLink {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// What becomes of a question for a decision, and of its answer. Other traffic is left alone.
#[derive(Clone, Debug)]
pub(crate) enum Mishap {
    /// Redis decides, and the connection is reset before its answer passes.
    LoseAnswer,
    /// So many bytes of the answer pass, and the connection ends.
    CutAnswer(usize),
    /// The answer passes when the test opens the gate.
    HoldAnswer(Gate),
    /// Redis is not asked, and this is answered in its place.
    Instead(Vec<u8>),
}

/// How the link is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Sound,
    /// Answers take so much longer.
    Slow(Duration),
    /// Nothing passes, and no connection ends. What was connected then stays dead for ever.
    BlackHole,
    /// Nobody listens, and what was connected is reset.
    Closed,
}

#[derive(Debug)]
struct Shared {
    redis: SocketAddr,
    state: watch::Sender<State>,
    is_listening: watch::Sender<bool>,
    /// Connections by which something passes.
    sound: watch::Sender<usize>,
    held: watch::Sender<usize>,
    mishaps: Mutex<Mishaps>,
    connections: AtomicUsize,
    open: AtomicUsize,
    bytes: AtomicU64,
}

#[derive(Debug, Default)]
struct Mishaps {
    next: VecDeque<Mishap>,
    always: Option<Mishap>,
}

impl WeakLink {
    pub(crate) async fn to(redis: &Redis) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            redis: redis.address(),
            state: watch::Sender::new(State::Sound),
            is_listening: watch::Sender::new(true),
            sound: watch::Sender::new(0),
            held: watch::Sender::new(0),
            mishaps: Mutex::default(),
            connections: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            bytes: AtomicU64::new(0),
        });
        tokio::spawn(listen(shared.clone(), address, listener));
        Self { address, shared }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// The next decision goes wrong so.
    pub(crate) fn next(&self, mishap: Mishap) {
        self.shared.mishaps.lock().unwrap().next.push_back(mishap);
    }

    /// Every decision goes wrong so, until the link is mended.
    pub(crate) fn always(&self, mishap: Mishap) {
        self.shared.mishaps.lock().unwrap().always = Some(mishap);
    }

    pub(crate) fn slow(&self, by: Duration) {
        self.shared.state.send_replace(State::Slow(by));
    }

    pub(crate) async fn black_hole(&self) {
        self.shared.state.send_replace(State::BlackHole);
        let mut sound = self.shared.sound.subscribe();
        patiently("the end of all traffic", sound.wait_for(|now| *now == 0)).await.unwrap();
    }

    pub(crate) async fn close(&self) {
        self.shared.state.send_replace(State::Closed);
        self.until_listening(false).await;
    }

    /// New connections are sound again.
    pub(crate) async fn mend(&self) {
        *self.shared.mishaps.lock().unwrap() = Mishaps::default();
        self.shared.state.send_replace(State::Sound);
        self.until_listening(true).await;
    }

    async fn until_listening(&self, expected: bool) {
        let mut listening = self.shared.is_listening.subscribe();
        patiently("the link's listener", listening.wait_for(|now| *now == expected)).await.unwrap();
    }

    /// Waits until so many answers have been held back.
    pub(crate) async fn held(&self, count: usize) {
        let mut held = self.shared.held.subscribe();
        patiently("an answer of Redis", held.wait_for(|now| *now >= count)).await.unwrap();
    }

    /// How many connections there have been.
    pub(crate) fn connections(&self) -> usize {
        self.shared.connections.load(SeqCst)
    }

    /// How many connections there are.
    pub(crate) fn open(&self) -> usize {
        self.shared.open.load(SeqCst)
    }

    /// How many bytes have come from Tollgate.
    pub(crate) fn bytes(&self) -> u64 {
        self.shared.bytes.load(SeqCst)
    }
}

async fn listen(shared: Arc<Shared>, address: SocketAddr, listener: TcpListener) {
    let mut listener = Some(listener);
    let mut states = shared.state.subscribe();
    loop {
        if *states.borrow_and_update() == State::Closed {
            listener = None;
            shared.is_listening.send_replace(false);
            states.changed().await.expect("the state lives as long as this task");
            continue;
        }
        let open = match listener.take() {
            Some(open) => open,
            None => TcpListener::bind(address).await.expect("nobody took the port in between"),
        };
        shared.is_listening.send_replace(true);
        tokio::select! {
            accepted = open.accept() => {
                shared.connections.fetch_add(1, SeqCst);
                shared.open.fetch_add(1, SeqCst);
                tokio::spawn(connection(shared.clone(), accepted.unwrap().0));
            }
            _ = states.changed() => {}
        }
        listener = Some(open);
    }
}

async fn connection(shared: Arc<Shared>, mut tollgate: TcpStream) {
    tollgate.set_nodelay(true).unwrap();
    shared.sound.send_modify(|sound| *sound += 1);
    let ending = pass(&shared, &mut tollgate).await;
    shared.sound.send_modify(|sound| *sound -= 1);
    match ending {
        Ok(Ending::Orderly) => {}
        Ok(Ending::Reset) | Err(_) => tollgate.set_zero_linger().unwrap(),
        Ok(Ending::Dead) => while tollgate.read(&mut [0; 4096]).await.is_ok_and(|read| read > 0) {},
    }
    drop(tollgate);
    shared.open.fetch_sub(1, SeqCst);
}

enum Ending {
    Orderly,
    Reset,
    Dead,
}

async fn pass(shared: &Shared, tollgate: &mut TcpStream) -> io::Result<Ending> {
    let mut states = shared.state.subscribe();
    // A black hole has no server behind it.
    if *states.borrow_and_update() == State::BlackHole {
        return Ok(Ending::Dead);
    }
    let mut redis = TcpStream::connect(shared.redis).await?;
    redis.set_nodelay(true)?;
    let (mut question, mut answer) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    let mut mishap = None;
    loop {
        tokio::select! {
            read = tollgate.read(&mut question) => {
                let question = &question[..read?];
                if question.is_empty() {
                    return Ok(Ending::Orderly);
                }
                shared.bytes.fetch_add(question.len() as u64, SeqCst);
                if is_for_a_decision(question) {
                    mishap = shared.mishap();
                }
                match mishap.take_if(|mishap| matches!(mishap, Mishap::Instead(_))) {
                    Some(Mishap::Instead(bytes)) => tollgate.write_all(&bytes).await?,
                    _ => redis.write_all(question).await?,
                }
            }
            read = redis.read(&mut answer) => {
                let answer = &answer[..read?];
                if answer.is_empty() {
                    return Ok(Ending::Orderly);
                }
                if let Some(ending) = shared.answer(tollgate, answer, mishap.take()).await? {
                    return Ok(ending);
                }
            }
            _ = states.changed() => match *states.borrow_and_update() {
                State::BlackHole => return Ok(Ending::Dead),
                State::Closed => return Ok(Ending::Reset),
                State::Sound | State::Slow(_) => {}
            }
        }
    }
}

impl Shared {
    fn mishap(&self) -> Option<Mishap> {
        let mut mishaps = self.mishaps.lock().unwrap();
        mishaps.next.pop_front().or_else(|| mishaps.always.clone())
    }

    async fn answer(
        &self,
        tollgate: &mut TcpStream,
        answer: &[u8],
        mishap: Option<Mishap>,
    ) -> io::Result<Option<Ending>> {
        let state = *self.state.borrow();
        if let State::Slow(by) = state {
            tokio::time::sleep(by).await;
        }
        match mishap {
            Some(Mishap::LoseAnswer) => return Ok(Some(Ending::Reset)),
            Some(Mishap::CutAnswer(bytes)) => {
                tollgate.write_all(&answer[..bytes]).await?;
                return Ok(Some(Ending::Orderly));
            }
            Some(Mishap::HoldAnswer(gate)) => {
                self.held.send_modify(|held| *held += 1);
                gate.opened().await;
            }
            Some(Mishap::Instead(_)) | None => {}
        }
        tollgate.write_all(answer).await?;
        Ok(None)
    }
}

/// Neither a greeting nor a heartbeat.
fn is_for_a_decision(question: &[u8]) -> bool {
    let has = |word: &[u8]| question.windows(word.len()).any(|window| window == word);
    has(b"EVAL") && !has(b"~replicas")
}
