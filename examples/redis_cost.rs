//! What the limiter costs Redis as limits and callers grow: `cargo run --release --example redis_cost`.
//!
//! Starts a redis-server of its own, fills logs of both kinds with the very scripts of the proxy, and prints what a log
//! weighs, how long a decision takes, and how many one server decides. Takes about a minute.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a tool at the prompt: it prints, and ends on any error"
)]

use std::{
    io::{BufRead, BufReader},
    net::TcpListener,
    num::NonZeroU32,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use redis::{Cmd, Connection};
use tollgate::limit::{
    Limit, LogKind, Window,
    redis::script::{arguments, source},
};

const KINDS: [(LogKind, &str); 2] = [(LogKind::SortedSet, "sorted set"), (LogKind::List, "list")];

/// Decisions that are timed at each size.
const TIMED: u32 = 2000;

/// In so many rounds.
const ROUNDS: u32 = 10;

/// Sent at once when nothing is timed.
const PIPELINE: usize = 500;

fn main() {
    let server = Server::start();
    println!("{}\n", server.version());
    println!("one caller at its limit, window 1 d\n");
    println!("| log | limit | bytes | bytes an entry | µs to admit | µs to refuse |");
    println!("|---|---:|---:|---:|---:|---:|");
    for (kind, name) in KINDS {
        for requests in [100, 1000, 10_000, 100_000] {
            println!("| {name} | {requests} | {} |", server.one_caller(kind, requests));
        }
    }
    println!("\na million callers with one entry each\n");
    for (kind, name) in KINDS {
        println!("{name}: {} bytes a caller", server.idle_callers(kind, 1_000_000));
    }
    println!("\nadmissions a second that this server decides, one connection, pipelined\n");
    for (kind, name) in KINDS {
        println!("{name}: {} alone, {} in calls of 32", server.rate(kind, 1), server.rate(kind, 32));
    }
}

struct Server {
    child: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start() -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--appendonly", "no"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("redis-server is installed; tests/run does that");
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        lines.find(|line| line.as_ref().unwrap().contains("Ready to accept")).expect("it starts").unwrap();
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, port }
    }

    fn connection(&self) -> Connection {
        redis::Client::open(("127.0.0.1", self.port)).unwrap().get_connection().unwrap()
    }

    fn version(&self) -> String {
        let info: String = redis::cmd("INFO").arg("server").query(&mut self.connection()).unwrap();
        let version = info.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap();
        format!("Redis {version}")
    }

    /// The cells of one row: bytes, bytes an entry, µs to admit, µs to refuse.
    fn one_caller(&self, kind: LogKind, requests: u32) -> String {
        let mut load = Load::new(self, kind);
        // As time goes on entries carry different times, so each is recorded by a call of its own.
        load.pipeline(requests, |_| "one".to_owned(), requests, 1);
        let bytes: u64 = redis::cmd("MEMORY")
            .arg(&["USAGE", &key("one", "admitted"), "SAMPLES", "0"])
            .query(&mut load.connection)
            .unwrap();
        let refuse = load.timed(requests);
        let admit = load.timed(requests + TIMED);
        format!("{bytes} | {:.0} | {admit:.1} | {refuse:.1}", bytes as f64 / f64::from(requests))
    }

    fn idle_callers(&self, kind: LogKind, callers: u32) -> u64 {
        let mut load = Load::new(self, kind);
        let before = load.used_memory();
        load.pipeline(callers, |n| format!("caller-{n}"), 10, 1);
        (load.used_memory() - before) / u64::from(callers)
    }

    fn rate(&self, kind: LogKind, together: usize) -> u64 {
        let mut load = Load::new(self, kind);
        let began = Instant::now();
        let mut decided = 0;
        while began.elapsed() < Duration::from_secs(3) {
            load.pipeline(PIPELINE as u32, |n| format!("busy-{}", n % 50), 1000, together);
            decided += PIPELINE * together;
        }
        (decided as f64 / began.elapsed().as_secs_f64()) as u64
    }
}

/// One kind of log on an empty server.
struct Load {
    connection: Connection,
    hash: String,
    members: u64,
}

impl Load {
    fn new(server: &Server, kind: LogKind) -> Self {
        let mut connection = server.connection();
        let _: () = redis::cmd("FLUSHALL").query(&mut connection).unwrap();
        let hash = redis::cmd("SCRIPT").arg(&["LOAD", source(kind)]).query(&mut connection).unwrap();
        Self { connection, hash, members: 0 }
    }

    /// One call, as the proxy makes it.
    fn call(&mut self, caller: &str, requests: u32, together: usize) -> Cmd {
        let window = Window::new(Duration::from_secs(86_400)).unwrap();
        let limits = [Limit::new(NonZeroU32::new(requests).unwrap(), window)];
        let mut call = redis::cmd("EVALSHA");
        call.arg(&self.hash).arg(2).arg(key(caller, "admitted")).arg(key(caller, "attempted")).arg(0);
        for number in arguments(&limits) {
            call.arg(number);
        }
        for _ in 0..together {
            self.members += 1;
            call.arg(format!("{}:{:08x}", 1_796_050_811_000_000 + self.members, self.members as u32));
        }
        call
    }

    fn pipeline(&mut self, calls: u32, caller: impl Fn(u32) -> String, requests: u32, together: usize) {
        let numbers: Vec<u32> = (0..calls).collect();
        for some in numbers.chunks(PIPELINE) {
            let mut pipeline = redis::pipe();
            for n in some {
                pipeline.add_command(self.call(&caller(*n), requests, together)).ignore();
            }
            pipeline.query::<()>(&mut self.connection).unwrap();
        }
    }

    /// Microseconds that the server spends on a decision about the one caller, by its own clock: the least of some
    /// rounds, for that clock also runs while other programs do.
    fn timed(&mut self, requests: u32) -> f64 {
        let rounds = (0..ROUNDS).map(|_| {
            let _: () = redis::cmd("CONFIG").arg("RESETSTAT").query(&mut self.connection).unwrap();
            self.pipeline(TIMED / ROUNDS, |_| "one".to_owned(), requests, 1);
            let info: String = redis::cmd("INFO").arg("commandstats").query(&mut self.connection).unwrap();
            let line = info.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
            line.split("usec_per_call=").nth(1).unwrap().split(',').next().unwrap().parse().unwrap()
        });
        rounds.fold(f64::INFINITY, f64::min)
    }

    fn used_memory(&mut self) -> u64 {
        let info: String = redis::cmd("INFO").arg("memory").query(&mut self.connection).unwrap();
        info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap().parse().unwrap()
    }
}

fn key(caller: &str, log: &str) -> String {
    format!("ratelimit:{{{caller}}}:1:{log}")
}
