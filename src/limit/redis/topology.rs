//! Where Redis is, and as what it is deployed.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc};

use redis::{ConnectionAddr, IntoConnectionInfo, RedisConnectionInfo};

/// A Sentinel's port, where an address does not say another.
const SENTINEL_PORT: u16 = 26379;

/// How Redis is deployed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topology {
    /// One server, or one address behind which a service keeps a primary.
    Single(Server),
    /// Redis Cluster: nodes to ask for the others. They share a login and a transport.
    Cluster(Vec<Server>),
    /// A primary that Sentinels watch over and may replace.
    Sentinel {
        /// The name that the Sentinels know the primary by.
        primary: Arc<str>,
        /// The Sentinels, with logins of their own.
        sentinels: Vec<Server>,
        /// The login at the primary.
        login: Login,
    },
}

impl Topology {
    /// The addresses of the configuration.
    pub fn servers(&self) -> &[Server] {
        match self {
            Self::Single(server) => std::slice::from_ref(server),
            Self::Cluster(servers) | Self::Sentinel { sentinels: servers, .. } => servers,
        }
    }

    /// Whether the servers are spoken to in TLS.
    pub fn is_encrypted(&self) -> bool {
        self.servers().iter().any(Server::is_encrypted)
    }

    /// The login at the servers that decide.
    pub fn login(&self) -> &Login {
        match self {
            Self::Sentinel { login, .. } => login,
            Self::Single(_) | Self::Cluster(_) => &self.servers()[0].login,
        }
    }

    /// The same servers, with this login at those that decide.
    pub fn with_login(mut self, login: &Login) -> Self {
        match &mut self {
            Self::Single(server) => server.login = login.clone(),
            Self::Cluster(nodes) => nodes.iter_mut().for_each(|node| node.login = login.clone()),
            Self::Sentinel { login: at_primary, .. } => *at_primary = login.clone(),
        }
        self
    }
}

/// One server, as a URL names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Where it listens.
    pub endpoint: Endpoint,
    /// Who asks.
    pub login: Login,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// A host and a port.
    Tcp {
        /// A name, or an address without brackets.
        host: Arc<str>,
        /// The port.
        port: u16,
        /// Whether it is spoken to in TLS.
        encrypted: bool,
    },
    /// A socket in the file system.
    Unix(PathBuf),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port, .. } => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}

/// Who asks, and in which database. `Debug` shows no password.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Login {
    /// The ACL user; none: the default user.
    pub username: Option<String>,
    /// The password.
    pub password: Option<String>,
    /// The number of the database.
    pub database: i64,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login")
            .field("username", &self.username)
            .field("database", &self.database)
            .finish_non_exhaustive()
    }
}

impl Login {
    pub(super) fn settings(&self) -> RedisConnectionInfo {
        // The name is of use to whoever looks at CLIENT LIST. Whether it is permitted or known does not matter, but only a
        // server that says so is there at all.
        let mut settings = RedisConnectionInfo::default()
            .set_lib_name("tollgate", env!("CARGO_PKG_VERSION"))
            .set_db(self.database);
        if let Some(username) = &self.username {
            settings = settings.set_username(username);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        settings
    }
}

/// The text is no address of a Redis server. It may hold a password, so no message repeats it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidServer {
    /// It has another form.
    #[error(
        "expected an address such as \"redis://host:6379\", \"rediss://host:6379\" for TLS, or \
         \"redis+unix:///path\" for a socket"
    )]
    Form,
    /// It ends with `#…`.
    #[error(
        "nothing follows a `#` in this address; `ca_file` says whom to trust, and `%23` is a `#` in a password"
    )]
    Fragment,
    /// The client does not understand a part of it.
    #[error("this address is not understood: {0}")]
    Part(String),
}

impl FromStr for Server {
    type Err = InvalidServer;

    fn from_str(text: &str) -> Result<Self, InvalidServer> {
        Self::parse(text, None)
    }
}

impl Server {
    /// A Sentinel, whose port is another where the address has none.
    pub fn sentinel(text: &str) -> Result<Self, InvalidServer> {
        Self::parse(text, Some(SENTINEL_PORT))
    }

    /// Whether it is spoken to in TLS.
    pub fn is_encrypted(&self) -> bool {
        matches!(self.endpoint, Endpoint::Tcp { encrypted: true, .. })
    }

    fn parse(text: &str, default_port: Option<u16>) -> Result<Self, InvalidServer> {
        // The connection is ours to make, so the client's parser never sees that it is encrypted.
        let (plain, encrypted) = match text.strip_prefix("rediss://") {
            Some(rest) => (format!("redis://{rest}"), true),
            None => (text.to_owned(), false),
        };
        let schemes = ["redis://", "redis+unix://", "unix://"];
        let has_address = |scheme: &&str| plain.strip_prefix(*scheme).is_some_and(|rest| !rest.is_empty());
        let is_known = schemes.iter().any(has_address);
        let url = redis::parse_redis_url(&plain).filter(|_| is_known).ok_or(InvalidServer::Form)?;
        if url.fragment().is_some() {
            return Err(InvalidServer::Fragment);
        }
        let port = url.port().or(default_port);
        // The client's messages name the part that is wrong, never what stands there.
        let info = url.into_connection_info().map_err(|error| InvalidServer::Part(error.to_string()))?;
        let endpoint = match info.addr() {
            ConnectionAddr::Tcp(host, usual) => {
                Endpoint::Tcp { host: host.as_str().into(), port: port.unwrap_or(*usual), encrypted }
            }
            ConnectionAddr::Unix(path) => Endpoint::Unix(path.clone()),
            _ => return Err(InvalidServer::Form),
        };
        let settings = info.redis_settings();
        let login = Login {
            username: settings.username().map(str::to_owned),
            password: settings.password().map(str::to_owned),
            database: settings.db(),
        };
        Ok(Self { endpoint, login })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(text: &str) -> Server {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn a_url_says_where_and_who() {
        let tls = server("rediss://tollgate:p%40ss@redis.example/3");
        assert_eq!(tls.endpoint.to_string(), "redis.example:6379");
        assert!(tls.is_encrypted());
        let Login { username, password, database } = tls.login;
        assert_eq!((username.as_deref(), password.as_deref(), database), (Some("tollgate"), Some("p@ss"), 3));
        let v6 = server("redis://:secret@[::1]:7000");
        assert!(
            matches!(&v6.endpoint, Endpoint::Tcp { host, port: 7000, encrypted: false } if &**host == "::1")
        );
        assert_eq!(v6.login.username, None);
        for socket in
            ["unix:///run/redis.sock?db=2&user=a&pass=b", "redis+unix:///run/redis.sock?db=2&user=a&pass=b"]
        {
            let socket = server(socket);
            assert_eq!(socket.endpoint, Endpoint::Unix("/run/redis.sock".into()));
            assert_eq!((socket.login.database, socket.login.username.as_deref()), (2, Some("a")));
        }
    }

    #[test]
    fn a_sentinel_has_a_port_of_its_own() {
        let endpoint = |text| Server::sentinel(text).unwrap().endpoint.to_string();
        assert_eq!(endpoint("redis://sentinel"), "sentinel:26379");
        assert_eq!(endpoint("redis://sentinel:6379"), "sentinel:6379");
    }

    #[test]
    fn what_is_no_address_is_refused_without_repeating_it() {
        for text in
            ["", "redis://", "http://:PLANTED@redis", "redis", "rediss+unix:///PLANTED", "valkey://PLANTED"]
        {
            assert_eq!(text.parse::<Server>(), Err(InvalidServer::Form), "{text}");
        }
        assert_eq!("rediss://redis#insecure".parse::<Server>(), Err(InvalidServer::Fragment));
        let error = "redis://:PLANTED@redis/PLANTED".parse::<Server>().unwrap_err();
        assert!(matches!(error, InvalidServer::Part(_)) && !error.to_string().contains("PLANTED"), "{error}");
    }

    #[test]
    fn a_password_is_not_shown() {
        assert!(!format!("{:?}", server("redis://user:PLANTED@redis")).contains("PLANTED"));
    }
}
