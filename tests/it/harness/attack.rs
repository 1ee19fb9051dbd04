//! Fires requests at proxies over many connections at once, and writes down what came of each.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use super::{
    Plain, Proxy,
    oracle::{Observation, Seen},
    secret,
};

/// Where requests go, and the clock that all of them are seen by.
#[derive(Clone, Debug)]
pub(crate) struct Attack {
    proxies: Vec<Arc<Proxy>>,
    began: Instant,
}

/// One request, and its answer if there was one.
#[derive(Clone, Debug)]
pub(crate) struct Shot {
    pub(crate) observation: Observation,
    pub(crate) status: Option<u16>,
    /// Lower-case names.
    headers: Vec<(String, String)>,
}

impl Shot {
    pub(crate) fn is_admitted(&self) -> bool {
        self.observation.seen == Seen::Admitted
    }

    pub(crate) fn is_refused(&self) -> bool {
        self.observation.seen == Seen::Refused
    }

    /// The only value of a header.
    pub(crate) fn header(&self, name: &str) -> &str {
        let values: Vec<_> = self.headers.iter().filter(|(known, _)| known == name).collect();
        assert_eq!(values.len(), 1, "{name} stands once: {self:?}");
        &values[0].1
    }

    pub(crate) fn number(&self, name: &str) -> u64 {
        let value = self.header(name);
        value.parse().unwrap_or_else(|_| panic!("{name} is a number that is not negative: {value}"))
    }

    pub(crate) fn retry_after(&self) -> Duration {
        Duration::from_millis(self.number("retry-after-ms"))
    }
}

/// When an attack is over.
#[derive(Clone, Debug)]
enum End {
    After(Arc<AtomicUsize>),
    At(Instant),
}

impl End {
    /// Whether there is one more to fire.
    fn one_more(&self) -> bool {
        match self {
            Self::After(left) => left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_ok(),
            Self::At(end) => Instant::now() < *end,
        }
    }
}

impl Attack {
    pub(crate) fn on(proxies: &[Arc<Proxy>]) -> Self {
        Self { proxies: proxies.to_vec(), began: Instant::now() }
    }

    /// So many requests on behalf of this key, as fast as they go.
    pub(crate) async fn storm(&self, id: &str, requests: usize, connections: usize) -> Vec<Shot> {
        self.run(id, connections, || End::After(AtomicUsize::new(requests).into())).await
    }

    /// Requests for so long, each connection sending the next as soon as it has an answer.
    pub(crate) async fn hammer(&self, id: &str, time: Duration, connections: usize) -> Vec<Shot> {
        self.run(id, connections, || End::At(Instant::now() + time)).await
    }

    /// One request to this proxy.
    pub(crate) async fn fire(&self, proxy: usize, id: &str) -> Shot {
        let mut connection = Plain::connect(&self.proxies[proxy]).await;
        self.shoot(&mut connection, id).await.0
    }

    /// One request after another to this proxy, over one connection.
    pub(crate) async fn series(&self, proxy: usize, id: &str, requests: usize) -> Vec<Shot> {
        let mut connection = Plain::connect(&self.proxies[proxy]).await;
        let mut shots = Vec::new();
        for _ in 0..requests {
            shots.push(self.shoot(&mut connection, id).await.0);
        }
        shots
    }

    /// All connections stand before the first request is sent.
    async fn run(&self, id: &str, connections: usize, end: impl FnOnce() -> End) -> Vec<Shot> {
        let mut open = Vec::new();
        for n in 0..connections {
            let proxy = self.proxies[n % self.proxies.len()].clone();
            open.push((Plain::connect(&proxy).await, proxy));
        }
        let end = end();
        let senders = open.into_iter().map(|(connection, proxy)| {
            let (this, id, end) = (self.clone(), id.to_owned(), end.clone());
            tokio::spawn(async move { this.keep_shooting(connection, &proxy, &id, &end).await })
        });
        let mut shots = Vec::new();
        for sender in senders.collect::<Vec<_>>() {
            shots.extend(sender.await.unwrap());
        }
        shots
    }

    async fn keep_shooting(&self, mut connection: Plain, proxy: &Proxy, id: &str, end: &End) -> Vec<Shot> {
        let mut shots = Vec::new();
        while end.one_more() {
            let (shot, broken) = self.shoot(&mut connection, id).await;
            shots.push(shot);
            if broken {
                connection = Plain::connect(proxy).await;
            }
        }
        shots
    }

    /// The request, and whether its connection is of no more use.
    async fn shoot(&self, connection: &mut Plain, id: &str) -> (Shot, bool) {
        let sent = self.began.elapsed();
        let answer = exchange(connection, id).await;
        let received = self.began.elapsed();
        let broken = answer.is_err();
        let (status, headers) = match answer {
            Ok(answer) => (Some(answer.status), answer.headers),
            Err(_) => (None, Vec::new()),
        };
        let seen = match status {
            Some(200) => Seen::Admitted,
            Some(429) => Seen::Refused,
            _ => Seen::Unknown,
        };
        (Shot { observation: Observation { sent, received, seen }, status, headers }, broken)
    }
}

async fn exchange(connection: &mut Plain, id: &str) -> io::Result<super::Answer> {
    let secret = secret(id);
    let head = format!("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: {secret}\r\n\r\n");
    connection.send(head).await?;
    connection.answer().await
}

/// What the oracle is asked about.
pub(crate) fn observations(shots: &[Shot]) -> Vec<Observation> {
    shots.iter().map(|shot| shot.observation).collect()
}
