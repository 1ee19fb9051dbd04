//! A real server in every way that Redis can be reached and locked up: a socket, passwords, an ACL user, TLS; and other
//! servers than the system's. What Tollgate tells of them after its start is here, too.

use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use redis::Commands;
use tollgate::limit::{
    Limit, LogKind, Verdict, Window,
    fault::FaultKind,
    redis::{
        Deployment, RedisStore,
        script::{arguments, source},
        topology::Topology,
    },
};

use crate::harness::{Certificates, Proxy, ProxyBuilder, Redis, Upstream, free_port};

const HOUR: Duration = Duration::from_secs(3600);

fn limit(requests: u32, window: Duration) -> Limit {
    let requests = NonZeroU32::new(requests).unwrap();
    Limit { requests, window: Window::new(window).unwrap(), count_refused: false, enforce: true }
}

/// A proxy whose caller has three requests an hour, kept in the Redis of these lines.
async fn proxy(upstream: &Upstream, redis: &str) -> Proxy {
    let builder = ProxyBuilder::before(upstream).counting_in(&format!("{redis}\ntimeout = \"20s\""));
    builder.tier("alice", r#"{ requests = 3, per = "1h" }"#).start().await
}

async fn statuses(proxy: &Proxy, requests: usize) -> Vec<u16> {
    let client = proxy.client();
    let mut seen = Vec::new();
    for _ in 0..requests {
        seen.push(proxy.chat(&client, "alice").send().await.unwrap().status().as_u16());
    }
    seen
}

fn recorded(redis: &Redis) -> usize {
    redis.dump().iter().map(|(_, entries)| entries.len()).sum()
}

fn plain() -> PathBuf {
    "redis-server".into()
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn through_a_socket() {
    let upstream = Upstream::ok().await;
    let socket = |folder: &Path| words(&format!("--unixsocket {}", folder.join("redis.sock").display()));
    let redis = Redis::start_with(&plain(), socket).await;
    for (scheme, served) in [("unix", [200, 200, 200, 429]), ("redis+unix", [429; 4])] {
        let url = format!("url = \"{scheme}://{}\"", redis.folder().join("redis.sock").display());
        assert_eq!(statuses(&proxy(&upstream, &url).await, 4).await, served);
    }
    assert_eq!(recorded(&redis), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_password_in_the_address_or_in_a_file() {
    let upstream = Upstream::ok().await;
    let redis = Redis::start().await;
    let _: () = redis.ask("ACL SETUSER tollgate on >p@ss/word ~* +@all");
    let _: () = redis.ask("ACL SETUSER default on >another");
    let file = redis.folder().join("password");
    std::fs::write(&file, "p@ss/word\n").unwrap();
    let port = redis.port();
    let in_file = format!(
        "url = \"redis://127.0.0.1:{port}/2\"\nusername = \"tollgate\"\npassword_file = \"{}\"",
        file.display()
    );
    for (settings, served) in [
        (format!("url = \"redis://:another@127.0.0.1:{port}/2\""), [200, 200, 200, 429]),
        (format!("url = \"redis://tollgate:p%40ss%2Fword@127.0.0.1:{port}/2\""), [429; 4]),
        (in_file, [429; 4]),
        (format!("url = \"redis://127.0.0.1:{port}/2\"\npassword = \"wrong\""), [503; 4]),
        (format!("url = \"redis://127.0.0.1:{port}/2\""), [503; 4]),
    ] {
        assert_eq!(statuses(&proxy(&upstream, &settings).await, 4).await, served, "{settings}");
    }
}

/// The options of a server that asks who speaks to it.
fn of_server(certificates: &Certificates, tls_port: u16) -> Vec<String> {
    let [certificate, key, authority] =
        ["server.crt", "server.key", "ca.crt"].map(|name| certificates.path(name));
    words(&format!(
        "--tls-port {tls_port} --tls-cert-file {certificate} --tls-key-file {key} --tls-ca-cert-file {authority} \
         --tls-auth-clients yes"
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn in_tls_with_a_private_authority_and_a_client_certificate() {
    let (upstream, certificates) =
        (Upstream::ok().await, Certificates::for_names(&["localhost", "127.0.0.1"]));
    let redis = Redis::start_with(&plain(), |_| of_server(&certificates, free_port())).await;
    let port = redis.ask::<Vec<String>>("CONFIG GET tls-port")[1].clone();
    let trust = format!("ca_file = \"{}\"", certificates.path("ca.crt"));
    let show = format!(
        "client_certificate = \"{}\"\nclient_key = \"{}\"",
        certificates.path("client.crt"),
        certificates.path("client.key")
    );
    for (settings, served) in [
        (format!("url = \"rediss://localhost:{port}\"\n{trust}\n{show}"), [200, 200, 200, 429]),
        (format!("url = \"rediss://127.0.0.1:{port}\"\n{trust}\n{show}"), [429; 4]),
        // It asks who speaks to it.
        (format!("url = \"rediss://localhost:{port}\"\n{trust}"), [503; 4]),
        // The system does not know the authority.
        (format!("url = \"rediss://localhost:{port}\"\n{show}"), [503; 4]),
        // The name is another than the certificate's.
        (format!("url = \"rediss://127.0.0.2:{port}\"\n{trust}\n{show}"), [503; 4]),
        // Plain text is not spoken there.
        (format!("url = \"redis://localhost:{port}\""), [503; 4]),
    ] {
        let proxy = proxy(&upstream, &settings).await;
        assert_eq!(statuses(&proxy, 4).await, served, "{settings}\n{:#?}", proxy.logs.all());
    }
    assert_eq!(recorded(&redis), 3);
}

/// The permissions that the README gives, without the optional ones.
fn documented_permissions() -> Vec<String> {
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let line = readme.lines().find(|line| line.starts_with("ACL SETUSER tollgate on")).unwrap();
    line.split_whitespace().skip(3).map(str::to_owned).collect()
}

/// Has every command of both scripts run: admissions, refusals, attempts that are counted and trimmed, a clock that was
/// set back, a repetition, and scripts that were flushed.
async fn exercise(redis: &Redis, url: &str) -> Result<(), FaultKind> {
    for kind in [LogKind::SortedSet, LogKind::List] {
        let _: () = redis.ask("FLUSHALL");
        let _: () = redis.ask("SCRIPT FLUSH");
        set_up(redis, kind);
        let topology = Topology::Single(url.parse().unwrap());
        let deployment = Arc::new(Deployment::new(topology, None));
        decide(&RedisStore::new(&deployment, Duration::from_secs(20), Some(kind))).await?;
    }
    let mut repetition = redis::cmd("EVAL");
    let limits = [limit(2, HOUR)];
    repetition.arg(source(LogKind::SortedSet)).arg(1).arg("ratelimit:{repeated}:1:admitted").arg(1);
    for number in arguments(&limits) {
        repetition.arg(number);
    }
    let mut connection = redis::Client::open(url).unwrap().get_connection().unwrap();
    let reply: Result<Vec<i64>, _> = repetition.arg("member").query(&mut connection);
    reply.map(|_| ()).map_err(|_| FaultKind::NotPermitted)
}

/// Logs with entries from the future, and with some that no window holds any more.
fn set_up(redis: &Redis, kind: LogKind) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64;
    let mut connection = redis.connection();
    for (caller, time) in [("ahead", now + 600_000_000), ("behind", now - 3_600_000_000)] {
        let key = format!("ratelimit:{{{caller}}}:1:admitted");
        let _: () = match kind {
            LogKind::SortedSet => connection.zadd(&key, "member", time).unwrap(),
            LogKind::List => connection.lpush(&key, time).unwrap(),
        };
    }
}

async fn decide(store: &RedisStore) -> Result<(), FaultKind> {
    let is_admitted = async |key: &str, limits: &[Limit]| {
        let decision = store.decide(&key.parse().unwrap(), limits).await;
        decision.map(|decision| decision.verdict == Verdict::Admit).map_err(|fault| fault.kind())
    };
    let limits = [limit(2, HOUR), limit(1, HOUR / 2), Limit { count_refused: true, ..limit(2, HOUR) }];
    let mut admitted = Vec::new();
    for _ in 0..5 {
        admitted.push(is_admitted("counted", &limits).await?);
    }
    assert_eq!(admitted, [true, false, false, false, false]);
    assert!(!is_admitted("ahead", &[limit(1, HOUR)]).await?);
    assert!(is_admitted("behind", &[limit(1, HOUR)]).await?);
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn as_a_user_with_the_documented_permissions_and_not_one_more() {
    let redis = Redis::start().await;
    let url = format!("redis://tollgate:PASSWORD@127.0.0.1:{}", redis.port());
    let permissions = documented_permissions();
    let allow = |permissions: &[String]| {
        let _: () = redis.ask(&format!("ACL SETUSER tollgate reset {}", permissions.join(" ")));
    };
    allow(&permissions);
    assert_eq!(exercise(&redis, &url).await, Ok(()));
    let commands = permissions.iter().enumerate().filter(|(_, word)| word.starts_with('+'));
    let mut needed = 0;
    for (index, command) in commands {
        let mut fewer = permissions.clone();
        fewer.remove(index);
        allow(&fewer);
        assert!(exercise(&redis, &url).await.is_err(), "{command} is not needed");
        needed += 1;
    }
    assert!(needed >= 10, "{permissions:?}");
    allow(&permissions);
    let upstream = Upstream::ok().await;
    let proxy = proxy(&upstream, &format!("url = \"{url}\"")).await;
    assert_eq!(statuses(&proxy, 4).await, [200, 200, 200, 429], "the whole proxy needs no more");
}

async fn warning(proxy: &Proxy, part: &str) {
    let is_it = |line: &serde_json::Value| {
        line["level"] == "WARN" && line["fields"]["message"].as_str().is_some_and(|said| said.contains(part))
    };
    proxy.logs.wait_for(part, is_it).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_it_is_told_after_the_start() {
    let upstream = Upstream::ok().await;
    let primary = Redis::start().await;
    let evicting = "--maxmemory 100mb --maxmemory-policy allkeys-lru";
    let replica = format!("{evicting} --replicaof 127.0.0.1 {}", primary.port());
    let redis = Redis::start_with(&plain(), |_| words(&replica)).await;
    let told = proxy(&upstream, &format!("url = \"{}\"", redis.url())).await;
    warning(&told, "set it to noeviction").await;
    warning(&told, "is a replica").await;

    let told = proxy(&upstream, &format!("cluster = [\"{}\"]", primary.url())).await;
    warning(&told, "belongs to no cluster").await;

    let in_cluster = Redis::start_with(&plain(), |_| {
        words(&format!("--cluster-enabled yes --cluster-port {}", free_port()))
    })
    .await;
    let told = proxy(&upstream, &format!("url = \"{}\"", in_cluster.url())).await;
    warning(&told, "belongs to a cluster").await;

    let _: () = primary.ask("ACL SETUSER reader on >secret ~* +@read");
    let told =
        proxy(&upstream, &format!("url = \"redis://reader:secret@127.0.0.1:{}\"", primary.port())).await;
    warning(&told, "does not let this user decide").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_one_gives_no_warning() {
    let (upstream, redis) = (Upstream::ok().await, Redis::start().await);
    let _: () = redis.ask("ACL SETUSER default -info -config");
    let proxy = proxy(&upstream, &format!("url = \"redis://127.0.0.1:{}\"", redis.port())).await;
    assert_eq!(statuses(&proxy, 1).await, [200]);
    // The look is over when its INFO has been refused.
    crate::harness::patiently("the look at Redis", async {
        while !redis
            .ask::<Vec<redis::Value>>("ACL LOG")
            .iter()
            .any(|entry| format!("{entry:?}").contains("info"))
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let of_limiter = |line: &&serde_json::Value| {
        line["level"] == "WARN" && line["target"].as_str().is_some_and(|target| target.contains("limit"))
    };
    assert_eq!(proxy.logs.all().iter().filter(of_limiter).count(), 0, "{:#?}", proxy.logs.all());
}

/// Paths to other servers than the system's, separated as in `PATH`; `tests/run` sets it.
const OTHERS: &str = "TOLLGATE_TEST_SERVERS";

#[tokio::test(flavor = "multi_thread")]
async fn other_servers_and_versions_decide_alike() {
    let upstream = Upstream::ok().await;
    let others = std::env::var_os(OTHERS).unwrap_or_default();
    let others: Vec<PathBuf> = std::env::split_paths(&others).filter(|path| path.is_file()).collect();
    if others.is_empty() {
        eprintln!("{OTHERS} names no server, so only the system's is tried");
    }
    for program in std::iter::once(plain()).chain(others) {
        let redis = Redis::start_with(&program, |_| Vec::new()).await;
        let _: () = redis.ask(&format!("ACL SETUSER tollgate reset {}", documented_permissions().join(" ")));
        let url = format!("redis://tollgate:PASSWORD@127.0.0.1:{}", redis.port());
        assert_eq!(exercise(&redis, &url).await, Ok(()), "{}", program.display());
        let _: () = redis.ask("FLUSHALL");
        let proxy = proxy(&upstream, &format!("url = \"{}\"", redis.url())).await;
        assert_eq!(statuses(&proxy, 5).await, [200, 200, 200, 429, 429], "{}", program.display());
        assert_eq!(recorded(&redis), 3, "{}", program.display());
        eprintln!("{} {}", program.display(), redis.version());
    }
}
