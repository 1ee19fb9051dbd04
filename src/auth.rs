//! Who is calling: from the credential slots of a request to a [`Principal`]. Pure, no I/O.
//!
//! SDKs disagree on where a key goes, and some send it twice, so every slot is tried and one valid key is enough.

use std::borrow::Cow;

use hyper::{HeaderMap, header::SEC_WEBSOCKET_PROTOCOL, http::request::Parts};
use jiff::Timestamp;
use percent_encoding::percent_decode_str;

use crate::{
    headers::{CREDENTIAL_SLOTS, items},
    keys::{ApiKey, Key, KeyId, KeyStore, TierIndex},
    upload_session,
};

/// The query parameters that can hold a key, in any case: Google's REST samples use the first, and browsers, whose
/// WebSockets have no headers, the others for Azure.
const QUERY_SLOTS: [&str; 3] = ["key", "api-key", "authorization"];

/// What stands before a key in `Sec-WebSocket-Protocol`, the one header that a browser's WebSocket can fill: OpenAI's SDK
/// sends `realtime, openai-insecure-api-key.KEY`.
const SUBPROTOCOL_SLOT: &str = "openai-insecure-api-key.";

/// The authenticated caller.
#[derive(Clone, Debug)]
pub struct Principal {
    /// The key's public name.
    pub key: KeyId,
    /// The key's tier.
    pub tier: TierIndex,
    /// Where the request is the rest of an upload, whose beginning was counted: the mark of the endpoint that knows it.
    pub uploads_to: Option<u32>,
}

/// Why a caller is not let in. The caller is told the same in both cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unauthorized {
    /// No slot held anything.
    #[error("no API key was sent")]
    Missing,
    /// What was sent is malformed, unknown, disabled or expired.
    #[error("no slot holds a valid API key")]
    Invalid,
}

/// Finds the caller, or says why there is none.
pub fn authenticate(keys: &KeyStore, request: &Parts, now: Timestamp) -> Result<Principal, Unauthorized> {
    let (headers, query) = (&request.headers, request.uri.query());
    let mut verdict = Unauthorized::Missing;
    if query_parameters(query).any(|(name, _)| name == upload_session::PARAMETER) {
        verdict = Unauthorized::Invalid;
        // Before the other slots, for a client that sends its key again is not counted again either.
        if let Some((key, mark)) = upload_session::opened(keys, request, now) {
            return Ok(Principal { uploads_to: Some(mark), ..Principal::of(key) });
        }
    }
    for sent in in_headers(headers).chain(in_subprotocols(headers)) {
        verdict = Unauthorized::Invalid;
        if let Some(principal) = open(keys, sent, now) {
            return Ok(principal);
        }
    }
    for sent in query_parameters(query).filter_map(in_query) {
        verdict = Unauthorized::Invalid;
        if let Some(principal) = open(keys, without_scheme(&sent), now) {
            return Ok(principal);
        }
    }
    Err(verdict)
}

/// Whether this header or query value holds a key of Tollgate, valid or not. Such a value never goes to an upstream.
pub fn holds_our_key(keys: &KeyStore, value: &str) -> bool {
    let is_ours = |text: &str| ApiKey::new(text).is_some_and(|key| key.is_ours() || keys.knows(key));
    is_ours(value) || is_ours(without_scheme(value))
}

/// Whether this parameter of a raw query holds a key of Tollgate, or stands for one.
pub fn parameter_holds_our_key(keys: &KeyStore, parameter: (&str, &str)) -> bool {
    parameter.0 == upload_session::PARAMETER
        || in_query(parameter).is_some_and(|value| holds_our_key(keys, &value))
}

/// The credential in an item of `Sec-WebSocket-Protocol`, if it holds one.
pub fn in_subprotocol(item: &str) -> Option<&str> {
    item.trim().strip_prefix(SUBPROTOCOL_SLOT)
}

/// The parameters of a raw query, undecoded, as name and value.
pub fn query_parameters(query: Option<&str>) -> impl Iterator<Item = (&str, &str)> {
    let pairs = query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
}

fn in_headers(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = CREDENTIAL_SLOTS.iter().flat_map(|slot| headers.get_all(slot));
    values.filter_map(|value| value.to_str().ok()).map(without_scheme)
}

fn in_subprotocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    items(headers, &SEC_WEBSOCKET_PROTOCOL).filter_map(in_subprotocol)
}

/// The decoded value of a parameter that can hold a credential.
fn in_query<'a>((name, value): (&str, &'a str)) -> Option<Cow<'a, str>> {
    let is_slot = QUERY_SLOTS.iter().any(|slot| name.eq_ignore_ascii_case(slot));
    is_slot.then(|| match percent_decode_str(value).decode_utf8_lossy() {
        // A space of `Bearer KEY` in the manner of forms. No key of ours holds a plus.
        form if form.contains('+') => Cow::Owned(form.replace('+', " ")),
        plain => plain,
    })
}

/// The key in `Bearer KEY`, any case of the scheme. A key never holds a space, so a bare one comes back as it is.
fn without_scheme(value: &str) -> &str {
    let value = value.trim_ascii();
    match value.split_once(' ') {
        Some((scheme, key)) if scheme.eq_ignore_ascii_case("bearer") => key.trim_ascii(),
        _ => value,
    }
}

fn open(keys: &KeyStore, sent: &str, now: Timestamp) -> Option<Principal> {
    keys.look_up(ApiKey::new(sent)?, now).map(Principal::of)
}

impl Principal {
    fn of(key: &Key) -> Self {
        Self { key: key.id.clone(), tier: key.tier, uploads_to: None }
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;
    use crate::keys::Key;

    const SECRET: &str = "sk-tg-alice-0123456789";

    fn keys() -> KeyStore {
        let key = Key {
            id: "alice".parse().unwrap(),
            hash: ApiKey::new(SECRET).unwrap().hash(),
            tier: TierIndex(0),
            expires: Some("2027-01-01T00:00:00Z".parse().unwrap()),
            disabled: false,
        };
        [key].into_iter().collect()
    }

    fn request(slots: &[(&'static str, &str)], query: Option<&str>) -> Parts {
        let mut request = Request::get(format!("/v1/x?{}", query.unwrap_or_default()));
        for (name, value) in slots {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    fn attempt(slots: &[(&'static str, &str)], query: Option<&str>) -> Result<String, Unauthorized> {
        let now = "2026-11-30T00:00:00Z".parse().unwrap();
        authenticate(&keys(), &request(slots, query), now).map(|principal| principal.key.to_string())
    }

    #[test]
    fn every_slot_is_tried() {
        let bearer = format!("Bearer {SECRET}");
        for (name, value) in [
            ("x-api-key", SECRET),
            ("api-key", SECRET),
            ("x-goog-api-key", SECRET),
            ("authorization", &bearer),
            ("authorization", &format!("bearer {SECRET}")),
            ("authorization", &format!("BEARER   {SECRET} ")),
            ("authorization", SECRET),
            ("x-api-key", &bearer),
        ] {
            assert_eq!(attempt(&[(name, value)], None).as_deref(), Ok("alice"), "{name}: {value}");
        }
        for query in [
            format!("alt=sse&key={SECRET}"),
            format!("key={}", SECRET.replace('-', "%2D")),
            format!("api-version=1&api-key={SECRET}"),
            format!("Authorization=Bearer%20{SECRET}"),
            format!("authorization=bearer+{SECRET}"),
        ] {
            assert_eq!(attempt(&[], Some(&query)).as_deref(), Ok("alice"), "{query}");
        }
    }

    #[test]
    fn a_subprotocol_can_hold_a_key() {
        let slot = "sec-websocket-protocol";
        let item = format!("openai-insecure-api-key.{SECRET}");
        for value in [item.clone(), format!("realtime, {item},openai-project.x"), format!("a,{item}")] {
            assert_eq!(attempt(&[(slot, &value)], None).as_deref(), Ok("alice"), "{value}");
        }
        assert!(attempt(&[(slot, "realtime"), (slot, &item)], None).is_ok(), "two lines of the header");
        assert_eq!(attempt(&[(slot, SECRET)], None), Err(Unauthorized::Missing), "a name is no key");
        let wrong = "openai-insecure-api-key.sk-tg-alice-wrong";
        assert_eq!(attempt(&[(slot, wrong)], None), Err(Unauthorized::Invalid));
    }

    #[test]
    fn one_valid_slot_among_invalid_ones_is_enough() {
        let names = ["x-api-key", "authorization", "api-key", "x-goog-api-key"];
        for valid in names {
            for invalid in names.into_iter().filter(|name| *name != valid) {
                assert!(
                    attempt(&[(invalid, "nonsense"), (valid, SECRET)], None).is_ok(),
                    "{valid} beside {invalid}"
                );
            }
            assert!(attempt(&[(valid, SECRET)], Some("key=nonsense")).is_ok());
        }
        assert!(
            attempt(&[("x-api-key", "nonsense"), ("x-api-key", SECRET)], None).is_ok(),
            "two lines of one header"
        );
        assert!(attempt(&[("x-api-key", "nonsense")], Some(&format!("key={SECRET}"))).is_ok());
    }

    #[test]
    fn nothing_valid_is_no_entry() {
        assert_eq!(attempt(&[], None), Err(Unauthorized::Missing));
        assert_eq!(attempt(&[], Some("keys=a&monkey=b&key2=c")), Err(Unauthorized::Missing));
        for value in [
            "",
            "Bearer",
            "Bearer ",
            "Basic YWxpY2U6eA==",
            "sk-tg-alice-wrong",
            &SECRET[1..],
            &SECRET.to_uppercase(),
        ] {
            assert_eq!(attempt(&[("authorization", value)], None), Err(Unauthorized::Invalid), "{value:?}");
        }
        let expired = authenticate(
            &keys(),
            &request(&[("x-api-key", SECRET)], None),
            "2027-06-01T00:00:00Z".parse().unwrap(),
        );
        assert_eq!(expired.err(), Some(Unauthorized::Invalid));
    }

    #[test]
    fn our_keys_are_recognised_with_and_without_a_scheme() {
        let keys = keys();
        for value in [SECRET, "Bearer sk-tg-alice-0123456789", "sk-tg-somebody-else", "bearer sk-tg-mistyped"]
        {
            assert!(holds_our_key(&keys, value), "{value}");
        }
        for value in ["sk-proj-abc", "Bearer sk-ant-abc", "", "Basic x"] {
            assert!(!holds_our_key(&keys, value), "{value}");
        }
    }
}
