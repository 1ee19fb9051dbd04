//! Tests with real parts: the real binary, real sockets and TLS, a real redis-server, and a scripted LLM server of our
//! own behind it, for no test may need the internet.

#![expect(clippy::unwrap_used, reason = "what a test can not go on without may end it")]

mod bounds;
mod client_gone;
mod commands;
mod config;
mod cors;
mod demo;
mod drain;
mod edge;
mod endings;
mod failover;
mod forwarding;
mod harness;
mod headers;
mod hygiene;
mod invariants;
mod layering;
mod limits;
mod observability;
mod pool;
mod probes;
mod readme;
mod redis_away;
mod redis_cluster;
mod redis_faults;
mod redis_reached;
mod redis_sentinel;
mod refusals;
mod reload;
mod routing;
mod script;
mod seams;
mod secrets;
mod store;
mod streaming;
mod timers;
mod upload_sessions;
mod uploads;
mod upstream_faults;
mod upstream_http2;
mod upstream_reached;
mod websocket;
