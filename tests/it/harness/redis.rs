//! A real redis-server of a test's own.

use std::{net::TcpListener, process::Stdio, time::Duration};

use redis::{Commands, Connection};
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
    folder: TempDir,
}

impl Redis {
    pub(crate) async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        loop {
            // Somebody can take the port in between, so another one is tried then.
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            if let Some(child) = spawn(port, &folder).await {
                return Self { child, port, folder };
            }
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn connection(&self) -> Connection {
        let client = redis::Client::open(self.url()).unwrap();
        client.get_connection_with_timeout(Duration::from_secs(10)).unwrap()
    }

    /// Every key and everything in it: the members of a sorted set and their scores, or the times of a list, newest first.
    pub(crate) fn dump(&self) -> Vec<(String, Vec<(String, f64)>)> {
        let mut connection = self.connection();
        let keys: Vec<String> = connection.keys("*").unwrap();
        let entries = keys.into_iter().map(|key| {
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

    /// How often a command has run.
    pub(crate) fn calls(&self, command: &str) -> u64 {
        let info: String = redis::cmd("INFO").arg("commandstats").query(&mut self.connection()).unwrap();
        let prefix = format!("cmdstat_{command}:calls=");
        let line = info.lines().find_map(|line| line.strip_prefix(&prefix));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("it is running")
    }

    /// Kills it, and starts it again on the same port with nothing in it.
    pub(crate) async fn kill(&mut self) {
        self.child.kill().await.unwrap();
    }

    pub(crate) async fn start_again(&mut self) {
        self.child = patiently("the port of Redis is free again", async {
            loop {
                if let Some(child) = spawn(self.port, &self.folder).await {
                    return child;
                }
            }
        })
        .await;
    }
}

async fn spawn(port: u16, folder: &TempDir) -> Option<Child> {
    let mut child = Command::new("redis-server")
        .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--enable-debug-command", "yes"])
        .args(["--port", &port.to_string()])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("redis-server is installed; tests/run does that");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while let Some(line) = patiently("the start of redis-server", lines.next_line()).await.unwrap() {
        if line.contains("Ready to accept connections") {
            // It must not block on a full pipe later.
            tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
            return Some(child);
        }
    }
    None
}
