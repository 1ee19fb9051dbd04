//! Where the requests of an upstream go.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use hyper::{
    HeaderMap, Uri,
    header::{HOST, HeaderValue},
    http::{
        request::Parts,
        uri::{PathAndQuery, Scheme},
    },
};

use super::{
    connect::Origin,
    state::{EndpointState, EndpointStates},
};
use crate::{
    config::{self, Credential, HeaderRules, Retry},
    dialect::Dialect,
    path,
    tls::TlsError,
};

/// Node's clients read heads up to 16 KiB. This leaves room for what Tollgate adds.
const READ_BY_ALL_CLIENTS: usize = 15 * 1024;

/// One upstream, as routes name it.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// The name in logs and metrics.
    pub name: Arc<str>,
    /// The dialect, where it does not depend on the path.
    pub dialect: Option<Dialect>,
    /// What is told to it and hidden of its answers.
    pub header_rules: HeaderRules,
    /// After so much silence its event streams are kept alive, where that is wanted.
    pub keepalive: Option<Duration>,
    /// Whether a client may switch to WebSocket there.
    pub websocket: bool,
    /// Where its requests can go; at least one.
    pub(super) endpoints: Vec<Endpoint>,
    /// What is tried again.
    pub(super) retry: Option<Retry>,
    /// What is tried when nothing is left to try here. Its header rules are the same.
    pub(super) fallback: Option<Arc<Self>>,
    /// How long a request may take, wherever it is tried.
    pub(super) total_timeout: Option<Duration>,
}

/// How long an upstream may be silent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    pub(super) first_byte: Duration,
    pub(super) idle: Duration,
    pub(super) websocket_idle: Duration,
}

/// One place that serves an upstream's requests.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    /// Tells its connections from those of every other endpoint, a changed one of the same name included.
    pub(super) id: u64,
    /// Tells it from others by its name, on every replica and after a reload.
    pub(super) mark: u32,
    /// Scheme, host and port, the last one explicit.
    place: Option<(Scheme, String, u16)>,
    pub(super) weight: NonZeroU32,
    pub(super) timeouts: Timeouts,
    pub(super) state: Arc<EndpointState>,
    /// Whether a head was warned about.
    warned: Arc<AtomicBool>,
    /// What `Host` says.
    host: HeaderValue,
    /// Goes before every path; empty, or `/…` without a slash at its end.
    base_path: String,
    /// Set in place of the client's.
    credential: Option<Credential>,
    pub(super) origin: Origin,
}

impl Upstream {
    /// A configured upstream. Reads the certificates that it is trusted by.
    pub fn new(
        configured: &config::Upstream,
        fallback: Option<Arc<Self>>,
        states: &EndpointStates,
    ) -> Result<Self, TlsError> {
        let has_others = configured.endpoints.len() > 1 || fallback.is_some() || configured.stands_in;
        let timeouts = Timeouts {
            first_byte: configured.first_byte_timeout,
            idle: configured.idle_timeout,
            websocket_idle: configured.websocket_idle_timeout,
        };
        let endpoint = |endpoint: &config::Endpoint| {
            let state = states.of(&configured.name, endpoint, has_others);
            Endpoint::new(endpoint, &configured.connection, timeouts, state).map_err(|source| {
                TlsError::Upstream { name: configured.name.clone(), source: Box::new(source) }
            })
        };
        Ok(Self {
            name: configured.name.clone(),
            dialect: configured.dialect,
            header_rules: configured.header_rules.clone(),
            keepalive: configured.keepalive,
            websocket: configured.websocket,
            endpoints: configured.endpoints.iter().map(endpoint).collect::<Result<_, _>>()?,
            retry: configured.retry.clone(),
            fallback,
            total_timeout: configured.total_timeout,
        })
    }

    /// How many attempts are made at its endpoints.
    pub(super) fn attempts(&self) -> u32 {
        self.retry.as_ref().map_or(1, |retry| retry.attempts.get())
    }

    /// Whether Tollgate shows a credential of its own there, so that the client's must not pass. If so, at all of its
    /// endpoints, and at those of its fallback.
    pub fn has_credential(&self) -> bool {
        self.endpoints.iter().any(|endpoint| endpoint.credential.is_some())
    }

    /// The path and query by which a URL of this upstream's is asked for here; nothing for a URL of another origin.
    pub fn own(&self, url: &Uri) -> Option<String> {
        let of_fallback = || self.fallback.as_ref()?.own(url);
        self.endpoints.iter().find_map(|endpoint| endpoint.own(url)).or_else(of_fallback)
    }

    /// An upstream that nobody connects to.
    #[cfg(test)]
    pub(crate) fn for_test(name: &str, credential: Option<Credential>) -> Self {
        let upstream =
            for_test::upstream(name, vec![for_test::endpoint("http://up.example:8080", credential)]);
        Self::new(&upstream, None, &for_test::states()).expect("plain HTTP needs no certificates")
    }

    /// An upstream of several endpoints that nobody connects to.
    #[cfg(test)]
    pub(super) fn of_many_for_test(endpoints: usize, fallback: Option<Arc<Self>>) -> Self {
        let endpoint = |n: usize| config::Endpoint {
            name: n.to_string().into(),
            ..for_test::endpoint("http://up.example", None)
        };
        let endpoints = (0..endpoints).map(endpoint).collect();
        let mut upstream = for_test::upstream("up", endpoints);
        upstream.stands_in = true;
        upstream.retry = (upstream.endpoints.len() > 1 || fallback.is_some()).then(Retry::default);
        Self::new(&upstream, fallback, &for_test::states()).expect("plain HTTP needs no certificates")
    }
}

impl Endpoint {
    fn new(
        endpoint: &config::Endpoint,
        connection: &config::Connection,
        timeouts: Timeouts,
        state: Arc<EndpointState>,
    ) -> Result<Self, TlsError> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let url = &endpoint.url;
        let authority = url.authority().map_or("", |authority| authority.as_str());
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            mark: mark(state.label()),
            weight: endpoint.weight,
            timeouts,
            state,
            warned: Arc::default(),
            place: place(url),
            host: HeaderValue::from_str(authority).expect("an authority is visible ASCII"),
            base_path: url.path().trim_end_matches('/').to_owned(),
            credential: endpoint.credential.clone(),
            origin: Origin::new(url, connection)?,
        })
    }

    /// Warns of an answer whose head some clients do not read; once, for the next ones will be no smaller.
    pub(super) fn watch_head(&self, headers: &HeaderMap) {
        let bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
        if bytes > READ_BY_ALL_CLIENTS && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                upstream = %self.state.upstream(),
                bytes,
                "the head of an answer is so large that clients on Node refuse it; `hide` leaves fields out"
            );
        }
    }

    /// The reverse of [`Endpoint::address`].
    fn own(&self, url: &Uri) -> Option<String> {
        let target = url.path_and_query().filter(|_| place(url) == self.place)?.as_str();
        let rest = target.strip_prefix(&self.base_path).filter(|rest| rest.starts_with('/'));
        Some(rest.unwrap_or(target).to_owned())
    }

    /// Makes a head, which is ready but for where it goes, one for this endpoint: host, base path, credential.
    pub(super) fn address(&self, head: &mut Parts) {
        if let Some(uri) = join(&self.base_path, &head.uri) {
            head.uri = uri;
        }
        head.headers.insert(HOST, self.host.clone());
        if let Some(credential) = &self.credential {
            head.headers.insert(credential.header.clone(), credential.value.clone());
        }
    }
}

/// FNV-1a, which every build of every replica computes alike (<http://www.isthe.com/chongo/tech/comp/fnv/>).
fn mark(label: &str) -> u32 {
    label.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

/// Where a URL leads, written in one way. Only URLs of the web lead anywhere.
fn place(url: &Uri) -> Option<(Scheme, String, u16)> {
    let scheme = url.scheme()?;
    let well_known = if *scheme == Scheme::HTTPS { 443 } else { 80 };
    Some((scheme.clone(), url.host()?.to_ascii_lowercase(), url.port_u16().unwrap_or(well_known)))
}

/// The target with the base path in front, unless it begins with it already: `/v1` and `/v1/models` are never
/// `/v1/v1/models`. A version at the end of the base path stands for the `/v1` at the start of the target, as
/// `/paas/v4` and `/v1/models` are `/paas/v4/models`. Nothing, if it stays as it is.
fn join(base: &str, uri: &Uri) -> Option<Uri> {
    if path::below(uri.path(), base).is_some() {
        return None;
    }
    let mut target = uri.path_and_query().map_or("/", PathAndQuery::as_str);
    if path::ends_in_version(base) && path::below(uri.path(), "/v1").is_some() {
        target = &target["/v1".len()..];
    }
    let whole = PathAndQuery::try_from(format!("{base}{target}"));
    Some(Uri::from(whole.expect("parts of valid URIs make a valid URI")))
}

/// Parts of a configuration.
#[cfg(test)]
mod for_test {
    use super::*;
    use crate::{
        media::{SizeBounds, UNBOUNDED},
        metrics::Metrics,
    };

    pub(super) fn states() -> EndpointStates {
        EndpointStates::new(Arc::new(Metrics::new(false, &Default::default())))
    }

    pub(super) fn endpoint(url: &'static str, credential: Option<Credential>) -> config::Endpoint {
        config::Endpoint {
            name: "one".into(),
            url: Uri::from_static(url),
            credential,
            weight: NonZeroU32::MIN,
        }
    }

    pub(super) fn upstream(name: &str, endpoints: Vec<config::Endpoint>) -> config::Upstream {
        let minute = Duration::from_secs(60);
        config::Upstream {
            name: name.into(),
            paths: Vec::new(),
            strip_prefix: None,
            matches: config::Match::default(),
            body_sizes: SizeBounds { text: UNBOUNDED, file: UNBOUNDED },
            dialect: None,
            endpoints,
            header_rules: HeaderRules::default(),
            retry: None,
            fallback: None,
            stands_in: false,
            connection: config::Connection::default(),
            first_byte_timeout: minute,
            idle_timeout: minute,
            total_timeout: None,
            keepalive: None,
            websocket: true,
            websocket_idle_timeout: minute,
        }
    }
}

#[cfg(test)]
mod tests {
    use hyper::{Request, header::HeaderName};

    use super::*;

    fn sent(url: &'static str, uri: &str) -> Parts {
        let credential = Credential {
            header: HeaderName::from_static("x-api-key"),
            value: HeaderValue::from_static("theirs"),
        };
        let upstream = for_test::upstream("up", vec![for_test::endpoint(url, Some(credential))]);
        let upstream = Upstream::new(&upstream, None, &for_test::states()).unwrap();
        let mut head = Request::get(uri).header("host", "localhost:8443").body(()).unwrap().into_parts().0;
        upstream.endpoints[0].address(&mut head);
        head
    }

    #[test]
    fn a_base_path_is_put_in_front_once() {
        for (url, uri, expected) in [
            ("http://up/v1", "/v1/models", "/v1/models"),
            ("http://up/v1", "/models", "/v1/models"),
            ("http://up/openai/v1/", "/v1/models?a=b", "/openai/v1/models?a=b"),
            ("http://up/openai/v1", "/v1?a=b", "/openai/v1?a=b"),
            ("http://up/api/paas/v4", "/v1/chat/completions", "/api/paas/v4/chat/completions"),
            ("http://up/paas/v4", "/v4/models", "/paas/v4/v4/models"),
            ("http://up/v1beta", "/v1beta/models/g:x%2Fy", "/v1beta/models/g:x%2Fy"),
            ("http://up/api", "/v1/models", "/api/v1/models"),
            ("http://up/v1", "/v10/x%2Fy:z?", "/v1/v10/x%2Fy:z?"),
            ("http://up/", "/x?y", "/x?y"),
        ] {
            assert_eq!(sent(url, uri).uri.to_string(), expected, "{url} and {uri}");
        }
    }

    #[test]
    fn urls_of_its_own_origin_are_known_without_their_base_path() {
        let own = |base: &'static str, url: &'static str| {
            let upstream = for_test::upstream("up", vec![for_test::endpoint(base, None)]);
            Upstream::new(&upstream, None, &for_test::states()).unwrap().own(&Uri::from_static(url))
        };
        for (base, url, expected) in [
            ("http://up", "http://up/upload/x?upload_id=1", Some("/upload/x?upload_id=1")),
            ("http://up", "http://UP:80/upload/x", Some("/upload/x")),
            ("http://up:8080/base", "http://up:8080/base/upload/x?y", Some("/upload/x?y")),
            ("http://up:8080/base", "http://up:8080/based/upload", Some("/based/upload")),
            ("http://up", "https://up/upload/x", None),
            ("http://up", "http://up:81/upload/x", None),
            ("http://up", "http://up.example/upload/x", None),
            ("http://up", "/upload/x", None),
        ] {
            assert_eq!(own(base, url).as_deref(), expected, "{base} and {url}");
        }
    }

    #[test]
    fn host_and_credential_are_the_endpoints() {
        assert_eq!(sent("http://up.example:8080/v1", "/x").headers["host"], "up.example:8080");
        assert_eq!(sent("http://up", "/x").headers["x-api-key"], "theirs");
        assert_eq!(sent("http://[::1]:80", "/x").headers.get_all("host").iter().count(), 1);
    }
}
