//! Requests that only ask whether somebody is there. Pure.
//!
//! Load balancers, container runtimes and some clients ask so before they begin, and have no key. They are answered here:
//! without a key, the limiter or an upstream.

use hyper::Method;

/// What a probe is told.
pub const ANSWER: &str = r#"{"status":"ok"}"#;

/// The paths of all probes but `/`, which Ollama's client asks for and every base path ends in. Claude Code asks for
/// `/api/hello`.
const PATHS: [&str; 2] = ["/healthz", "/api/hello"];

/// Tells probes from requests.
#[derive(Clone, Debug)]
pub struct Probes {
    /// What is left of [`PATHS`].
    paths: Vec<&'static str>,
}

impl Probes {
    /// A path that a route names as its own is no probe's. One that it merely covers is, for a route `/` covers them all.
    pub fn beside<'a>(prefixes: impl Iterator<Item = &'a str> + Clone) -> Self {
        let is_free = |path: &&str| !prefixes.clone().any(|prefix| prefix == *path);
        Self { paths: PATHS.into_iter().filter(is_free).collect() }
    }

    /// Whether this is one. More slashes than one at the beginning come of base URLs that end in one.
    pub fn include(&self, method: &Method, path: &str) -> bool {
        let path = path.trim_start_matches('/');
        match *method {
            Method::HEAD if path.is_empty() => true,
            Method::HEAD | Method::GET => self.paths.iter().any(|probe| probe[1..] == *path),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_few_and_exact() {
        let probes = Probes::beside(["/", "/v1", "/api"].into_iter());
        for (method, path) in [
            (Method::HEAD, "/"),
            (Method::HEAD, "//"),
            (Method::GET, "/healthz"),
            (Method::HEAD, "/healthz"),
            (Method::GET, "/api/hello"),
            (Method::HEAD, "//api/hello"),
        ] {
            assert!(probes.include(&method, path), "{method} {path}");
        }
        for (method, path) in [
            (Method::GET, "/"),
            (Method::POST, "/api/hello"),
            (Method::GET, "/healthz/"),
            (Method::GET, "/healthz/../v1/models"),
            (Method::GET, "/Healthz"),
            (Method::GET, "/v1/healthz"),
            (Method::HEAD, "/v1/models"),
        ] {
            assert!(!probes.include(&method, path), "{method} {path}");
        }
    }

    #[test]
    fn a_route_can_have_a_probes_path() {
        let probes = Probes::beside(["/healthz", "/api/hello/x"].into_iter());
        assert!(!probes.include(&Method::GET, "/healthz"));
        assert!(probes.include(&Method::GET, "/api/hello"));
        assert!(probes.include(&Method::HEAD, "/"));
    }
}
