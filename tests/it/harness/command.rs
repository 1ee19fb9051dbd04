//! The binary as somebody at a terminal runs it.

use std::{
    path::Path,
    process::{Output, Stdio},
};

use tokio::{io::AsyncWriteExt, process::Command};

use super::patiently;

/// How a command ended, and what it said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `tollgate` to its end in this folder.
pub(crate) async fn tollgate(folder: &Path, arguments: &[&str]) -> Said {
    tollgate_reading(folder, arguments, "").await
}

/// The same, with something on its standard input.
pub(crate) async fn tollgate_reading(folder: &Path, arguments: &[&str], input: &str) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    command.args(arguments).current_dir(folder);
    ran(command, input).await
}

/// Runs a line of shell, as it would be pasted.
pub(crate) async fn pasted(folder: &Path, line: &str) -> Said {
    let mut command = Command::new("sh");
    command.args(["-c", line]).current_dir(folder);
    ran(command, "").await
}

async fn ran(mut command: Command, input: &str) -> Said {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.env_remove("TOLLGATE_CONFIG").env_remove("TOLLGATE_LOG").env_remove("TOLLGATE_LOG_FORMAT");
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
    let Output { status, stdout, stderr } =
        patiently("the end of a command", child.wait_with_output()).await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}
