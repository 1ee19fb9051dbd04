//! Sizes as people write them.

use std::fmt;

/// The units, each with its number of bytes.
pub const UNITS: [(&str, u64); 4] = [("B", 1), ("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// A number of bytes. It is shown in the largest unit that is exact, as configuration writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = |(_, factor): &&(&str, u64)| self.0.is_multiple_of(*factor) && self.0 >= *factor;
        let (unit, factor) = UNITS.iter().rev().find(exact).unwrap_or(&UNITS[0]);
        write!(f, "{}{unit}", self.0 / factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_exact_unit_is_shown() {
        for (bytes, shown) in [
            (0, "0B"),
            (512, "512B"),
            (1500, "1500B"),
            (8 << 10, "8KiB"),
            (64 << 20, "64MiB"),
            (1 << 30, "1GiB"),
            (1025 << 20, "1025MiB"),
        ] {
            assert_eq!(Size(bytes).to_string(), shown);
        }
    }
}
