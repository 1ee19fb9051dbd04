//! Finding the primary that Sentinels watch over, and noticing when it is another.

use std::{collections::HashMap, sync::Arc, time::Duration};

use redis::{ErrorKind, RedisError, ServerErrorKind, Value};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{
    dial::{Connection, Dialer},
    link::{Destination, Link},
    topology::{Endpoint, Login, Server},
};
use crate::limit::fault::{Fault, FaultKind};

/// A Sentinel answers from its memory, so one that takes longer is passed over.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);

/// Once one Sentinel has answered, the others have so much longer.
const GRACE: Duration = Duration::from_millis(20);

/// A primary that was replaced, and is alive, takes writes that get lost until it is told. So the Sentinels are asked
/// this often whether it is still the one.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Who to ask for the primary, and how to log in there.
#[derive(Debug)]
pub(super) struct Sentinels {
    primary: Arc<str>,
    all: Vec<Arc<Sentinel>>,
    login: Login,
}

#[derive(Debug)]
struct Sentinel {
    link: Link,
    encrypted: bool,
}

/// What a Sentinel takes for the primary, and since which election.
struct Opinion {
    epoch: u64,
    endpoint: Endpoint,
}

impl Sentinels {
    pub(super) fn new(primary: Arc<str>, servers: Vec<Server>, login: Login, dialer: &Dialer) -> Self {
        let sentinel = |server: Server| {
            let encrypted = server.is_encrypted();
            let destination = Arc::new(Destination::AnyOf(vec![server]));
            Arc::new(Sentinel { link: Link::new(dialer.clone(), destination), encrypted })
        };
        Self { primary, all: servers.into_iter().map(sentinel).collect(), login }
    }

    /// A connection to the primary. The Sentinels may not know yet that it was demoted, so the server is asked what it is
    /// before anything is written there.
    pub(super) async fn connect_to_primary(&self, dialer: &Dialer) -> Result<Connection, Fault> {
        let server = Server { endpoint: self.current().await?, login: self.login.clone() };
        let mut connection = dialer.dial(&server).await?;
        match timeout(ANSWER_TIMEOUT, is_primary(&mut connection)).await {
            Ok(Ok(true)) => Ok(connection),
            Ok(Ok(false)) => Err(Fault::from(FaultKind::ReadOnly).at(&server.endpoint)),
            Ok(Err(fault)) => Err(fault.at(&server.endpoint)),
            Err(_elapsed) => Err(Fault::from(FaultKind::Timeout).at(&server.endpoint)),
        }
    }

    /// Waits until the primary is another than this.
    pub(super) async fn replaced(&self, primary: &Endpoint) {
        loop {
            sleep(WATCH_INTERVAL).await;
            if self.current().await.is_ok_and(|current| current != *primary) {
                return;
            }
        }
    }

    /// The primary, by the Sentinel that knows of the latest election: the others hear of it up to some seconds later.
    async fn current(&self) -> Result<Endpoint, Fault> {
        let ask = |sentinel: &Arc<Sentinel>| sentinel.clone().opinion(self.primary.clone());
        let mut asked: JoinSet<_> = self.all.iter().map(ask).collect();
        let (mut latest, mut fault) = (None, Fault::from(FaultKind::Timeout));
        let mut patience = ANSWER_TIMEOUT;
        while let Ok(Some(Ok(answer))) = timeout(patience, asked.join_next()).await {
            match answer {
                Ok(opinion) => {
                    patience = GRACE;
                    let is_later = |known: &Opinion| opinion.epoch > known.epoch;
                    if latest.as_ref().is_none_or(is_later) {
                        latest = Some(opinion);
                    }
                }
                Err(error) => fault = error,
            }
        }
        latest.map(|opinion| opinion.endpoint).ok_or(fault)
    }
}

impl Sentinel {
    async fn opinion(self: Arc<Self>, primary: Arc<str>) -> Result<Opinion, Fault> {
        // A connection that does not answer is not used again.
        let (generation, mut connection) = self.link.connection(0).await?;
        let asked = timeout(ANSWER_TIMEOUT, ask(&mut connection, &primary)).await;
        let fault = match asked {
            Ok(Ok(Some((epoch, host, port)))) => {
                let endpoint = Endpoint::Tcp { host: host.into(), port, encrypted: self.encrypted };
                return Ok(Opinion { epoch, endpoint });
            }
            Ok(Ok(None)) => {
                Fault::new(FaultKind::Disconnected, format!("this Sentinel knows no primary `{primary}`"))
            }
            Ok(Err(error)) => error.into(),
            Err(_elapsed) => FaultKind::Timeout.into(),
        };
        self.link.discard(generation);
        Err(fault.at(connection.endpoint()))
    }
}

/// The epoch first: if an election ends in between, an old epoch comes with the new address, and not the other way round.
async fn ask(connection: &mut Connection, primary: &str) -> Result<Option<(u64, String, u16)>, RedisError> {
    let details = connection.send(redis::cmd("SENTINEL").arg("master").arg(primary)).await;
    let details: HashMap<String, String> = match details {
        Ok(details) => redis::from_redis_value(details)?,
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::ResponseError) => return Ok(None),
        Err(error) => return Err(error),
    };
    let epoch = details.get("config-epoch").and_then(|epoch| epoch.parse().ok()).unwrap_or(0);
    let address = connection.send(redis::cmd("SENTINEL").arg("get-master-addr-by-name").arg(primary)).await?;
    let address: Option<(String, u16)> = redis::from_redis_value(address)?;
    Ok(address.map(|(host, port)| (epoch, host, port)))
}

/// Who may not ask finds out by the first write.
async fn is_primary(connection: &mut Connection) -> Result<bool, Fault> {
    match connection.send(&redis::cmd("ROLE")).await {
        Ok(Value::Array(answer)) => {
            let role = answer.into_iter().next().map(redis::from_redis_value::<String>);
            Ok(matches!(role, Some(Ok(role)) if role == "master"))
        }
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm) => Ok(true),
        Ok(_) => Err(Fault::from(FaultKind::BadReply)),
        Err(error) => Err(error.into()),
    }
}
