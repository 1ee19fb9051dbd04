//! Tollgate stands in front of LLM APIs: it checks a caller's API key, holds the key to its tier's limits with an exact
//! sliding window, and streams the answer back with what the limits say in its head.
//!
//! # The life of a request
//!
//! ```text
//! server    accept, TLS, HTTP/1.1 or HTTP/2 by ALPN; every client has bounds and deadlines
//!   proxy   the hub, the only file that knows this order:
//!     hygiene    is it a request that can be forwarded safely?            (pure; 400 and its kin)
//!     cors       may this page call? A preflight ends here                (pure; 403)
//!     probe      is it only somebody who asks whether we are there?       (pure)
//!     auth       credential → key id and tier                             (pure, in memory; 401)
//!     route      path and host → upstream, or a choice of them            (pure; 404)
//!     limit      all limits of the key at once                            (memory, or one script in Redis; 429)
//!     model      where the choice depends on it: named in URL or body     (pure; 404, 400)
//!     forward    the head as the upstream gets it, credentials swapped    (pure)
//!     upstream   choose an endpoint, send, wait for the head, or try again (502, 504)
//!     answer     what the limits say, into the answer's head; or a refusal
//!     meter      the body passes; its exchange ends with the last byte
//! ```
//!
//! # Modules, in reading order
//!
//! | module | owns |
//! |---|---|
//! | [`proxy`] | the order of the stages |
//! | [`server`] | listeners, connections, their deadlines, the drain |
//! | [`hygiene`], [`auth`], [`route`], [`model`], [`forward`], [`headers`] | the pure stages |
//! | [`cors`], [`probe`], [`uncounted`] | who is answered without a key, and what uses up no limit; pure too |
//! | [`limit`] | limits, decisions, the two stores |
//! | [`path`], [`pattern`], [`media`], [`size`] | raw paths, words with a wildcard, kinds of bodies and their bounds, sizes as people write them |
//! | [`upload`], [`upstream`] | the request's body, connections to upstreams, the answer's body |
//! | [`tunnel`] | what a connection becomes after a WebSocket's handshake |
//! | [`answer`], [`body`], [`meter`] | the answer on its way to the client: its head, its body, its last byte |
//! | [`exchange`], [`cut`] | the one log line of a request, and who ended it |
//! | [`events`], [`event_body`] | what is said between the events of an answer |
//! | [`error`], [`dialect`] | what a caller is told when there is no upstream's answer |
//! | [`upload_session`] | URLs that stand for a key, for the rest of an upload |
//! | [`keys`], [`policy`], [`config`] | who may call and what holds for whom, from `proxy.toml` |
//! | [`tls`] | certificates and trust |
//! | [`admin`], [`metrics`], [`logging`] | what the operator sees |
//! | [`process`], [`reload`] | workers, signals, the end; SIGHUP |
//! | [`cli`], [`key_file`], [`atomic_file`], [`demo`] | the subcommands |
//!
//! # Which way imports point
//!
//! From the hub to the leaves. A stage never imports another stage, the limiter knows no HTTP, and no stage knows
//! [`error`]. `redis` appears only in `limit/redis`, `rustls` only in `tls` and where connections are made. A
//! test holds the sources to the table of allowed edges.

pub mod admin;
pub mod answer;
pub mod atomic_file;
pub mod auth;
pub mod body;
pub mod cli;
pub mod config;
pub mod cors;
pub mod cut;
pub mod demo;
pub mod dialect;
pub mod error;
pub mod event_body;
pub mod events;
pub mod exchange;
pub mod forward;
pub mod headers;
pub mod hygiene;
pub mod key_file;
pub mod keys;
pub mod limit;
pub mod logging;
pub mod media;
pub mod meter;
pub mod metrics;
pub mod model;
pub mod path;
pub mod pattern;
pub mod policy;
pub mod probe;
pub mod process;
pub mod proxy;
pub mod reload;
pub mod route;
pub mod server;
pub mod size;
pub mod tls;
pub mod tunnel;
pub mod uncounted;
pub mod upload;
pub mod upload_session;
pub mod upstream;
