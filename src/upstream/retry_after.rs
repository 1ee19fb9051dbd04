//! How long a provider wants to be left alone, from the head of its 429. Pure.

use std::time::Duration;

use hyper::{
    HeaderMap,
    header::{HeaderName, RETRY_AFTER},
};
use jiff::{Timestamp, fmt::rfc2822};

/// Milliseconds. The SDKs of OpenAI and Anthropic prefer it to `Retry-After`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// The pause that is asked for, if any: `retry-after-ms`, else `Retry-After` in seconds or as a date (RFC 9110 §10.2.3).
pub(super) fn pause(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
    let number = |text: &str| text.parse::<f64>().ok().filter(|number| *number >= 0.0);
    if let Some(millis) = text(RETRY_AFTER_MS).and_then(number) {
        return Duration::try_from_secs_f64(millis / 1000.0).ok();
    }
    let after = text(RETRY_AFTER)?;
    if let Some(seconds) = number(after) {
        return Duration::try_from_secs_f64(seconds).ok();
    }
    let until = rfc2822::DateTimeParser::new().parse_timestamp(after).ok()?;
    Some(Duration::try_from(until.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pause_of(fields: &[(&'static str, &str)]) -> Option<u128> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.insert(*name, value.parse().unwrap());
        }
        pause(&headers, "2026-11-30T12:00:00Z".parse().unwrap()).map(|pause| pause.as_millis())
    }

    #[test]
    fn every_form_is_read() {
        for (value, millis) in [
            ("37", Some(37_000)),
            ("0", Some(0)),
            ("1.5", Some(1500)),
            ("Mon, 30 Nov 2026 12:00:05 GMT", Some(5000)),
            ("Mon, 30 Nov 2026 11:59:00 GMT", Some(0)),
            ("-1", None),
            ("soon", None),
            ("", None),
            ("NaN", None),
            ("1e300", None),
        ] {
            assert_eq!(pause_of(&[("retry-after", value)]), millis, "{value}");
        }
        assert_eq!(pause_of(&[]), None);
    }

    #[test]
    fn milliseconds_come_first() {
        assert_eq!(pause_of(&[("retry-after", "1"), ("retry-after-ms", "120")]), Some(120));
        assert_eq!(pause_of(&[("retry-after", "1"), ("retry-after-ms", "x")]), Some(1000));
    }
}
