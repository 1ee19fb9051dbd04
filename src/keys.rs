//! API keys: the secret that a caller sends, the hash that is kept of it, and the table that finds its owner.
//!
//! A key is `sk-tg-<id>-<secret>` with 256 bits of randomness, so that SHA-256 is all the stretching it needs. Only the
//! hash is configured; the secret is shown once, by `tollgate key new`.

use std::{borrow::Borrow, collections::HashMap, fmt, str::FromStr, sync::Arc};

use hmac::{Hmac, KeyInit, Mac};
use jiff::Timestamp;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// Every key that Tollgate makes begins with this, so that secret scanners find a leaked one.
pub const PREFIX: &str = "sk-tg-";

/// Longer credentials are refused before they are hashed.
const MAX_CREDENTIAL_BYTES: usize = 512;

/// A credential as a caller sent it. It has no `Display`, and its `Debug` tells nothing.
#[derive(Clone, Copy)]
pub struct ApiKey<'a>(&'a str);

impl<'a> ApiKey<'a> {
    /// Takes what arrived in a credential slot; nothing where it is empty or absurdly long.
    pub fn new(sent: &'a str) -> Option<Self> {
        (!sent.is_empty() && sent.len() <= MAX_CREDENTIAL_BYTES).then_some(Self(sent))
    }

    /// What is stored of this key.
    pub fn hash(self) -> KeyHash {
        KeyHash(Sha256::digest(self.0.as_bytes()).into())
    }

    /// Whether this was made by Tollgate, known here or not: such a secret is never sent on.
    pub fn is_ours(self) -> bool {
        self.0.starts_with(PREFIX)
    }
}

impl fmt::Debug for ApiKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

/// SHA-256 of an API key. Written `sha256:` and 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash([u8; 32]);

impl KeyHash {
    /// HMAC-SHA256 of a text under this hash, in hexadecimal digits: every replica comes to the same.
    pub fn seal(&self, text: &str) -> String {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes a key of any length");
        mac.update(text.as_bytes());
        let bytes = mac.finalize().into_bytes();
        bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(hex_digit).collect()
    }

    /// Whether this is the text's seal, in a time that does not tell how much of it is right.
    pub fn seals(&self, text: &str, seal: &str) -> bool {
        self.seal(text).as_bytes().ct_eq(seal.as_bytes()).into()
    }
}

fn hex_digit(value: u8) -> char {
    char::from_digit(value.into(), 16).expect("four bits are one digit")
}

/// The text is not `sha256:` and 64 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("not a key hash: expected `sha256:` and 64 hexadecimal digits, as `tollgate key new` prints")]
pub struct InvalidKeyHash;

impl FromStr for KeyHash {
    type Err = InvalidKeyHash;

    fn from_str(text: &str) -> Result<Self, InvalidKeyHash> {
        let hex = text.strip_prefix("sha256:").ok_or(InvalidKeyHash)?.as_bytes();
        let mut bytes = [0; 32];
        if hex.len() != 64 {
            return Err(InvalidKeyHash);
        }
        for (byte, pair) in bytes.iter_mut().zip(hex.chunks_exact(2)) {
            let digit = |c: u8| char::from(c).to_digit(16).ok_or(InvalidKeyHash);
            *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("sha256:")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(…)")
    }
}

/// The public name of a key: it stands in logs, metrics and Redis, where the secret never does.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(Arc<str>);

/// The text can't be a key id.
#[derive(Debug, thiserror::Error)]
#[error("not a key id: expected 1 to 64 letters, digits, `_`, `.` or `-`, the first a letter or digit")]
pub struct InvalidKeyId;

impl KeyId {
    /// The id, shared.
    pub fn name(&self) -> Arc<str> {
        self.0.clone()
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for KeyId {
    type Err = InvalidKeyId;

    fn from_str(text: &str) -> Result<Self, InvalidKeyId> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
        let starts_well = text.starts_with(|c: char| c.is_ascii_alphanumeric());
        if !starts_well || text.len() > 64 || !text.chars().all(allowed) {
            return Err(InvalidKeyId);
        }
        Ok(Self(text.into()))
    }
}

/// So that a table of ids can be asked with text.
impl Borrow<str> for KeyId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which tier of the policy a key belongs to. Only the policy that made it can look it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierIndex(pub usize);

/// One configured key.
#[derive(Clone, Debug)]
pub struct Key {
    /// The public name.
    pub id: KeyId,
    /// What is stored of the secret.
    pub hash: KeyHash,
    /// The tier whose limits hold.
    pub tier: TierIndex,
    /// From this instant on the key is refused.
    pub expires: Option<Timestamp>,
    /// A disabled key is refused like an unknown one.
    pub disabled: bool,
}

impl Key {
    fn is_valid_at(&self, now: Timestamp) -> bool {
        !self.disabled && self.expires.is_none_or(|expires| now < expires)
    }
}

/// All configured keys, found by the hash of the secret.
#[derive(Debug, Default)]
pub struct KeyStore {
    by_hash: HashMap<KeyHash, Key>,
    by_id: HashMap<KeyId, KeyHash>,
}

impl KeyStore {
    /// Whether this secret is configured, valid or not.
    pub fn knows(&self, sent: ApiKey<'_>) -> bool {
        self.find(sent).is_some()
    }

    /// The key that this secret opens at `now`; nothing if it is unknown, disabled or expired.
    pub fn look_up(&self, sent: ApiKey<'_>, now: Timestamp) -> Option<&Key> {
        self.find(sent).filter(|key| key.is_valid_at(now))
    }

    /// The key of this public name; nothing if it is unknown, disabled or expired.
    pub fn named(&self, id: &str, now: Timestamp) -> Option<&Key> {
        self.by_hash.get(self.by_id.get(id)?).filter(|key| key.is_valid_at(now))
    }

    /// The time that the table takes tells only about the hash of a guess. The comparison that decides is constant.
    fn find(&self, sent: ApiKey<'_>) -> Option<&Key> {
        let hash = sent.hash();
        let key = self.by_hash.get(&hash)?;
        bool::from(key.hash.0.ct_eq(&hash.0)).then_some(key)
    }
}

impl FromIterator<Key> for KeyStore {
    fn from_iter<I: IntoIterator<Item = Key>>(keys: I) -> Self {
        let by_hash: HashMap<_, _> = keys.into_iter().map(|key| (key.hash, key)).collect();
        let by_id = by_hash.values().map(|key| (key.id.clone(), key.hash)).collect();
        Self { by_hash, by_id }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(secret: &str, expires: Option<&str>, disabled: bool) -> Key {
        Key {
            id: "alice".parse().unwrap(),
            hash: ApiKey::new(secret).unwrap().hash(),
            tier: TierIndex(0),
            expires: expires.map(|at| at.parse().unwrap()),
            disabled,
        }
    }

    fn at(time: &str) -> Timestamp {
        time.parse().unwrap()
    }

    #[test]
    fn a_hash_survives_its_text_form() {
        let hash = ApiKey::new("sk-tg-alice-secret").unwrap().hash();
        assert_eq!(hash.to_string().parse::<KeyHash>().unwrap(), hash);
        // From `printf 'abc' | sha256sum`.
        let known = "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(ApiKey::new("abc").unwrap().hash().to_string(), known);
        for wrong in [
            "",
            "sha256:",
            "sha256:12",
            "md5:00",
            &known[7..],
            &format!("{known}0"),
            &known.replace('b', "g"),
        ] {
            assert!(wrong.parse::<KeyHash>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_id_is_short_and_plain() {
        for good in ["a", "alice", "team-7.prod_x", &"x".repeat(64)] {
            assert!(good.parse::<KeyId>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "a b", "a{b}", "ä", "a/b", "a\n", &"x".repeat(65)] {
            assert!(bad.parse::<KeyId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_secret_opens_its_own_key_only_while_it_is_valid() {
        let keys: KeyStore =
            [key("one", Some("2027-01-01T00:00:00Z"), false), key("two", None, true)].into_iter().collect();
        let one = ApiKey::new("one").unwrap();
        assert!(keys.look_up(one, at("2026-12-31T23:59:59Z")).is_some());
        assert!(keys.look_up(one, at("2027-01-01T00:00:00Z")).is_none());
        assert!(keys.look_up(ApiKey::new("two").unwrap(), at("2026-01-01T00:00:00Z")).is_none());
        assert!(keys.knows(ApiKey::new("two").unwrap()));
        assert!(!keys.knows(ApiKey::new("three").unwrap()));
    }

    #[test]
    fn the_stored_hash_is_no_credential() {
        let keys: KeyStore = [key("one", None, false)].into_iter().collect();
        let hash = ApiKey::new("one").unwrap().hash().to_string();
        assert!(!keys.knows(ApiKey::new(&hash).unwrap()));
        assert!(!keys.knows(ApiKey::new(&hash[7..]).unwrap()));
    }

    #[test]
    fn a_seal_is_an_hmac() {
        // From Python's `hmac.new(bytes.fromhex(…), b"…", "sha256")`.
        let hash: KeyHash =
            "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad".parse().unwrap();
        let seal = hash.seal("what do ya want for nothing?");
        assert_eq!(seal, "324c0364b6f48b5c0a2bb2fda30ea5f1c626f652c802b9dbd257699f2d0b4e91");
        assert!(hash.seals("what do ya want for nothing?", &seal));
        assert!(!hash.seals("what do ya want for nothing!", &seal));
        assert!(!hash.seals("what do ya want for nothing?", ""));
    }

    #[test]
    fn a_key_is_found_by_its_name_while_it_is_valid() {
        let keys: KeyStore = [key("one", Some("2027-01-01T00:00:00Z"), false)].into_iter().collect();
        assert!(keys.named("alice", at("2026-12-31T23:59:59Z")).is_some());
        assert!(keys.named("alice", at("2027-01-01T00:00:00Z")).is_none());
        assert!(keys.named("bob", at("2026-12-31T23:59:59Z")).is_none());
    }

    #[test]
    fn no_debug_output_holds_a_secret() {
        let shown = format!("{:?} {:?}", ApiKey::new("hunter2").unwrap(), key("hunter2", None, false));
        assert!(!shown.contains("hunter2"));
        assert!(!shown.contains(&ApiKey::new("hunter2").unwrap().hash().to_string()[7..]));
    }

    #[test]
    fn empty_and_absurd_credentials_are_none() {
        assert!(ApiKey::new("").is_none());
        assert!(ApiKey::new(&"k".repeat(513)).is_none());
    }
}
