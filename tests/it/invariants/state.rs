//! What is kept, for how long, and what it costs.

use std::{collections::BTreeMap, time::Duration};

use rustix::process::Signal;

use super::{Fleet, HOUR, admitted};
use crate::harness::{Plain, Redis, patiently};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread")]
async fn a_log_expires_a_second_after_its_window_and_redis_is_empty_then() {
    let tiers = [
        ("short", r#"{ requests = 3, per = "1s" }, { requests = 9, per = "500ms", count_refused = true }"#),
        ("long", r#"{ requests = 3, per = "1m" }, { requests = 9, per = "1d" }"#),
    ];
    let fleet = Fleet::at_redis(1, &tiers).await;
    let redis = fleet.redis();
    for (id, window) in [("long", 24 * HOUR), ("short", SECOND)] {
        for turn in 0..5 {
            fleet.attack.fire(0, id).await;
            let expires_in = redis.expires_in(id);
            // The short one can be gone before a busy machine looks.
            assert!(id == "short" || expires_in > Some(window - HOUR), "turn {turn}: {expires_in:?}");
            assert!(expires_in.is_none_or(|left| left <= window + SECOND), "turn {turn}: {expires_in:?}");
        }
    }
    let gone = async {
        while redis.dump().len() > 1 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    patiently("the expiry of an idle key", gone).await;
    assert!(redis.dump()[0].0.contains("{long}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_traffic_costs_no_memory() {
    let tiers = [
        ("alice", r#"{ requests = 100, per = "1h" }"#),
        ("bob", r#"{ requests = 5, per = "1h", count_refused = true }"#),
    ];
    let fleet = Fleet::at_redis(3, &tiers).await;
    // One more attempt than the limit tells one that is full from one that is exceeded.
    for (id, most, kept) in [("alice", 100, 100), ("bob", 5, 6)] {
        assert_eq!(admitted(&fleet.attack.storm(id, most + 5, 9).await), most);
        let log = |dump: Vec<(String, Vec<_>)>| {
            let mut logs = dump.into_iter().filter(|(key, _)| key.contains(&format!("{{{id}}}")));
            logs.next().unwrap().1.len()
        };
        assert_eq!(log(fleet.redis().dump()), kept);
        assert_eq!(admitted(&fleet.attack.storm(id, 100, 9).await), 0);
        assert_eq!(log(fleet.redis().dump()), kept);
    }
}

/// How often each command has run, also those that scripts ran.
fn commands(redis: &Redis) -> BTreeMap<String, u64> {
    let info: String = redis::cmd("INFO").arg("commandstats").query(&mut redis.connection()).unwrap();
    let command = |line: &str| {
        let (name, numbers) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
        Some((name.to_owned(), numbers.split(',').next()?.parse().unwrap()))
    };
    info.lines().filter_map(command).collect()
}

/// What has run since, without what this test itself asked.
fn commands_since(redis: &Redis, before: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let run = |(name, calls): (String, u64)| {
        let more = calls - before.get(&name).copied().unwrap_or(0);
        let is_ours = name == "info" || name.starts_with("client") || name == "hello";
        (more > 0 && !is_ours).then_some((name, more))
    };
    commands(redis).into_iter().filter_map(run).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_admission_is_one_round_trip_and_a_remembered_refusal_none() {
    let tiers = [
        ("set", r#"{ requests = 102, per = "1h" }, { requests = 900, per = "1d" }"#),
        ("list", r#"{ requests = 102, per = "1h" }, { requests = 9_000, per = "1d" }"#),
    ];
    let fleet = Fleet::at_redis(1, &tiers).await;
    for (id, _) in tiers {
        // The first request of a connection brings up its worker's, and the first of all brings the script.
        let mut client = Plain::connect(&fleet.proxies[0]).await;
        assert_eq!(statuses(&mut client, id, 2).await, [200; 2]);
        let before = commands(fleet.redis());
        assert_eq!(statuses(&mut client, id, 100).await, [200; 100]);
        let run = commands_since(fleet.redis(), &before);
        let in_script = |name: &str| name == "time" || name == "pexpire" || name.starts_with(['z', 'l']);
        let round_trips: Vec<_> = run.iter().filter(|(name, _)| !in_script(name)).collect();
        assert_eq!(round_trips, [(&"evalsha".to_owned(), &100)], "of all: {run:?}");
        assert_eq!(run["time"], 100, "the script reads the clock once");

        assert_eq!(statuses(&mut client, id, 1).await, [429]);
        let before = commands(fleet.redis());
        assert_eq!(statuses(&mut client, id, 100).await, [429; 100]);
        assert_eq!(commands_since(fleet.redis(), &before), BTreeMap::new());
    }
}

async fn statuses(client: &mut Plain, id: &str, requests: usize) -> Vec<u16> {
    let mut statuses = Vec::new();
    for _ in 0..requests {
        client.request("GET /v1/models", id, "").await;
        statuses.push(client.answer().await.unwrap().status);
    }
    statuses
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_come_together_share_round_trips() {
    let fleet = Fleet::at_redis(1, &[("alice", r#"{ requests = 1000, per = "1h" }"#)]).await;
    assert_eq!(admitted(&fleet.attack.storm("alice", 16, 16).await), 16);
    let before = commands(fleet.redis());
    assert_eq!(admitted(&fleet.attack.storm("alice", 400, 16).await), 400);
    let run = commands_since(fleet.redis(), &before);
    assert!(run["evalsha"] <= 400, "never more than one for a request: {run:?}");
    assert_eq!(run.get("eval"), None, "{run:?}");
    assert_eq!(fleet.redis().recorded("alice"), 416);
}

#[tokio::test(flavor = "multi_thread")]
async fn strange_credentials_are_refused_and_cost_redis_nothing() {
    let fleet = Fleet::at_redis(1, &[("alice", r#"{ requests = 3, per = "1h" }"#)]).await;
    let before = commands(fleet.redis());
    let long = "x".repeat(4096);
    let alice = crate::harness::secret("alice");
    let strange = [
        "",
        "{}",
        "{alice}",
        "sk-tg-alice-",
        "sk-tg-{alice}-%0d%0aFLUSHALL",
        "a b c",
        "%",
        "*",
        "ratelimit:{alice}",
        "sk-tg-alice-schlüssel",
        "\u{1f511}",
        &long,
        &alice[..alice.len() - 1],
        &format!("{alice}x"),
    ]
    .map(str::to_owned);
    for credential in &strange {
        let mut client = Plain::connect(&fleet.proxies[0]).await;
        let head = format!("GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-api-key: {credential}\r\n\r\n");
        client.send(head).await.unwrap();
        let status = client.answer().await.unwrap().status;
        assert_eq!(status, 401, "{credential}");
    }
    assert_eq!(commands_since(fleet.redis(), &before), BTreeMap::new());
    assert!(fleet.redis().dump().is_empty());
    assert!(fleet.attack.fire(0, "alice").await.is_admitted());
    let dump = format!("{:?}", fleet.redis().dump());
    assert!(!dump.contains(alice.rsplit('-').next().unwrap()), "{dump}");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_are_counted_at_most_once_and_disturb_nobody() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 60, per = "1h" }"#)]).await {
        for n in 0..20 {
            let mut client = Plain::connect(&fleet.proxies[n % fleet.proxies.len()]).await;
            client.request("GET /v1/models", "alice", "").await;
            client.reset();
        }
        let shots = fleet.attack.storm("alice", 100, 9).await;
        // Those that left may still be on their way, so all of them and these together get no more than there is.
        assert!((40..=60).contains(&admitted(&shots)), "{} were admitted", admitted(&shots));
        assert!(shots.iter().all(|shot| shot.is_admitted() || shot.is_refused()));
        if let Some(redis) = &fleet.redis {
            assert_eq!(redis.recorded("alice"), 60);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn counting_goes_on_after_an_outage_under_any_policy() {
    for policy in ["allow", "local"] {
        let (upstream, mut redis) = (crate::harness::Upstream::ok().await, Redis::start().await);
        let lines = format!("on_store_failure = \"{policy}\"");
        let builder = crate::harness::ProxyBuilder::before(&upstream).redis(&redis.url(), &lines);
        let proxy = builder.tier("alice", r#"{ requests = 6, per = "1h" }"#).start().await;
        let proxy = std::sync::Arc::new(proxy);
        let attack = crate::harness::attack::Attack::on(std::slice::from_ref(&proxy));
        assert_eq!(admitted(&attack.series(0, "alice", 2).await), 2);
        redis.kill().await;
        let during = admitted(&attack.storm("alice", 40, 4).await);
        assert_eq!(during, if policy == "allow" { 40 } else { 6 }, "{policy}");
        redis.start_again().await;
        let again = |line: &serde_json::Value| line["fields"]["message"] == "Redis decides again";
        proxy.logs.wait_for("the recovery", again).await;
        let shots = attack.series(0, "alice", 9).await;
        let left: Vec<_> = shots.iter().map(|shot| shot.number("x-ratelimit-remaining")).collect();
        assert_eq!(left, [5, 4, 3, 2, 1, 0, 0, 0, 0], "{policy}: Redis came back empty");
        proxy.signal(Signal::TERM).await;
    }
}
