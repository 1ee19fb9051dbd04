//! Uploads in several requests: an upstream answers the first with a URL of its own, to which clients send the rest. Pure.
//!
//! Google's SDKs follow `x-goog-upload-url`, and others the `Location` of a resumable upload, without their key. So the URL
//! is given Tollgate's origin, and a parameter that stands for the key there: `tollgate-upload=EXPIRES.SEAL.MARK.ID`. The
//! mark is that of the endpoint that knows the session. The seal is HMAC-SHA256 over path, query, mark and expiry, under
//! what is stored of the key. It opens this one URL, on every
//! replica, until it expires or the key goes. Who can read the stored hashes can make such URLs, and nothing else.

use hyper::{
    HeaderMap, Method, Uri,
    header::{HeaderValue, LOCATION},
    http::request::Parts,
};
use jiff::Timestamp;

use crate::{
    headers::{self, UPLOAD_URL},
    keys::{Key, KeyStore},
};

/// The parameter that stands for the key.
pub const PARAMETER: &str = "tollgate-upload";

/// Google forgets a session after some days, and nobody uploads one file for longer than this.
const LIFETIME_SECONDS: i64 = 24 * 3600;

/// Tollgate's own origin as the client of an upload knows it, such as `https://llm.example.com`; nothing for every other
/// request. `configured` goes before what the client says.
pub fn origin(request: &Parts, configured: Option<&str>) -> Option<String> {
    if !is_upload(request.uri.path()) {
        return None;
    }
    let said = || Some(headers::host(request)).filter(|host| !host.is_empty());
    configured.map(str::to_owned).or_else(|| Some(format!("https://{}", said()?)))
}

/// Leads a client that follows the URL of a new session back here. `own`: the path and query by which a URL of the
/// upstream's is reached here; nothing for a URL that leads elsewhere, which stays as it is. `mark`: of the endpoint that
/// answers.
pub fn lead_back(
    answer: &mut HeaderMap,
    origin: &str,
    own: impl Fn(&Uri) -> Option<String>,
    mark: u32,
    key: &Key,
    now: Timestamp,
) {
    for field in [UPLOAD_URL, LOCATION] {
        let url = answer.get(&field).and_then(|url| url.to_str().ok()?.parse::<Uri>().ok());
        let Some(url) = url.filter(names_a_session) else { continue };
        let Some(target) = own(&url) else { continue };
        if let Ok(url) = HeaderValue::try_from(format!("{origin}{}", sealed(&target, mark, key, now))) {
            answer.insert(field, url);
        }
    }
}

/// The key that a sealed URL stands for, and the mark in it, if this request is one that the seal opens.
pub fn opened<'a>(keys: &'a KeyStore, request: &Parts, now: Timestamp) -> Option<(&'a Key, u32)> {
    let (target, seal) = request.uri.path_and_query()?.as_str().split_once(PARAMETER)?;
    let target = target.strip_suffix(['&', '?'])?;
    let mut parts = seal.strip_prefix('=')?.splitn(4, '.');
    let (expires, seal, mark, id) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let key = keys.named(id, now)?;
    let is_sealed = key.hash.seals(&text(target, mark, expires), seal);
    let is_fresh = now.as_second() < expires.parse().ok()?;
    let is_upload = matches!(request.method, Method::POST | Method::PUT);
    let mark = u32::from_str_radix(mark, 16).ok()?;
    (is_sealed && is_fresh && is_upload).then_some((key, mark))
}

fn is_upload(path: &str) -> bool {
    path.contains("/upload/")
}

/// Only such a URL is sealed: anything else could be used for more than the rest of an upload.
fn names_a_session(url: &Uri) -> bool {
    is_upload(url.path()) && url.query().is_some_and(|query| query.contains("upload_id="))
}

/// `target` is a path with a query, for it names a session.
fn sealed(target: &str, mark: u32, key: &Key, now: Timestamp) -> String {
    let expires = (now.as_second() + LIFETIME_SECONDS).to_string();
    let mark = format!("{mark:x}");
    let seal = key.hash.seal(&text(target, &mark, &expires));
    format!("{target}&{PARAMETER}={expires}.{seal}.{mark}.{}", key.id)
}

/// What is sealed. No line break stands in a target, so no two of them make one text.
fn text(target: &str, mark: &str, expires: &str) -> String {
    format!("{PARAMETER}\n{expires}\n{mark}\n{target}")
}

#[cfg(test)]
mod tests {
    use hyper::{Request, header::HOST};

    use super::*;
    use crate::keys::{ApiKey, TierIndex};

    const TARGET: &str = "/upload/v1beta/files?upload_id=x-1_2&upload_protocol=resumable";

    fn key(id: &str) -> Key {
        Key {
            id: id.parse().unwrap(),
            hash: ApiKey::new(id).unwrap().hash(),
            tier: TierIndex(0),
            expires: None,
            disabled: false,
        }
    }

    fn at(time: &str) -> Timestamp {
        time.parse().unwrap()
    }

    fn request(method: &str, target: &str) -> Parts {
        Request::builder().method(method).uri(target).body(()).unwrap().into_parts().0
    }

    /// Who a request is let in as, if the key `a.b` and another are configured.
    fn opener(method: &str, target: &str, now: &str) -> Option<String> {
        let keys: KeyStore = [key("a.b"), key("other")].into_iter().collect();
        opened(&keys, &request(method, target), at(now)).map(|(key, mark)| format!("{} at {mark:x}", key.id))
    }

    #[test]
    fn a_seal_opens_its_url_for_its_time() {
        let url = sealed(TARGET, 0xc0ffee, &key("a.b"), at("2026-11-30T00:00:00Z"));
        for (method, now, opens) in [
            ("POST", "2026-11-30T00:00:01Z", true),
            ("PUT", "2026-11-30T23:59:59Z", true),
            ("POST", "2026-12-01T00:00:00Z", false),
            ("GET", "2026-11-30T00:00:01Z", false),
            ("DELETE", "2026-11-30T00:00:01Z", false),
        ] {
            let expected = opens.then(|| "a.b at c0ffee".to_owned());
            assert_eq!(opener(method, &url, now), expected, "{method} at {now}");
        }
    }

    #[test]
    fn a_seal_opens_nothing_else() {
        let url = sealed(TARGET, 0xc0ffee, &key("a.b"), at("2026-11-30T00:00:00Z"));
        let stranger = sealed(TARGET, 0xc0ffee, &key("stranger"), at("2026-11-30T00:00:00Z"));
        let (path_and_query, seal) = url.split_once("&tollgate").unwrap();
        for changed in [
            url.replace("v1beta/files", "v1beta/other"),
            url.replace("upload_id=x", "upload_id=y"),
            url.replace(".a.b", ".other"),
            url.replace(".c0ffee.", ".c0ffef."),
            url.replace(".c0ffee.", ".0c0ffee."),
            url.replace(".c0ffee.", "."),
            url.replace("upload=1", "upload=2"),
            format!("{url}&more=1"),
            format!("{url}0"),
            format!("{path_and_query}&x&tollgate{seal}"),
            url.replace("&tollgate-upload=", "tollgate-upload="),
            url[..url.len() - 8].to_owned(),
            stranger,
            format!("{TARGET}&tollgate-upload="),
            format!("{TARGET}&tollgate-upload=9999999999..c0ffee.a.b"),
            TARGET.to_owned(),
        ] {
            assert_eq!(opener("POST", &changed, "2026-11-30T00:00:01Z"), None, "{changed}");
        }
    }

    #[test]
    fn a_seal_dies_with_its_key() {
        let url = sealed(TARGET, 0xc0ffee, &key("a.b"), at("2026-11-30T00:00:00Z"));
        let now = at("2026-11-30T00:00:01Z");
        let disabled = Key { disabled: true, ..key("a.b") };
        let renewed = Key { hash: ApiKey::new("new secret").unwrap().hash(), ..key("a.b") };
        for gone in [disabled, renewed] {
            let keys: KeyStore = [gone].into_iter().collect();
            assert!(opened(&keys, &request("POST", &url), now).is_none());
        }
    }

    #[test]
    fn only_uploads_have_an_origin_to_come_back_to() {
        let with_host = |target: &str| {
            let mut request = request("POST", target);
            request.headers.insert(HOST, HeaderValue::from_static("llm.example:8443"));
            request
        };
        let upload = with_host("/upload/v1beta/files");
        assert_eq!(origin(&upload, None).as_deref(), Some("https://llm.example:8443"));
        assert_eq!(
            origin(&upload, Some("https://public.example")).as_deref(),
            Some("https://public.example")
        );
        assert_eq!(origin(&with_host("/v1beta/files"), Some("https://public.example")), None);
        let http2 = request("POST", "https://llm.example/upload/v1beta/files");
        assert_eq!(origin(&http2, None).as_deref(), Some("https://llm.example"));
    }

    #[test]
    fn urls_of_sessions_lead_back_and_no_others() {
        let led = |field: &'static str, url: &str| {
            let mut answer = HeaderMap::new();
            answer.insert(field, HeaderValue::from_str(url).unwrap());
            let own = |url: &Uri| {
                let target = url.path_and_query().map(ToString::to_string);
                target.filter(|_| url.host() == Some("up.example"))
            };
            lead_back(
                &mut answer,
                "https://llm.example",
                own,
                0xc0ffee,
                &key("a.b"),
                at("2026-11-30T00:00:00Z"),
            );
            answer[field].to_str().unwrap().to_owned()
        };
        for field in ["x-goog-upload-url", "location"] {
            let url = led(field, &format!("https://up.example{TARGET}"));
            let target = url.strip_prefix("https://llm.example").unwrap();
            assert_eq!(opener("POST", target, "2026-11-30T00:00:01Z").as_deref(), Some("a.b at c0ffee"));
            for other in [
                "https://elsewhere.example/upload/v1beta/files?upload_id=x",
                "https://up.example/v1/chat/completions?upload_id=x",
                "https://up.example/upload/v1beta/files",
                "https://up.example/v1/chat/completions?x=/upload/&upload_id=x",
                "/relative",
            ] {
                assert_eq!(led(field, other), other);
            }
        }
    }
}
