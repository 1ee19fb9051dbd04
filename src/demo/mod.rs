//! `tollgate demo`: everything on loopback, no account and no Redis. A made-up upstream, a key made for the occasion, a
//! tier small enough to see its limit, and lines to paste that show it.

pub mod upstream;

use std::{
    env, io,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    path::Path,
    thread,
};

use hyper::Uri;

use crate::{
    config::{self, Config, problems::Problems},
    key_file::{self, NewKey},
    process::Addresses,
};

/// The demo's tier: so many requests…
const REQUESTS: u32 = 5;

/// …in any so many seconds.
const WINDOW_SECONDS: u32 = 30;

/// What the command line asks for.
#[derive(Clone, Copy, Debug)]
pub struct Wishes<'a> {
    /// A real upstream.
    pub upstream: Option<&'a str>,
    /// The variable that holds its key.
    pub key_env: Option<&'a str>,
    /// Count there.
    pub redis: Option<&'a str>,
    /// Listen there, if nobody else does.
    pub port: u16,
}

/// The demo, set up.
#[derive(Debug)]
pub struct Stage {
    /// What to run.
    pub config: Config,
    key: NewKey,
    upstream: String,
    is_made_up: bool,
}

/// The demo can't be set up.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// No socket or no thread for the made-up upstream.
    #[error("the made-up upstream can't start: {0}")]
    Upstream(#[from] io::Error),
    /// A wish that the configuration does not understand.
    #[error("{0}")]
    Config(#[from] Problems),
}

impl Stage {
    /// Starts the made-up upstream, unless a real one is wished for, and makes a key.
    pub fn set(wishes: &Wishes<'_>) -> Result<Self, DemoError> {
        let key = key_file::make(&"demo".parse().expect("`demo` is a key id"));
        let upstream = match wishes.upstream {
            Some(url) => url.to_owned(),
            None => format!("http://{}", start_upstream()?),
        };
        let text = config_text(wishes, &key, &upstream);
        let config = config::parse(&text, Path::new("demo.toml"), &|name| env::var(name).ok())?;
        Ok(Self { config, key, upstream, is_made_up: wishes.upstream.is_none() })
    }

    /// What to tell the visitor: how to see it at work, in lines to paste.
    pub fn invitation(&self, addresses: &Addresses) -> String {
        let port = addresses.server.first().map_or(0, SocketAddr::port);
        let metrics = addresses
            .admin
            .map(|admin| format!("\nMetrics: curl -s http://{admin}/metrics\n"))
            .unwrap_or_default();
        let what = if self.is_made_up { "a made-up LLM".to_owned() } else { self.upstream.clone() };
        include_str!("invitation.txt")
            .replace("{what}", &what)
            .replace("{base}", &format!("https://localhost:{port}"))
            .replace("{key}", self.key.secret())
            .replace("{model}", if self.is_made_up { upstream::MODEL } else { "MODEL" })
            .replace("{ca}", &self.config.server.tls.certificate.display().to_string())
            .replace("{requests}", &REQUESTS.to_string())
            .replace("{window}", &WINDOW_SECONDS.to_string())
            .replace("{metrics}", &metrics)
    }
}

/// The made-up upstream has a thread of its own: it is no part of what is shown.
fn start_upstream() -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("made-up-upstream".to_owned()).spawn(move || {
        runtime.block_on(async move {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => upstream::serve(listener).await,
                Err(error) => tracing::error!(%error, "the made-up upstream can't listen"),
            }
        });
    })?;
    Ok(address)
}

fn config_text(wishes: &Wishes<'_>, key: &NewKey, upstream: &str) -> String {
    let store = wishes.redis.map_or_else(String::new, |url| {
        // It is the only process of its kind, and needs no heartbeat to know that.
        format!("[limiter]\nstore = \"redis\"\nreplicas = 1\n[limiter.redis]\nurl = {}\n", quoted(url))
    });
    let credential = wishes.key_env.map_or_else(String::new, |name| credential(upstream, name));
    let listen: Vec<_> = listen(wishes.port).iter().map(|address| quoted(&address.to_string())).collect();
    format!(
        "{store}\
         [server]\nlisten = [{}]\n\
         [admin]\nlisten = \"127.0.0.1:{}\"\n\
         [tiers.demo]\nlimits = [{{ requests = {REQUESTS}, per = \"{WINDOW_SECONDS}s\" }}]\n\
         {}\
         [[upstreams]]\nname = \"demo\"\nurl = {}\n{credential}",
        listen.join(", "),
        if is_free(SocketAddr::from((Ipv4Addr::LOCALHOST, 9090))) { 9090 } else { 0 },
        key.toml_lines("demo"),
        quoted(upstream),
    )
}

/// The slot in which the well-known upstreams expect their key; everybody else takes a bearer token.
fn credential(upstream: &str, variable: &str) -> String {
    let host = upstream.parse::<Uri>().ok().and_then(|url| url.host().map(str::to_owned)).unwrap_or_default();
    let (header, prefix) = match &*host {
        "api.anthropic.com" => ("x-api-key", ""),
        "generativelanguage.googleapis.com" => ("x-goog-api-key", ""),
        _ => ("authorization", "Bearer "),
    };
    format!("credential = {{ header = \"{header}\", value = \"{prefix}${{{variable}}}\" }}\n")
}

/// A basic string of TOML. Its escapes are those of JSON, and `$` begins a variable in ours.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text.replace('$', "$$")).to_string()
}

/// `localhost` can mean either loopback address, so both are listened on, as far as there are two.
fn listen(port: u16) -> Vec<SocketAddr> {
    let (v4, v6) =
        (SocketAddr::from((Ipv4Addr::LOCALHOST, port)), SocketAddr::from((Ipv6Addr::LOCALHOST, port)));
    match (is_free(v4), is_free(v6)) {
        (true, true) if port != 0 => vec![v4, v6],
        (true, _) => vec![v4],
        (false, _) => vec![SocketAddr::from((Ipv4Addr::LOCALHOST, 0))],
    }
}

fn is_free(address: SocketAddr) -> bool {
    TcpListener::bind(address).is_ok()
}
