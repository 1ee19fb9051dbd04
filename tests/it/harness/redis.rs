//! A real redis-server of a test's own.

use std::{
    cmp::Reverse,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use redis::{Commands, Connection};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use super::patiently;

/// Ends with the test.
#[derive(Debug)]
pub(crate) struct Redis {
    child: Child,
    port: u16,
    program: Box<Program>,
    folder: TempDir,
}

/// What is run again after it was killed.
#[derive(Debug)]
struct Program {
    path: PathBuf,
    arguments: Vec<String>,
}

/// A port that nobody listens at. Somebody can take it before it is used.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Redis {
    pub(crate) async fn start() -> Self {
        Self::start_with(Path::new("redis-server"), |_| Vec::new()).await
    }

    /// Another server or one with more arguments, which are made from its folder, anew for each attempt.
    pub(crate) async fn start_with(program: &Path, arguments: impl Fn(&Path) -> Vec<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        loop {
            // Somebody can take a port in between, so others are tried then.
            let (port, arguments) = (free_port(), arguments(folder.path()));
            if let Some(child) = spawn(program, port, &arguments, &folder).await {
                let program = Box::new(Program { path: program.to_owned(), arguments });
                return Self { child, port, program, folder };
            }
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What a command that must succeed answers.
    pub(crate) fn ask<T: redis::FromRedisValue>(&self, command: &str) -> T {
        let mut words = command.split_whitespace();
        let mut asked = redis::cmd(words.next().unwrap());
        words.for_each(|word| {
            asked.arg(word);
        });
        asked.query(&mut self.connection()).unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        ([127, 0, 0, 1], self.port).into()
    }

    pub(crate) fn connection(&self) -> Connection {
        let client = redis::Client::open(self.url()).unwrap();
        loop {
            match client.get_connection_with_timeout(Duration::from_secs(10)) {
                // Some process that a test had started has just ended, which is told by a signal; or it changes its role,
                // and closes what is open.
                Err(error) if error.to_string().contains("Interrupted") || error.is_connection_dropped() => {}
                connection => return connection.unwrap(),
            }
        }
    }

    /// Every caller's keys and everything in them: the members of a sorted set and their scores, or the times of a list,
    /// newest first. What the proxy tries Redis with is no caller's.
    pub(crate) fn dump(&self) -> Vec<(String, Vec<(String, f64)>)> {
        let mut connection = self.connection();
        let keys: Vec<String> = connection.keys("*").unwrap();
        let of_callers = keys.into_iter().filter(|key| !key.contains("{~probe"));
        let entries = of_callers.map(|key| {
            let kind: String = redis::cmd("TYPE").arg(&key).query(&mut connection).unwrap();
            let members = match &*kind {
                "list" => {
                    let times: Vec<String> = connection.lrange(&key, 0, -1).unwrap();
                    times.into_iter().map(|time| (time.clone(), time.parse().unwrap())).collect()
                }
                _ => connection.zrange_withscores(&key, 0, -1).unwrap(),
            };
            (key, members)
        });
        entries.collect()
    }

    /// What it calls itself.
    pub(crate) fn version(&self) -> String {
        let info: String = self.ask("INFO server");
        let of_version =
            |line: &&str| line.starts_with("redis_version:") || line.starts_with("valkey_version:");
        info.lines().filter(of_version).collect::<Vec<_>>().join(" ")
    }

    /// How often a command has run.
    pub(crate) fn calls(&self, command: &str) -> u64 {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut self.connection()).unwrap();
        let prefix = format!("cmdstat_{command}:calls=");
        let line = info.lines().find_map(|line| line.strip_prefix(&prefix));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// Admissions of this key, made so long ago by Redis' clock, as if a proxy had recorded them: many in a list. The log
    /// expires after this window.
    pub(crate) fn plant(&self, id: &str, window: Duration, ages: &[Duration]) {
        let (mut connection, log, now) = (self.connection(), admissions_of(id), self.micros());
        let mut times: Vec<i64> = ages.iter().map(|age| now - age.as_micros() as i64).collect();
        times.sort_unstable_by_key(|time| Reverse(*time));
        if times.len() > 1000 {
            for times in times.chunks(10_000) {
                let _: () = connection.rpush(&log, times).unwrap();
            }
        } else {
            let entry = |(n, time): (usize, &i64)| (*time, format!("{time}:{n:08x}"));
            let entries: Vec<_> = times.iter().enumerate().map(entry).collect();
            let _: () = connection.zadd_multiple(&log, &entries).unwrap();
        }
        let _: () = connection.pexpire(&log, window.as_millis() as i64 + 1000).unwrap();
    }

    /// Lets time pass for what this key has used: all of it gets so much older.
    pub(crate) fn age(&self, id: &str, time: Duration) {
        self.shift(id, -(time.as_micros() as f64));
    }

    /// Makes what this key has used look as it does after Redis' clock was set back.
    pub(crate) fn set_clock_back(&self, id: &str, time: Duration) {
        self.shift(id, time.as_micros() as f64);
    }

    fn shift(&self, id: &str, micros: f64) {
        let log = admissions_of(id);
        let mut connection = self.connection();
        let entries: Vec<(String, f64)> = connection.zrange_withscores(&log, 0, -1).unwrap();
        let shifted: Vec<_> = entries.into_iter().map(|(member, score)| (score + micros, member)).collect();
        let _: () = connection.zadd_multiple(&log, &shifted).unwrap();
    }

    /// How many admissions are recorded of this key.
    pub(crate) fn recorded(&self, id: &str) -> usize {
        let log = admissions_of(id);
        self.dump().iter().find(|(key, _)| *key == log).map_or(0, |(_, entries)| entries.len())
    }

    /// When the log of this key's admissions expires; nothing where there is none.
    pub(crate) fn expires_in(&self, id: &str) -> Option<Duration> {
        let millis: i64 = self.connection().pttl(admissions_of(id)).unwrap();
        assert_ne!(millis, -1, "every log expires");
        u64::try_from(millis).ok().map(Duration::from_millis)
    }

    fn micros(&self) -> i64 {
        let (seconds, micros): (i64, i64) = redis::cmd("TIME").query(&mut self.connection()).unwrap();
        seconds * 1_000_000 + micros
    }

    /// How many admissions of this caller are recorded.
    pub(crate) fn admissions(&self, id: &str) -> usize {
        self.connection().zcard(format!("ratelimit:{{{id}}}:1:admitted")).unwrap()
    }

    /// How many connections there are, but for the one that asks.
    pub(crate) fn clients(&self) -> usize {
        let list: String = redis::cmd("CLIENT").arg("LIST").query(&mut self.connection()).unwrap();
        list.lines().filter(|line| !line.contains("cmd=client|list")).count()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Takes the folder away that it saves its data in.
    pub(crate) fn lose_folder(&self) {
        std::fs::remove_dir_all(self.folder.path()).unwrap();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("it is running")
    }

    /// Kills it, and starts it again on the same port with nothing in it.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub(crate) async fn start_again(&mut self) {
        self.start_again_with(&[]).await;
    }

    /// The same, with more arguments.
    pub(crate) async fn start_again_with(&mut self, arguments: &[&str]) {
        self.child = patiently("the port of Redis is free again", async {
            loop {
                let mut all = self.program.arguments.clone();
                all.extend(arguments.iter().map(|word| (*word).to_owned()));
                if let Some(child) = spawn(&self.program.path, self.port, &all, &self.folder).await {
                    return child;
                }
            }
        })
        .await;
    }
}

fn admissions_of(id: &str) -> String {
    format!("ratelimit:{{{id}}}:1:admitted")
}

async fn spawn(program: &Path, port: u16, arguments: &[String], folder: &TempDir) -> Option<Child> {
    let mut command = Command::new(program);
    command
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--port", &port.to_string()])
        .args(arguments)
        .current_dir(folder.path());
    // Before version 7 there is no such setting, and the command is there.
    if program == Path::new("redis-server") {
        command.args(["--enable-debug-command", "yes"]);
    }
    spawn_until(&mut command, "Ready to accept connections").await
}

/// Starts a server and waits until it says that it is ready. Nothing, if it ends before.
pub(crate) async fn spawn_until(command: &mut Command, ready: &str) -> Option<Child> {
    let mut child = command
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("redis-server is installed; tests/run does that");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while let Some(line) = patiently("the start of redis-server", lines.next_line()).await.unwrap() {
        if line.contains(ready) {
            // It must not block on a full pipe later.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Some(child);
        }
    }
    None
}
