//! Durations and sizes as the file writes them: one whole number and one unit.

use std::time::Duration;

use crate::size::UNITS;

/// What a duration looks like, for messages.
pub(super) const DURATION_FORM: &str =
    "a duration such as \"250ms\", \"30s\", \"1m\", \"2h\" or \"1d\": one whole number and one unit";

/// What a size looks like, for messages.
pub(super) const SIZE_FORM: &str =
    "a size such as \"512B\", \"32KiB\", \"64MiB\" or \"1GiB\", or a whole number of bytes";

const DURATION_UNITS: [(&str, u64); 5] =
    [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000)];

/// The duration; nothing where the text has another form or the number is too large.
pub(super) fn duration(text: &str) -> Option<Duration> {
    number_of_units(text, &DURATION_UNITS).map(Duration::from_millis)
}

/// The size in bytes; nothing where the text has another form or the number is too large.
pub(super) fn size(text: &str) -> Option<u64> {
    number_of_units(text, &UNITS)
}

fn number_of_units(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_one_number_and_one_unit() {
        for (text, millis) in [
            ("250ms", 250),
            ("30s", 30_000),
            ("1m", 60_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
            ("0s", 0),
        ] {
            assert_eq!(duration(text), Some(Duration::from_millis(millis)), "{text}");
        }
        let wrong = [
            "", "30", "s", "1.5s", "-1s", "+1s", "1 s", " 1s", "1s ", "1m30s", "1S", "1min", "1w", "1us",
            "١s",
        ];
        for text in wrong {
            assert_eq!(duration(text), None, "{text}");
        }
    }

    #[test]
    fn a_size_has_a_binary_unit() {
        for (text, bytes) in
            [("512B", 512), ("32KiB", 32 << 10), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("0B", 0)]
        {
            assert_eq!(size(text), Some(bytes), "{text}");
        }
        for text in ["", "512", "64MB", "64mib", "1.5MiB", "-1B", "64 MiB", "1TiB"] {
            assert_eq!(size(text), None, "{text}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(duration("18446744073709551615ms"), Some(Duration::from_millis(u64::MAX)));
        assert_eq!(duration("18446744073709551616ms"), None);
        assert_eq!(duration("213503982335d"), None);
        assert_eq!(size("17179869184GiB"), None);
    }
}
