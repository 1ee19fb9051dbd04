//! The head of a request as the upstream gets it, and the head of an answer as the client may. Pure.
//!
//! What a client sent goes through byte for byte, but for what belongs to the one connection, its credential and the
//! host. Which headers an SDK will invent next nobody knows, so there is a list of what is removed and none of what may pass.

use std::net::IpAddr;

use hyper::{
    HeaderMap, Method, Uri, Version,
    header::{self, HeaderValue},
    http::{request::Parts, uri::PathAndQuery},
};

use crate::{
    auth,
    headers::{
        self, CREDENTIAL_SLOTS, Downstream, X_REQUEST_ID, append_via, items, keep_streaming,
        remove_claims_of_upstream, remove_hop_by_hop, set_forwarded,
    },
    keys::KeyStore,
    route::Route,
    upstream::Upstream,
};

/// Makes the head for the upstream of `route` out of the client's, but for what depends on the endpoint that gets it.
/// `body_is_empty`: nothing follows it.
pub fn outgoing(
    head: &mut Parts,
    route: &Route,
    keys: &KeyStore,
    request_id: &HeaderValue,
    client: IpAddr,
    body_is_empty: bool,
) {
    let rules = &route.upstream.header_rules;
    let downstream = rules.tell_upstream().then(|| downstream(head, client));
    head.uri = outgoing_uri(&route.path, head.uri.query(), keys);
    head.version = Version::HTTP_11;
    let headers = &mut head.headers;
    remove_hop_by_hop(headers);
    // hyper writes both anew from the body that it really sends.
    headers.remove(header::CONTENT_LENGTH);
    headers.remove(header::EXPECT);
    // The trailers of an upload stay behind.
    headers.remove(header::TRAILER);
    if body_is_empty && [Method::POST, Method::PUT, Method::PATCH].contains(&head.method) {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from_static("0"));
    }
    join_cookies(headers);
    remove_credentials(headers, &route.upstream, keys);
    headers.insert(X_REQUEST_ID, request_id.clone());
    // After what `Connection` names is gone, so that no client has any of it removed.
    if let Some(downstream) = downstream {
        if rules.forwarded {
            set_forwarded(headers, &downstream);
        }
        if rules.via {
            append_via(headers, downstream.version);
        }
    }
}

fn downstream(head: &Parts, client: IpAddr) -> Downstream {
    let host = Some(headers::host(head)).filter(|host| !host.is_empty());
    Downstream { client, host: host.and_then(|host| host.parse().ok()), version: head.version }
}

/// Makes the head of an upstream's answer the client's, but for what Tollgate itself says in it, which comes later and
/// so is never hidden.
pub fn incoming(headers: &mut HeaderMap, upstream: &Upstream) {
    remove_hop_by_hop(headers);
    remove_claims_of_upstream(headers);
    upstream.header_rules.hide.remove_from(headers);
    keep_streaming(headers);
    if upstream.header_rules.via {
        append_via(headers, Version::HTTP_11);
    }
}

/// HTTP/2 splits cookies over several fields, which HTTP/1.1 does not know (RFC 9113 §8.2.3).
fn join_cookies(headers: &mut HeaderMap) {
    let crumbs: Vec<_> = headers.get_all(header::COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if crumbs.len() > 1 {
        let joined = HeaderValue::from_bytes(&crumbs.join(&b"; "[..]));
        headers.insert(header::COOKIE, joined.expect("parts of valid values make a valid value"));
    }
}

/// The route's path, and the query without our keys.
fn outgoing_uri(path: &str, query: Option<&str>, keys: &KeyStore) -> Uri {
    let left = query.map(|query| (query, without_our_keys(query, keys)));
    let whole = match left {
        // Where our key was all of it, the question mark goes too.
        Some((query, left)) if query.is_empty() || !left.is_empty() => {
            PathAndQuery::try_from(format!("{path}?{left}"))
        }
        _ => PathAndQuery::try_from(path),
    };
    Uri::from(whole.expect("parts of a valid URI make a valid URI"))
}

fn without_our_keys(query: &str, keys: &KeyStore) -> String {
    let holds_our_key = |pair: &str| {
        let mut parameters = auth::query_parameters(Some(pair));
        parameters.any(|parameter| auth::parameter_holds_our_key(keys, parameter))
    };
    query.split('&').filter(|pair| !holds_our_key(pair)).collect::<Vec<_>>().join("&")
}

/// Takes the client's credentials out. Where the upstream has none configured, what is no key of ours passes: clients
/// then bring their own upstream key beside ours.
fn remove_credentials(headers: &mut HeaderMap, upstream: &Upstream, keys: &KeyStore) {
    for slot in &CREDENTIAL_SLOTS {
        let is_ours =
            |value: &HeaderValue| value.to_str().is_ok_and(|value| auth::holds_our_key(keys, value));
        if upstream.has_credential() || headers.get_all(slot).iter().any(is_ours) {
            headers.remove(slot);
        }
    }
    if headers.contains_key(header::SEC_WEBSOCKET_PROTOCOL) {
        remove_credential_subprotocols(headers, upstream, keys);
    }
}

/// The other subprotocols stay in their order, in one field.
fn remove_credential_subprotocols(headers: &mut HeaderMap, upstream: &Upstream, keys: &KeyStore) {
    let passes = |item: &&str| {
        auth::in_subprotocol(item)
            .is_none_or(|key| !upstream.has_credential() && !auth::holds_our_key(keys, key))
    };
    let offered = items(headers, &header::SEC_WEBSOCKET_PROTOCOL);
    let left = offered.filter(passes).collect::<Vec<_>>().join(", ");
    headers.remove(header::SEC_WEBSOCKET_PROTOCOL);
    if !left.is_empty() {
        let left = HeaderValue::try_from(left).expect("parts of a valid value make a valid value");
        headers.insert(header::SEC_WEBSOCKET_PROTOCOL, left);
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;
    use crate::config::Credential;

    const CLIENT: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
    const OURS: &str = "sk-tg-alice-0123456789";

    fn sent(upstream: Upstream, uri: &str, slots: &[(&'static str, &str)]) -> Parts {
        let mut request = Request::post(uri).header("host", "localhost:8443").header("content-length", "007");
        for (name, value) in slots {
            request = request.header(*name, *value);
        }
        let mut head = request.body(()).unwrap().into_parts().0;
        let route = Route::for_test(upstream, head.uri.path());
        outgoing(&mut head, &route, &KeyStore::default(), &HeaderValue::from_static("r1"), CLIENT, false);
        head
    }

    /// An upstream with a credential of its own, or without.
    fn upstream(credential: Option<&'static str>) -> Upstream {
        let credential = credential.map(|value| Credential {
            header: header::HeaderName::from_static("x-api-key"),
            value: HeaderValue::from_static(value),
        });
        Upstream::for_test("up", credential)
    }

    #[test]
    fn path_and_query_keep_their_bytes() {
        for uri in [
            "/v1/models/a%2Fb:go?x=1&y=%20z&empty=&flag",
            "/v1/messages?beta=true",
            "/v1/a;b=c?alt=sse",
            "/v1/x?",
            "/v1/",
        ] {
            assert_eq!(sent(upstream(None), uri, &[]).uri.to_string(), uri);
        }
    }

    #[test]
    fn our_keys_leave_every_slot() {
        let bearer = format!("Bearer {OURS}");
        let slots =
            [("authorization", &*bearer), ("x-api-key", OURS), ("api-key", OURS), ("x-goog-api-key", OURS)];
        let uri = format!("/v1/x?a=1&key={OURS}&b=2");
        let head = sent(upstream(Some("upstream-secret")), &uri, &slots);
        assert_eq!(head.uri.to_string(), "/v1/x?a=1&b=2");
        let shown = format!("{:?} {}", head.headers, head.uri);
        assert!(!shown.contains("sk-tg"), "{shown}");
        let encoded = sent(upstream(None), &format!("/v1/x?key={}", OURS.replace('-', "%2d")), &[]);
        assert_eq!(encoded.uri.to_string(), "/v1/x");
        let azure = format!("/openai/realtime?api-version=1&api-key={OURS}&Authorization=Bearer%20{OURS}&x");
        assert_eq!(sent(upstream(None), &azure, &[]).uri.to_string(), "/openai/realtime?api-version=1&x");
    }

    #[test]
    fn subprotocols_keep_their_order_and_lose_their_key() {
        let passed = |offered: &str, credential: Option<&'static str>| {
            let head = sent(upstream(credential), "/v1/realtime", &[("sec-websocket-protocol", offered)]);
            let left = head.headers.get_all("sec-websocket-protocol").iter().collect::<Vec<_>>();
            left.iter().map(|value| value.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let ours = format!("openai-insecure-api-key.{OURS}");
        let theirs = "openai-insecure-api-key.sk-proj-x";
        assert_eq!(
            passed(&format!("realtime, {ours},openai-project.p"), None),
            ["realtime, openai-project.p"]
        );
        assert_eq!(passed(&ours, None), [] as [&str; 0]);
        assert_eq!(passed(&format!("b,{theirs}, a"), None), [format!("b, {theirs}, a")]);
        assert_eq!(passed(&format!("b,{theirs}, a"), Some("upstream-secret")), ["b, a"]);
    }

    #[test]
    fn a_clients_own_upstream_key_passes_only_where_none_is_configured() {
        let slots = [("authorization", "Bearer sk-their-own"), ("x-api-key", OURS)];
        let passed = sent(upstream(None), "/v1/x?key=theirs", &slots);
        assert_eq!(passed.headers.get("authorization").unwrap(), "Bearer sk-their-own");
        assert_eq!(passed.uri.query(), Some("key=theirs"));
        assert!(!passed.headers.contains_key("x-api-key"));
        let replaced = sent(upstream(Some("ours")), "/v1/x", &slots);
        assert!(!replaced.headers.contains_key("authorization"));
    }

    #[test]
    fn split_cookies_become_one() {
        let request = Request::get("/").header("cookie", "a=1").header("cookie", "b=2; c=3").body(());
        let mut headers = request.unwrap().into_parts().0.headers;
        join_cookies(&mut headers);
        let cookies: Vec<_> = headers.get_all("cookie").iter().collect();
        assert_eq!(cookies, ["a=1; b=2; c=3"]);
    }

    #[test]
    fn the_clients_framing_stays_behind() {
        let slots = [
            ("connection", "x-secret, host, x-request-id, content-length"),
            ("x-secret", "1"),
            ("transfer-encoding", "chunked"),
            ("expect", "100-continue"),
        ];
        let head = sent(upstream(None), "/v1/x", &slots);
        let mut left: Vec<_> =
            head.headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        left.sort_unstable();
        assert_eq!(left, [("host", "localhost:8443"), ("x-request-id", "r1")]);
    }
}
