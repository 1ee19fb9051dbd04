//! What the limits say in the head of an answer.

use std::{fmt::Write as _, time::Duration};

use hyper::{
    HeaderMap,
    header::{self, HeaderValue},
};

use super::{LIMIT, RATELIMIT, RATELIMIT_POLICY, REMAINING, RESET, RETRY_AFTER_MS, SHOULD_RETRY, SOURCE};
use crate::limit::{Limit, Status};

/// Waits longer than this make SDKs do anything from hammering to sleeping for an hour.
const LONGEST_CLIENT_RETRY: Duration = Duration::from_secs(59);

/// Sets what the limits say about an admitted request, in place of an upstream's fields of the same names.
pub fn set_statuses(headers: &mut HeaderMap, field: &PolicyField, statuses: &[Status]) {
    let Some(tightest) = statuses.iter().min_by(|a, b| room(a).total_cmp(&room(b))) else { return };
    set_one(headers, tightest, tightest.reset_after);
    set_all(headers, field, statuses);
}

/// Sets what a refusal says: all of it about the limit that refused, and when to come back.
pub fn set_refusal(
    headers: &mut HeaderMap,
    field: &PolicyField,
    statuses: &[Status],
    by: usize,
    wait: Duration,
) {
    if let Some(refusing) = statuses.get(by) {
        set_one(headers, &Status { remaining: 0, ..*refusing }, wait);
    }
    set_all(headers, field, statuses);
    headers.insert(SOURCE, HeaderValue::from_static("tollgate"));
    headers.insert(header::RETRY_AFTER, whole_seconds(wait).max(1).into());
    headers.insert(RETRY_AFTER_MS, (wait.as_micros().div_ceil(1000) as u64).max(1).into());
    if wait > LONGEST_CLIENT_RETRY {
        headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
    }
}

/// Whole seconds, rounded up: a caller that waits them is never early.
pub fn whole_seconds(wait: Duration) -> u64 {
    wait.as_micros().div_ceil(1_000_000) as u64
}

fn room(status: &Status) -> f64 {
    f64::from(status.remaining) / f64::from(status.limit)
}

fn set_one(headers: &mut HeaderMap, status: &Status, reset: Duration) {
    headers.insert(LIMIT, status.limit.into());
    headers.insert(REMAINING, status.remaining.into());
    headers.insert(RESET, whole_seconds(reset).into());
}

fn set_all(headers: &mut HeaderMap, field: &PolicyField, statuses: &[Status]) {
    headers.insert(RATELIMIT_POLICY, field.value.clone());
    if let Some(value) = field.remaining(statuses) {
        headers.insert(RATELIMIT, value);
    }
}

/// The value of `RateLimit-Policy` for a list of limits, and the names by which `RateLimit` refers to them.
///
/// Each is a List of String Items with parameters (RFC 9651): `"1m";q=100;w=60` and `"1m";r=99;t=60`. A window is
/// given in whole seconds and left out where it has none.
#[derive(Clone, Debug)]
pub struct PolicyField {
    value: HeaderValue,
    names: Vec<String>,
}

impl PolicyField {
    /// The field for these limits.
    pub fn new(limits: &[Limit]) -> Self {
        let names: Vec<String> = limits.iter().map(name).collect();
        let items = limits.iter().zip(&names).map(|(limit, name)| {
            let window = limit.window.length();
            let seconds =
                if window.subsec_nanos() == 0 { format!(";w={}", window.as_secs()) } else { String::new() };
            format!("\"{name}\";q={}{seconds}", limit.requests)
        });
        let value = items.collect::<Vec<_>>().join(", ");
        Self { value: HeaderValue::try_from(value).expect("names and numbers are visible ASCII"), names }
    }

    /// The names of the limits, in their order: for metrics too.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    fn remaining(&self, statuses: &[Status]) -> Option<HeaderValue> {
        let mut text = String::with_capacity(32 * statuses.len());
        for (name, status) in self.names.iter().zip(statuses) {
            let separator = if text.is_empty() { "" } else { ", " };
            let (remaining, reset) = (status.remaining, whole_seconds(status.reset_after));
            write!(text, "{separator}\"{name}\";r={remaining};t={reset}").ok()?;
        }
        HeaderValue::try_from(text).ok()
    }
}

fn name(limit: &Limit) -> String {
    let attempts = if limit.count_refused { "-attempts" } else { "" };
    let shadow = if limit.enforce { "" } else { "-shadow" };
    format!("{}{attempts}{shadow}", limit.window)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use hyper::header::HeaderName;

    use super::*;
    use crate::limit::Window;

    fn limit(requests: u32, window: Duration) -> Limit {
        let requests = NonZeroU32::new(requests).unwrap();
        Limit::new(requests, Window::new(window).unwrap())
    }

    fn status(limit: u32, remaining: u32, reset_millis: u64) -> Status {
        Status { limit, remaining, reset_after: Duration::from_millis(reset_millis), over: false }
    }

    fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
        let values: Vec<_> = headers.get_all(name).iter().collect();
        assert_eq!(values.len(), 1, "{name} stands once");
        values[0].to_str().unwrap()
    }

    #[test]
    fn the_tightest_limit_is_shown_and_every_limit_named() {
        let limits = [limit(100, Duration::from_secs(60)), limit(1000, Duration::from_secs(86_400))];
        let mut headers = HeaderMap::new();
        headers.append(LIMIT, HeaderValue::from_static("7"));
        headers.append(LIMIT, HeaderValue::from_static("8"));
        let statuses = [status(100, 50, 1), status(1000, 400, 5_000_001)];
        set_statuses(&mut headers, &PolicyField::new(&limits), &statuses);
        assert_eq!(
            (text(&headers, &LIMIT), text(&headers, &REMAINING), text(&headers, &RESET)),
            ("1000", "400", "5001")
        );
        assert_eq!(text(&headers, &RATELIMIT_POLICY), r#""1m";q=100;w=60, "1d";q=1000;w=86400"#);
        assert_eq!(text(&headers, &RATELIMIT), r#""1m";r=50;t=1, "1d";r=400;t=5001"#);
    }

    #[test]
    fn a_refusal_is_about_the_limit_that_refused() {
        let limits = [limit(100, Duration::from_millis(1500)), limit(10, Duration::from_secs(60))];
        let refuse = |wait_millis| {
            let mut headers = HeaderMap::new();
            let statuses = [status(100, 0, 10), status(10, 0, wait_millis)];
            set_refusal(
                &mut headers,
                &PolicyField::new(&limits),
                &statuses,
                1,
                Duration::from_millis(wait_millis),
            );
            headers
        };
        let headers = refuse(6_420);
        assert_eq!(
            (text(&headers, &LIMIT), text(&headers, &REMAINING), text(&headers, &RESET)),
            ("10", "0", "7")
        );
        assert_eq!((text(&headers, &header::RETRY_AFTER), text(&headers, &RETRY_AFTER_MS)), ("7", "6420"));
        assert_eq!(text(&headers, &SOURCE), "tollgate");
        assert_eq!(text(&headers, &RATELIMIT_POLICY), r#""1500ms";q=100, "1m";q=10;w=60"#);
        assert!(!headers.contains_key(SHOULD_RETRY));
        assert_eq!(text(&refuse(59_001), &SHOULD_RETRY), "false");
        assert_eq!(text(&refuse(1), &header::RETRY_AFTER), "1");
    }
}
