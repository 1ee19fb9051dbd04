//! A real redis-server that answers with an error, as it does when it is demoted, full, busy or locked.

use redis::{Connection, FromRedisValue};
use serde_json::Value;

use super::{Place, Places, says};
use crate::harness::{Redis, patiently};

fn tell<T: FromRedisValue>(connection: &mut Connection, words: &str) -> T {
    let mut words = words.split(' ');
    let mut command = redis::cmd(words.next().unwrap());
    for word in words {
        command.arg(word);
    }
    command.query(connection).unwrap()
}

fn set(connection: &mut Connection, name: &str, value: &str) {
    let _: () = redis::cmd("CONFIG").arg("SET").arg(name).arg(value).query(connection).unwrap();
}

/// Redis does something that `begin` and `end` say; in between it answers with an error of this kind.
async fn survives(kind: &str, begin: impl FnOnce(&mut Connection), end: impl FnOnce(&mut Connection)) {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    begin(&mut operator);
    places.fall_back(kind).await;
    end(&mut operator);
    places.are_exact_again(&redis, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_demoted_server() {
    survives(
        "read_only",
        |operator| tell(operator, "REPLICAOF 127.0.0.1 1"),
        |operator| tell(operator, "REPLICAOF NO ONE"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_memory() {
    survives(
        "cannot_write",
        |operator| set(operator, "maxmemory", "1"),
        |operator| set(operator, "maxmemory", "0"),
    )
    .await;
}

/// A script that has removed something may write however full the memory is. So what an earlier trial left, which the next
/// one would remove, must not make a full server look as if it decided.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_memory_with_the_remains_of_a_trial() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    let trials: Vec<String> = patiently("the trial after the start", async {
        loop {
            let trials: Vec<String> = tell(&mut operator, "KEYS ratelimit:{~probe*");
            if !trials.is_empty() {
                break trials;
            }
        }
    })
    .await;
    for trial in trials {
        assert_eq!(tell::<i64>(&mut operator, &format!("PERSIST {trial}")), 1);
    }
    set(&mut operator, "maxmemory", "1");
    places.fall_back("cannot_write").await;
    for place in &places.0 {
        let tried = |line: &Value| says(line, "Redis still") || says(line, "Redis decides again");
        place.proxy.logs.wait_for("a trial", tried).await;
        assert_eq!(place.told("Redis decides again"), 0, "{}", place.policy);
    }
    set(&mut operator, "maxmemory", "0");
    places.are_exact_again(&redis, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_replicas_to_write_to() {
    survives(
        "cannot_write",
        |operator| set(operator, "min-replicas-to-write", "2"),
        |operator| set(operator, "min-replicas-to-write", "0"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_can_not_be_written() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    redis.lose_folder();
    set(&mut operator, "save", "3600 1");
    let _: () = tell(&mut operator, "BGSAVE");
    patiently("a failed save", async {
        while !tell::<String>(&mut operator, "INFO persistence").contains("rdb_last_bgsave_status:err") {}
    })
    .await;
    places.fall_back("cannot_write").await;
    set(&mut operator, "stop-writes-on-bgsave-error", "no");
    places.are_exact_again(&redis, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_does_not_end() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    set(&mut operator, "lua-time-limit", "10");
    let mut endless = redis.connection();
    let endless = std::thread::spawn(move || {
        redis::cmd("EVAL").arg("while true do end").arg(0).query::<()>(&mut endless)
    });
    patiently("a busy Redis", async { while redis::cmd("PING").query::<String>(&mut operator).is_ok() {} })
        .await;
    places.fall_back("busy").await;
    let _: () = tell(&mut operator, "SCRIPT KILL");
    assert!(endless.join().unwrap().is_err());
    places.are_exact_again(&redis, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_loads_its_data() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    let _: () = tell(&mut operator, "DEBUG POPULATE 10000 filler 1000");
    set(&mut operator, "key-load-delay", "10000");
    set(&mut operator, "loading-process-events-interval-bytes", "1024");
    let mut loader = redis.connection();
    let loader =
        std::thread::spawn(move || redis::cmd("DEBUG").arg("RELOAD").query::<()>(&mut loader).unwrap());
    patiently("a Redis that loads", async {
        while redis::cmd("DBSIZE").query::<u64>(&mut operator).is_ok() {}
    })
    .await;
    places.fall_back("busy").await;
    set(&mut operator, "key-load-delay", "0");
    loader.join().unwrap();
    places.are_exact_again(&redis, 1).await;
}

/// With the right password the proxies were let in, and with the wrong one they are not.
#[tokio::test(flavor = "multi_thread")]
async fn a_password_that_was_changed() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    set(&mut operator, "requirepass", "another");
    let _: i64 = tell(&mut operator, "CLIENT KILL TYPE normal SKIPME yes");
    places.fall_back("not_permitted").await;
    for place in &places.0 {
        let told = place.proxy.logs.wait_for("the fault", |line| says(line, "Redis does not decide")).await;
        assert_eq!(told["level"], "ERROR");
        let said = told["fields"]["remedy"].as_str().unwrap();
        assert!(said.contains("password"), "{said}");
    }
    set(&mut operator, "requirepass", "");
    places.are_exact_again(&redis, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_address_within_the_server() {
    let mut redis = Redis::start().await;
    let nowhere = Place::new(&format!("{}/999", redis.url()), "deny", "20s").await;
    nowhere.falls_back("disconnected").await;
    redis.kill().await;
    redis.start_again_with(&["--requirepass", "right"]).await;
    let wrong = Place::new(&redis.url().replace("//", "//:wrong@"), "deny", "20s").await;
    wrong.falls_back("not_permitted").await;
    let right = Place::new(&redis.url().replace("//", "//:right@"), "deny", "20s").await;
    assert_eq!(right.statuses(5).await, [200, 200, 200, 429, 429]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_was_forbidden() {
    survives(
        "not_permitted",
        |operator| tell(operator, "ACL SETUSER default -evalsha"),
        |operator| tell(operator, "ACL SETUSER default +evalsha"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_of_the_script_that_was_forbidden() {
    survives(
        "not_permitted",
        |operator| tell(operator, "ACL SETUSER default -zadd"),
        |operator| tell(operator, "ACL SETUSER default +zadd"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_were_forbidden() {
    survives(
        "not_permitted",
        |operator| tell(operator, "ACL SETUSER default resetkeys ~elsewhere:*"),
        |operator| tell(operator, "ACL SETUSER default allkeys"),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_room_for_another_client() {
    survives(
        "disconnected",
        |operator| {
            set(operator, "maxclients", "1");
            let _: i64 = tell(operator, "CLIENT KILL TYPE normal SKIPME yes");
        },
        |operator| set(operator, "maxclients", "100"),
    )
    .await;
}

/// The server of an outage comes back locked: another fault, and one that needs a person.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_locked_is_told_of() {
    let mut redis = Redis::start().await;
    let place = Place::new(&redis.url(), "deny", "20s").await;
    assert_eq!(place.status().await, 200);
    redis.kill().await;
    place.falls_back("disconnected").await;
    redis.start_again_with(&["--requirepass", "another"]).await;
    let locked = |line: &Value| says(line, "Redis still does not decide") && line["level"] == "ERROR";
    let told = place.proxy.logs.wait_for("the new reason", locked).await;
    assert!(told["fields"]["remedy"].as_str().unwrap().contains("password"));
    assert_eq!(place.statuses(3).await, [503; 3]);
    assert_eq!(place.proxy.logs.all().iter().filter(|line| locked(line)).count(), 1, "and only once");
}

#[tokio::test(flavor = "multi_thread")]
async fn forgotten_scripts_and_forgotten_data_are_no_fault() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    let _: () = tell(&mut operator, "SCRIPT FLUSH");
    for place in &places.0 {
        assert_eq!(place.status().await, 200);
        assert_eq!(redis.admissions(place.policy), 2, "what was counted still counts");
    }
    let _: () = tell(&mut operator, "FLUSHALL");
    for place in &places.0 {
        assert_eq!(place.statuses(5).await, [200, 200, 200, 429, 429], "the window begins anew");
        assert_eq!(place.metric("tollgate_limiter_faults_total").await, 0.0);
        assert_eq!(redis.admissions(place.policy), 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_type_is_answered_by_policy_and_told_with_the_key_to_delete() {
    let redis = Redis::start().await;
    let places = Places::before(&redis).await;
    let mut operator = redis.connection();
    for place in &places.0 {
        let log = format!("ratelimit:{{{}}}:1:admitted", place.policy);
        let _: () = tell(&mut operator, &format!("SET {log} x"));
        assert_eq!(place.statuses(super::REQUESTS).await, place.answers_without_redis());
        assert_eq!(place.faults("wrong_type").await, super::REQUESTS as f64);
        assert_eq!(place.metric("tollgate_limiter_store_up").await, 1.0, "others are still counted");
        place.told_once("Redis did not decide on a request").await;
        let _: () = tell(&mut operator, &format!("DEL {log}"));
        assert_eq!(place.statuses(5).await, [200, 200, 200, 429, 429]);
    }
}
