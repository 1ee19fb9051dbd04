//! The headers tell the truth, in the form that was promised.

use std::time::Duration;

use super::{Fleet, admitted, assert_waits_for};
use crate::harness::attack::Shot;

const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn remaining_is_what_is_left_and_never_grows_by_itself() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 7, per = "1h" }"#)]).await {
        for left in (0..7).rev() {
            let proxy = left as usize % fleet.proxies.len();
            let shot = fleet.attack.fire(proxy, "alice").await;
            assert!(shot.is_admitted());
            assert_eq!((shot.number("x-ratelimit-remaining"), shot.number("x-ratelimit-limit")), (left, 7));
            assert!((3000..=3600).contains(&shot.number("x-ratelimit-reset")));
        }
        for proxy in 0..fleet.proxies.len() {
            let shot = fleet.attack.fire(proxy, "alice").await;
            assert_eq!((shot.is_refused(), shot.number("x-ratelimit-remaining")), (true, 0));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_tells_the_exact_wait_and_counts_it_down() {
    for fleet in Fleet::everywhere(&[("alice", r#"{ requests = 5, per = "60s" }"#)]).await {
        let shots = fleet.attack.series(0, "alice", 40).await;
        assert_eq!(admitted(&shots), 5);
        assert_waits_for(&shots[5], &shots[0], MINUTE);
        let mut shortest = MINUTE;
        for refused in &shots[5..] {
            assert_wait_is_well_formed(refused, 60);
            assert!(refused.retry_after() <= shortest, "it counts down");
            shortest = refused.retry_after();
        }
        let last = fleet.attack.fire(fleet.proxies.len() - 1, "alice").await;
        assert_wait_is_well_formed(&last, 60);
    }
}

fn assert_wait_is_well_formed(refused: &Shot, window: u64) {
    let seconds = refused.header("retry-after");
    assert!(seconds.bytes().all(|c| c.is_ascii_digit()) && !seconds.starts_with('0'), "{seconds}");
    assert!((1..=window).contains(&refused.number("retry-after")));
    let millis = refused.number("retry-after-ms");
    assert_eq!(refused.number("retry-after"), millis.div_ceil(1000));
    assert_eq!(refused.number("x-ratelimit-reset"), millis.div_ceil(1000));
    assert_eq!(refused.header("x-ratelimit-source"), "tollgate");
}

/// An item of a List of Strings with Integer parameters (RFC 9651 §3.1, §3.1.2).
struct Item {
    name: String,
    parameters: Vec<(String, u64)>,
}

impl Item {
    fn parameter(&self, key: &str) -> u64 {
        let found: Vec<_> = self.parameters.iter().filter(|(known, _)| known == key).collect();
        assert_eq!(found.len(), 1, "{key} of {} stands once", self.name);
        found[0].1
    }
}

fn parse(field: &str) -> Vec<Item> {
    let item = |text: &str| {
        let (name, rest) = text.strip_prefix('"').unwrap().split_once('"').unwrap();
        assert!(name.bytes().all(|c| (0x20..0x7f).contains(&c) && c != b'\\'), "{name}");
        let parameter = |text: &str| {
            let (key, value) = text.split_once('=').unwrap();
            assert!(key.bytes().all(|c| c.is_ascii_lowercase()), "{key}");
            assert!(value.len() <= 15 && value.bytes().all(|c| c.is_ascii_digit()), "{value}");
            (key.to_owned(), value.parse().unwrap())
        };
        let mut parts = rest.split(';');
        assert_eq!(parts.next(), Some(""), "nothing between a name and its parameters");
        Item { name: name.to_owned(), parameters: parts.map(parameter).collect() }
    };
    field.split(", ").map(item).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_fields_of_the_draft_are_well_formed_and_agree_with_the_rest() {
    let limits = r#"{ requests = 2, per = "60s" }, { requests = 100_000, per = "1d" },
        { requests = 50, per = "1500ms" }, { requests = 9, per = "1h", count_refused = true }"#;
    for fleet in Fleet::everywhere(&[("alice", limits)]).await {
        for shot in fleet.attack.series(0, "alice", 4).await {
            let (left, policies) = (parse(shot.header("ratelimit")), parse(shot.header("ratelimit-policy")));
            let names = |items: &[Item]| items.iter().map(|item| item.name.clone()).collect::<Vec<_>>();
            assert_eq!(names(&left), ["1m", "1d", "1500ms", "1h-attempts"]);
            assert_eq!(names(&policies), names(&left));
            for (left, policy) in left.iter().zip(&policies) {
                assert!(left.parameter("r") <= policy.parameter("q"));
                let window = if left.name == "1500ms" { 2 } else { policy.parameter("w") };
                assert!(left.parameter("t") <= window, "{}", left.name);
                if shot.is_refused() && left.parameter("r") == 0 {
                    assert!(left.parameter("t") <= shot.number("retry-after"), "{}", left.name);
                }
            }
            let least = left.iter().find(|item| item.name == "1m").unwrap();
            assert_eq!(least.parameter("r"), shot.number("x-ratelimit-remaining"));
            assert_eq!(least.parameter("t"), shot.number("x-ratelimit-reset"));
        }
    }
}
