//! A real Sentinel.

use std::path::Path;

use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::redis::{Redis, free_port, spawn_until};

/// Ends with the test.
#[derive(Debug)]
pub(crate) struct Sentinel {
    _child: Child,
    port: u16,
    _folder: TempDir,
}

impl Sentinel {
    /// Watches over this primary under the name `mymaster`. So many have to agree that it is gone.
    pub(crate) async fn watching(primary: &Redis, quorum: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        loop {
            let port = free_port();
            let file = folder.path().join("sentinel.conf");
            std::fs::write(&file, settings(primary, port, quorum)).unwrap();
            if let Some(child) = spawn(&file).await {
                return Self { _child: child, port, _folder: folder };
            }
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub(crate) fn ask<T: redis::FromRedisValue>(&self, words: &[&str]) -> redis::RedisResult<T> {
        let client = redis::Client::open(self.url()).unwrap();
        let mut connection = client.get_connection_with_timeout(super::PATIENCE).unwrap();
        redis::cmd("SENTINEL").arg(words).query(&mut connection)
    }

    /// What it says of the primary.
    pub(crate) fn says(&self, field: &str) -> usize {
        let told: std::collections::HashMap<String, String> = self.ask(&["master", "mymaster"]).unwrap();
        told[field].parse().unwrap()
    }
}

fn settings(primary: &Redis, port: u16, quorum: usize) -> String {
    format!(
        "port {port}\nbind 127.0.0.1\n\
         sentinel monitor mymaster 127.0.0.1 {} {quorum}\n\
         sentinel down-after-milliseconds mymaster 1000\n\
         sentinel failover-timeout mymaster 5000\n",
        primary.port()
    )
}

async fn spawn(file: &Path) -> Option<Child> {
    let mut command = Command::new("redis-server");
    command.arg(file).arg("--sentinel").current_dir(file.parent().unwrap());
    spawn_until(&mut command, "+monitor").await
}
