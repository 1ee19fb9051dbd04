//! SIGHUP: reads the configuration again and publishes what can change while streams run.
//!
//! Keys, tiers, upstreams and certificates are swapped as a whole, or, where anything is wrong, not at all. Requests
//! that have begun go on under the policy that they began with.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;

use crate::{
    config::{Config, Limiter, Server, problems::Problems},
    policy::Policy,
    proxy::Shared,
    tls::{self, TlsError},
};

/// What new connections speak TLS with.
pub type SharedTls = Arc<ArcSwap<ServerConfig>>;

/// Why the old configuration stays in force.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    /// The file.
    #[error(transparent)]
    Config(#[from] Problems),
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Publishes `new`. Returns the sections that differ from `running` and take effect only at the next start.
pub fn publish(
    running: &Config,
    new: &Config,
    shared: &Shared,
    tls: &SharedTls,
) -> Result<Vec<&'static str>, ReloadError> {
    let policy = Policy::compile(new, &shared.endpoints)?;
    let (certificate, _) = tls::server_config(&new.server.tls)?;
    shared.policy.store(Arc::new(policy));
    tls.store(certificate);
    Ok(waiting_for_a_start(running, new))
}

fn waiting_for_a_start(running: &Config, new: &Config) -> Vec<&'static str> {
    // The certificate is read from wherever it is now, so its move is no difference, and sizes are the upstreams'.
    let Server { tls, body_sizes, .. } = new.server.clone();
    let server = Server { tls, body_sizes, ..running.server.clone() };
    // What is counted is a matter of the policy.
    let limiter = Limiter { uncounted: new.limiter.uncounted.clone(), ..running.limiter.clone() };
    let sections = [
        ("[server]", server != new.server),
        ("[admin]", running.admin != new.admin),
        ("[log]", running.log != new.log),
        ("[limiter]", limiter != new.limiter),
    ];
    sections.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
}
