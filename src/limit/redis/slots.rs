//! Which server of a cluster holds which key.

use std::{collections::HashMap, sync::Arc};

use redis::{RedisError, Value};

/// A cluster spreads its keys over so many slots.
const SLOTS: u16 = 16_384;

/// The slot of the keys with this hash tag: CRC-16 as XMODEM counts it, which the
/// [cluster specification](https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/) asks for.
pub(super) fn slot_of(tag: &str) -> u16 {
    let crc = tag.bytes().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    });
    crc % SLOTS
}

/// What is known of a cluster's servers. A server is named `host:port`.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotMap {
    ranges: Vec<Range>,
    /// Learnt since, one at a time.
    moved: HashMap<u16, Arc<str>>,
}

#[derive(Clone, Debug)]
struct Range {
    first: u16,
    last: u16,
    primary: Arc<str>,
}

impl SlotMap {
    /// Reads the answer to `CLUSTER SLOTS`. A server that does not know its own address has that of `asked`.
    pub(super) fn parse(answer: Value, asked: &str) -> Result<Self, RedisError> {
        type Node = (Option<String>, u16);
        let entries: Vec<Vec<Value>> = redis::from_redis_value(answer)?;
        let mut ranges = Vec::with_capacity(entries.len());
        for entry in entries {
            let mut parts = entry.into_iter();
            let (Some(first), Some(last), Some(Value::Array(mut node))) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            node.truncate(2);
            let (host, port): Node = redis::from_redis_value(Value::Array(node))?;
            let host =
                host.filter(|host| !host.is_empty() && host != "?").unwrap_or_else(|| asked.to_owned());
            let [first, last] = [redis::from_redis_value(first)?, redis::from_redis_value(last)?];
            ranges.push(Range { first, last, primary: format!("{host}:{port}").into() });
        }
        ranges.sort_by_key(|range| range.first);
        Ok(Self { ranges, moved: HashMap::new() })
    }

    /// The server that holds a slot, as far as it is known.
    pub(super) fn primary(&self, slot: u16) -> Option<&Arc<str>> {
        self.moved.get(&slot).or_else(|| {
            let behind = self.ranges.partition_point(|range| range.first <= slot);
            let range = self.ranges.get(behind.checked_sub(1)?)?;
            (slot <= range.last).then_some(&range.primary)
        })
    }

    /// The same map, but for one slot.
    pub(super) fn with_moved(&self, slot: u16, primary: Arc<str>) -> Self {
        let mut map = self.clone();
        map.moved.insert(slot, primary);
        map
    }

    /// Every server that holds a slot.
    pub(super) fn primaries(&self) -> Vec<Arc<str>> {
        let mut all: Vec<_> =
            self.ranges.iter().map(|range| &range.primary).chain(self.moved.values()).cloned().collect();
        all.sort();
        all.dedup();
        all
    }

    /// A hash tag whose slot this server holds. None, if it holds hardly any.
    pub(super) fn tag_at(&self, server: &Arc<str>, prefix: &str) -> Option<String> {
        let candidates = (0..20 * u32::from(SLOTS)).map(|n| format!("{prefix}{n}"));
        if !self.primaries().contains(server) {
            return None;
        }
        candidates.into_iter().find(|tag| self.primary(slot_of(tag)) == Some(server))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bulk(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn entry(first: i64, last: i64, host: Value, port: i64) -> Value {
        let node = Value::Array(vec![host, Value::Int(port), bulk("id"), Value::Array(vec![])]);
        Value::Array(vec![Value::Int(first), Value::Int(last), node])
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot_of("123456789"), 0x31C3 % SLOTS);
        assert_eq!((slot_of("foo"), slot_of("bar"), slot_of("")), (12182, 5061, 0));
    }

    #[test]
    fn a_slot_leads_to_its_server() {
        let answer = vec![
            entry(8000, 16383, bulk("::1"), 7001),
            entry(0, 10, Value::Nil, 7000),
            entry(20, 30, bulk(""), 7002),
        ];
        let map = SlotMap::parse(Value::Array(answer), "redis.example").unwrap();
        let primary = |slot| map.primary(slot).map(|name| &**name);
        assert_eq!(primary(0), Some("redis.example:7000"));
        assert_eq!((primary(10), primary(11), primary(19)), (primary(0), None, None));
        assert_eq!((primary(20), primary(7999)), (Some("redis.example:7002"), None));
        assert_eq!((primary(8000), primary(16383)), (Some("::1:7001"), Some("::1:7001")));
        assert_eq!(SlotMap::default().primary(5), None);
    }

    #[test]
    fn a_moved_slot_is_known_at_once() {
        let map = SlotMap::parse(Value::Array(vec![entry(0, 16383, bulk("a"), 1)]), "a").unwrap();
        let map = map.with_moved(7, "b:2".into());
        assert_eq!(map.primary(7), Some(&"b:2".into()));
        assert_eq!(map.primary(8), Some(&"a:1".into()));
        assert_eq!(map.primaries(), ["a:1", "b:2"].map(Arc::from));
        let tag = map.tag_at(&"b:2".into(), "~probe").unwrap();
        assert_eq!(slot_of(&tag), 7);
        assert_eq!(map.tag_at(&"c:3".into(), "~probe"), None);
    }
}
