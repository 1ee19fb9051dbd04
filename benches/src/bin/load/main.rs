//! The load that wrk can't make: streams with the delay of every event, bursts to the last admission, a steady slow
//! rate, idle connections. One JSON object on standard output. Talks to loopback only.

mod burst;
mod idle;
mod rate;
mod streams;
mod summary;
mod target;

use std::sync::Arc;

use clap::{Args, Parser, Subcommand};
use hyper::Uri;
use target::Target;

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    load: Load,
}

/// Where the load goes.
#[derive(Args)]
struct Aim {
    /// `http://127.0.0.1:PORT/PATH`, or `https:`.
    #[arg(long)]
    url: Uri,
    /// Sent as `X-API-Key`.
    #[arg(long)]
    key: String,
}

#[derive(Subcommand)]
enum Load {
    /// One request: its status, its header fields and its body.
    One {
        #[command(flatten)]
        aim: Aim,
    },
    /// A stream on each of `connections` connections, `rounds` times, the first begun evenly over `ramp` milliseconds; of
    /// `events` events, `pace` milliseconds apart.
    Streams {
        #[command(flatten)]
        aim: Aim,
        #[arg(long)]
        connections: u32,
        #[arg(long, default_value_t = 1)]
        rounds: u32,
        #[arg(long, default_value_t = 200)]
        ramp: u64,
        #[arg(long, default_value_t = 100)]
        events: u32,
        #[arg(long, default_value_t = 10)]
        pace: u32,
    },
    /// `requests` requests as fast as `connections` connections get their answers, all begun at the same time.
    Burst {
        #[command(flatten)]
        aim: Aim,
        #[arg(long)]
        connections: u32,
        #[arg(long)]
        requests: u32,
    },
    /// `rate` requests a second for `seconds`, spread evenly over `connections` connections and over time.
    Rate {
        #[command(flatten)]
        aim: Aim,
        #[arg(long)]
        connections: u32,
        #[arg(long)]
        rate: u32,
        #[arg(long)]
        seconds: u32,
    },
    /// `connections` open connections with one request each behind them, until standard input ends.
    Idle {
        #[command(flatten)]
        aim: Aim,
        #[arg(long)]
        connections: u32,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let result = match Arguments::parse().load {
        Load::One { aim } => target::one(&Target::new(aim)).await,
        Load::Streams { aim, connections, rounds, ramp, events, pace } => {
            let target = Target::new(aim).asking_for_a_stream(events, pace);
            streams::run(Arc::new(target), connections, rounds, ramp).await
        }
        Load::Burst { aim, connections, requests } => {
            burst::run(Arc::new(Target::new(aim)), connections, requests).await
        }
        Load::Rate { aim, connections, rate, seconds } => {
            rate::run(Arc::new(Target::new(aim)), connections, rate, seconds).await
        }
        Load::Idle { aim, connections } => idle::run(Arc::new(Target::new(aim)), connections).await,
    };
    println!("{result}");
}
