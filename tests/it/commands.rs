//! The subcommands, as somebody at a terminal or a container's health check runs them.

use std::{fs, path::Path};

use rustix::process::Signal;

use crate::harness::{
    Gate, ProxyBuilder, Said, Script, Upstream, pasted, patiently, secret, tollgate, tollgate_reading,
};

const LIMITS: &str = r#"{ requests = 1000, per = "1m" }"#;

fn said(code: i32, stdout: &str, stderr: &str) -> Said {
    Said { code: Some(code), stdout: stdout.to_owned(), stderr: stderr.to_owned() }
}

fn write(folder: &Path, text: &str) {
    fs::write(folder.join("proxy.toml"), text).unwrap();
}

fn good() -> String {
    ProxyBuilder::before_url("http://127.0.0.1:1").tier("alice", LIMITS).text()
}

#[tokio::test]
async fn check_tells_that_a_file_is_good_or_everything_that_is_not() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &good());
    let expected = said(0, "proxy.toml is good: 1 tiers, 1 keys, 1 upstreams\n", "");
    assert_eq!(tollgate(folder.path(), &["check"]).await, expected);
    write(
        folder.path(),
        "[server]\nlisten = \"nowhere\"\nmax_streems = 3\n[tiers.free]\nlimits = [{ requests = 0, per = \"1m\" }]\n\
         [[upstreams]]\nname = \"a\"\nurl = \"ftp://a\"\n",
    );
    let Said { code, stdout, stderr } = tollgate(folder.path(), &["check"]).await;
    assert_eq!((code, &*stdout), (Some(1), ""));
    for place in ["proxy.toml:2:10: ", "proxy.toml:3:1: ", "proxy.toml:5:", "proxy.toml:8:7: "] {
        assert!(stderr.contains(place), "{place} in {stderr}");
    }
    assert!(stderr.trim_end().ends_with("4 problems"), "{stderr}");
    assert!(!folder.path().join("certs").exists(), "a check leaves nothing behind");
}

#[tokio::test]
async fn a_missing_file_is_told_of_with_the_way_to_name_it() {
    let folder = tempfile::tempdir().unwrap();
    for command in [&[][..], &["serve"], &["check"], &["health"]] {
        let Said { code, stdout, stderr } = tollgate(folder.path(), command).await;
        assert_eq!((code, &*stdout), (Some(1), ""));
        assert!(stderr.starts_with("tollgate: proxy.toml: can't read it: No such file"), "{stderr}");
        assert!(stderr.contains("--config or TOLLGATE_CONFIG"), "{stderr}");
    }
}

#[tokio::test]
async fn a_wrong_command_line_ends_with_2_and_the_version_with_0() {
    let folder = tempfile::tempdir().unwrap();
    for wrong in [&["--nonsense"][..], &["nonsense"], &["key", "new"], &["--log-level", "loud"]] {
        let Said { code, stdout, stderr } = tollgate(folder.path(), wrong).await;
        assert_eq!((code, &*stdout), (Some(2), ""), "{wrong:?}");
        assert!(stderr.starts_with("error: "), "{stderr}");
    }
    let expected = said(0, &format!("tollgate {}\n", env!("CARGO_PKG_VERSION")), "");
    assert_eq!(tollgate(folder.path(), &["--version"]).await, expected);
}

/// The secret that a command printed.
fn printed_secret(stdout: &str) -> &str {
    let mut secrets = stdout.split_whitespace().filter(|word| word.starts_with("sk-tg-"));
    let secret = secrets.next().expect("a secret");
    assert_eq!(secrets.next(), None, "it is printed once");
    secret
}

#[tokio::test]
async fn a_new_key_is_shown_once_with_lines_that_fit_it() {
    let folder = tempfile::tempdir().unwrap();
    let Said { code, stdout, stderr } =
        tollgate(folder.path(), &["key", "new", "--id", "bob", "--tier", "free"]).await;
    assert_eq!((code, &*stderr), (Some(0), ""), "no file is needed for it");
    let secret = printed_secret(&stdout);
    assert!(secret.starts_with("sk-tg-bob-"));
    let hash = tollgate_reading(folder.path(), &["key", "hash"], &format!("{secret}\n")).await;
    assert_eq!((hash.code, &*hash.stderr), (Some(0), ""));
    let lines = format!("[[keys]]\nid = \"bob\"\nhash = \"{}\"\ntier = \"free\"\n", hash.stdout.trim_end());
    assert!(stdout.ends_with(&lines), "{stdout}");
    for bad in ["", "short\n", "two words of which each is long enough to be one\n"] {
        let Said { code, stdout, stderr } = tollgate_reading(folder.path(), &["key", "hash"], bad).await;
        assert_eq!((code, &*stdout), (Some(1), ""));
        assert!(stderr.contains("one word of 32 to 512 characters"), "{stderr}");
    }
}

#[tokio::test]
async fn a_key_that_is_written_works_and_is_written_once() {
    let folder = tempfile::tempdir().unwrap();
    let before = format!("# The first line.\n{}", good());
    write(folder.path(), &before);
    let new_key = ["key", "new", "--id", "bob", "--tier", "alice", "--write"];
    let made = tollgate(folder.path(), &new_key).await;
    assert_eq!((made.code, &*made.stderr), (Some(0), ""));
    printed_secret(&made.stdout);
    let after = fs::read_to_string(folder.path().join("proxy.toml")).unwrap();
    assert!(after.starts_with("# The first line.\n") && after.contains("id = \"bob\""), "{after}");
    assert!(!after.contains("sk-tg-"), "only the hash is kept");
    let checked = tollgate(folder.path(), &["check"]).await;
    assert_eq!(checked.stdout, "proxy.toml is good: 1 tiers, 2 keys, 1 upstreams\n");
    let again = tollgate(folder.path(), &new_key).await;
    assert_eq!((again.code, &*again.stdout), (Some(1), ""), "no secret is shown that does not work");
    assert!(again.stderr.contains("there is a key bob in proxy.toml already"), "{}", again.stderr);
    let no_tier = tollgate(folder.path(), &["key", "new", "--id", "eve", "--tier", "gold", "--write"]).await;
    assert!(no_tier.stderr.contains("there is no tier \"gold\" in proxy.toml: its tiers are alice"));
    assert_eq!(fs::read_to_string(folder.path().join("proxy.toml")).unwrap(), after);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_follows_the_process_through_its_life() {
    let gate = Gate::default();
    let opens = gate.clone();
    let upstream = Upstream::start(move |_| Script::sse().event("one").wait(&opens).end()).await;
    let builder = ProxyBuilder::before(&upstream).tier("alice", LIMITS);
    let proxy = builder.clone().start().await;
    let asks = tempfile::tempdir().unwrap();
    let admin = format!("[admin]\nlisten = \"{}\"", proxy.admin);
    write(asks.path(), &builder.clone().section(&admin).text());
    assert_eq!(tollgate(asks.path(), &["health"]).await, said(0, "ready\n", ""));
    let stream = proxy.chat(&proxy.client(), "alice").send().await.unwrap();
    proxy.signal(Signal::TERM).await;
    patiently("the drain", async {
        while proxy.admin("/readyz").await.0 != 503 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(tollgate(asks.path(), &["health"]).await, said(1, "not ready\n", ""));
    gate.open();
    assert!(stream.text().await.unwrap().contains("one"));
    assert_eq!(proxy.ended().await.code(), Some(0));
    let gone = tollgate(asks.path(), &["health"]).await;
    assert_eq!((gone.code, &*gone.stdout), (Some(1), ""));
    assert!(
        gone.stderr.starts_with(&format!("tollgate: nothing answers on {}: ", proxy.admin)),
        "{}",
        gone.stderr
    );
    write(asks.path(), &builder.section("[admin]\nenabled = false").text());
    let off = tollgate(asks.path(), &["health"]).await;
    assert_eq!(off.code, Some(1));
    assert!(off.stderr.contains("the admin listener is off"), "{}", off.stderr);
}

#[tokio::test]
async fn an_output_that_can_not_be_written_is_told_of_and_panics_nowhere() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &good());
    for arguments in ["check", "key new --id bob --tier alice"] {
        let line = format!("'{}' {arguments} > /dev/full", env!("CARGO_BIN_EXE_tollgate"));
        let message = "tollgate: can't write to standard output: No space left on device (os error 28)\n";
        assert_eq!(pasted(folder.path(), &line).await, said(1, "", message));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_elsewhere_can_be_named_by_flag_or_environment_from_anywhere() {
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write(there.path(), &good());
    let file = there.path().join("proxy.toml");
    let file = file.to_str().unwrap();
    let expected = format!("{file} is good: 1 tiers, 1 keys, 1 upstreams\n");
    for arguments in [&["--config", file, "check"][..], &["check", "-c", file]] {
        assert_eq!(tollgate(here.path(), arguments).await, said(0, &expected, ""));
    }
    let line = format!("TOLLGATE_CONFIG='{file}' '{}' check", env!("CARGO_BIN_EXE_tollgate"));
    assert_eq!(pasted(here.path(), &line).await, said(0, &expected, ""));
    assert!(!expected.contains(&secret("alice")));
}
