//! How many connections there may be, in all and from one address. Shared by all workers.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::{Arc, Mutex, PoisonError},
};

/// Why a connection did not come about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// All the room is taken.
    TooMany,
    /// The room of one address is taken.
    TooManyFromAddress,
    /// The system had no socket for it.
    AcceptFailed,
    /// It did not speak TLS as we do.
    HandshakeFailed,
    /// It took too long to.
    HandshakeTimeout,
}

impl Refusal {
    pub(super) const ALL: [Self; 5] = [
        Self::TooMany,
        Self::TooManyFromAddress,
        Self::AcceptFailed,
        Self::HandshakeFailed,
        Self::HandshakeTimeout,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::TooMany => "too_many",
            Self::TooManyFromAddress => "too_many_from_address",
            Self::AcceptFailed => "accept_failed",
            Self::HandshakeFailed => "handshake_failed",
            Self::HandshakeTimeout => "handshake_timeout",
        }
    }
}

/// Counts connections against their bounds.
#[derive(Debug)]
pub struct Admission {
    most: usize,
    most_per_address: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    all: usize,
    by_address: HashMap<IpAddr, usize>,
}

impl Admission {
    /// At most `most` at a time, and `most_per_address` from one address (0: any number).
    pub fn new(most: usize, most_per_address: usize) -> Arc<Self> {
        Arc::new(Self { most, most_per_address, open: Mutex::default() })
    }

    /// Room for one connection, or the bound that is reached.
    pub(super) fn admit(self: &Arc<Self>, client: IpAddr) -> Result<Slot, Refusal> {
        let address = network(client);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if open.all >= self.most {
            return Err(Refusal::TooMany);
        }
        let from_address = open.by_address.get(&address).copied().unwrap_or_default();
        if self.most_per_address > 0 && from_address >= self.most_per_address {
            return Err(Refusal::TooManyFromAddress);
        }
        open.by_address.insert(address, from_address + 1);
        open.all += 1;
        Ok(Slot { admission: self.clone(), address })
    }
}

/// The room that one connection takes, until dropped.
#[derive(Debug)]
pub(super) struct Slot {
    admission: Arc<Admission>,
    address: IpAddr,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut open = self.admission.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.all -= 1;
        if let Some(count) = open.by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                open.by_address.remove(&self.address);
            }
        }
    }
}

/// One caller can have a whole /64 of IPv6 addresses, so that is what counts as one.
fn network(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_bounds_hold_and_room_comes_back() {
        let admission = Admission::new(3, 2);
        let address = |text: &str| text.parse().unwrap();
        let first = admission.admit(address("192.0.2.1")).unwrap();
        let _second = admission.admit(address("::ffff:192.0.2.1")).unwrap();
        assert_eq!(admission.admit(address("192.0.2.1")).unwrap_err(), Refusal::TooManyFromAddress);
        let _third = admission.admit(address("2001:db8::1")).unwrap();
        assert_eq!(admission.admit(address("2001:db8::2")).unwrap_err(), Refusal::TooMany);
        drop(first);
        let _fourth = admission.admit(address("2001:db8::2")).unwrap();
        assert_eq!(admission.open.lock().unwrap().by_address.len(), 2);
    }

    #[test]
    fn a_refused_address_leaves_nothing_behind() {
        let admission = Admission::new(0, 1);
        assert!(admission.admit("192.0.2.1".parse().unwrap()).is_err());
        assert!(admission.open.lock().unwrap().by_address.is_empty());
    }
}
