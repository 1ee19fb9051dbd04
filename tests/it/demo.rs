//! `tollgate demo` in an empty folder: every line that it prints works as printed.

use std::process::Stdio;

use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use crate::harness::{Redis, pasted, patiently};

/// One starts at a time, so that no other takes the port of the metrics between a look at it and its use.
static STARTS: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// A running demo, and what it printed.
struct Demo {
    folder: TempDir,
    invitation: String,
    _child: Child,
}

impl Demo {
    async fn start(arguments: &[&str]) -> Self {
        let _alone = STARTS.lock().await;
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["demo", "--port", "0", "--log-level", "debug"])
            .args(arguments)
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut invitation = String::new();
        while !invitation.contains("\nMetrics: ") {
            let line = patiently("the invitation", lines.next_line()).await.unwrap().expect("more of it");
            invitation.push_str(&line);
            invitation.push('\n');
        }
        Self { folder, invitation, _child: child }
    }

    /// The commands that begin so, each with the lines that it goes on over.
    fn commands(&self, beginning: &str) -> Vec<String> {
        let blocks = self.invitation.split("\n\n");
        blocks.filter(|block| block.starts_with(beginning)).map(str::to_owned).collect()
    }

    async fn paste(&self, command: &str) -> String {
        let said = pasted(self.folder.path(), command).await;
        let log = std::fs::read_to_string(self.folder.path().join("log")).unwrap();
        assert_eq!(said.code, Some(0), "{command}: {}\n{log}", said.stderr);
        said.stdout
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn its_lines_show_a_call_a_stream_and_the_limit() {
    let demo = Demo::start(&[]).await;
    let [call, stream] = &demo.commands("curl ")[..] else { panic!("{}", demo.invitation) };
    let answer = demo.paste(call).await;
    assert!(answer.starts_with("HTTP/2 200"), "{answer}");
    assert!(answer.contains("x-ratelimit-remaining: 4") && answer.contains("\"choices\""), "{answer}");
    let answer = demo.paste(stream).await;
    assert!(answer.starts_with("event: message_start\n"), "{answer}");
    assert!(answer.matches("event: content_block_delta\n").count() > 1, "{answer}");
    assert!(answer.trim_end().ends_with("data: {\"type\":\"message_stop\"}"), "{answer}");
    let [limit] = &demo.commands("for ")[..] else { panic!("{}", demo.invitation) };
    let answers = demo.paste(limit).await;
    let statuses: Vec<_> = answers.lines().map(|line| line.split(' ').nth(1).unwrap()).collect();
    assert_eq!(statuses, ["200", "200", "200", "429", "429", "429", "429"], "{answers}");
    let waits = answers
        .lines()
        .filter_map(|line| line.split_once("retry-after: ")?.1.split(' ').next()?.parse().ok());
    let waits: Vec<u32> = waits.collect();
    assert!(waits.len() == 4 && waits.is_sorted_by(|a, b| a > b), "it counts down: {answers}");
    let metrics = demo.invitation.lines().find_map(|line| line.strip_prefix("Metrics: ")).unwrap();
    let metrics = demo.paste(metrics).await;
    assert!(metrics.contains("tollgate_requests_total{route=\"demo\",tier=\"demo\""), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_goes_on_when_nobody_reads_its_invitation_to_the_end() {
    let _alone = STARTS.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let line = format!(
        "'{}' demo --port 0 > /dev/full 2> log & until grep -q 'admin listening' log; do :; done; kill $!; wait $!",
        env!("CARGO_BIN_EXE_tollgate")
    );
    assert_eq!(pasted(folder.path(), &line).await.code, Some(0), "it ends by the signal and in order");
}

#[tokio::test(flavor = "multi_thread")]
async fn it_counts_in_redis_where_that_is_wished_for() {
    let redis = Redis::start().await;
    let demo = Demo::start(&["--redis", &redis.url()]).await;
    let call = demo.commands("curl ").remove(0);
    let answer = demo.paste(&call).await;
    assert!(answer.starts_with("HTTP/2 200"), "{answer}");
    let dump = redis.dump();
    assert_eq!(dump.len(), 1, "{dump:?}");
    assert!(dump[0].0.contains("{demo}") && dump[0].1.len() == 1, "{dump:?}");
}
