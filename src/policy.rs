//! The policy: keys, tiers and routes, compiled from the configuration into one immutable snapshot.

use std::sync::Arc;

use crate::{
    auth::Principal,
    config::{self, Config},
    cors::Cors,
    headers::PolicyField,
    keys::{Key, KeyStore, TierIndex},
    limit::Limit,
    pattern::Pattern,
    probe::Probes,
    route::{RouteTable, Rule},
    tls::TlsError,
    uncounted::Uncounted,
    upstream::{EndpointStates, Upstream},
};

/// What requests are judged by. A request loads it once, so that a change never splits one.
#[derive(Debug)]
pub struct Policy {
    /// All keys.
    pub keys: KeyStore,
    /// All routes.
    pub routes: RouteTable,
    /// Which web pages may call, where that is switched on.
    pub cors: Option<Cors>,
    /// What is a probe.
    pub probes: Probes,
    /// What uses up no limit.
    pub uncounted: Uncounted,
    tiers: Vec<Tier>,
}

/// The limits of a set of keys.
#[derive(Debug)]
pub struct Tier {
    /// The name, for logs and metrics.
    pub name: Arc<str>,
    /// All hold at once.
    pub limits: Vec<Limit>,
    /// What `RateLimit-Policy` says of them.
    pub field: PolicyField,
}

impl Policy {
    /// Compiles the configuration. Reads the certificates that upstreams are trusted by. What is known of endpoints that
    /// stay as they are stays known.
    pub fn compile(config: &Config, endpoints: &EndpointStates) -> Result<Self, TlsError> {
        let mut tiers: Vec<Tier> =
            config.tiers.iter().map(|tier| Tier::new(tier.name.clone(), tier.limits.clone())).collect();
        let keys = config.keys.iter().map(|key| compile_key(key, &mut tiers)).collect();
        let mut routes = Vec::new();
        let mut upstreams = vec![None; config.upstreams.len()];
        for (index, configured) in config.upstreams.iter().enumerate() {
            let upstream = compile_upstream(&config.upstreams, index, &mut upstreams, endpoints)?;
            let rules = configured.paths.iter().map(|prefix| compile_rules(configured, prefix, &upstream));
            routes.extend(rules.flatten());
        }
        let probes = Probes::beside(routes.iter().map(|rule: &Rule| &*rule.prefix));
        Ok(Self {
            keys,
            cors: config.cors.clone(),
            probes,
            uncounted: config.limiter.uncounted.clone(),
            routes: RouteTable::new(routes),
            tiers,
        })
    }

    /// The tier of an authenticated caller. Total, for a principal comes from this policy's own keys.
    pub fn tier(&self, principal: &Principal) -> &Tier {
        &self.tiers[principal.tier.0]
    }
}

impl Tier {
    fn new(name: Arc<str>, limits: Vec<Limit>) -> Self {
        Self { name, field: PolicyField::new(&limits), limits }
    }
}

/// One rule for each host and model that the upstream takes under this prefix.
fn compile_rules(configured: &config::Upstream, prefix: &str, upstream: &Arc<Upstream>) -> Vec<Rule> {
    let rule = |(host, model): (Option<&Pattern>, Option<&Pattern>)| Rule {
        prefix: prefix.to_owned(),
        strip: configured.strip_prefix.as_deref().unwrap_or_default().into(),
        host: host.cloned(),
        model: model.cloned(),
        upstream: upstream.clone(),
        sizes: configured.body_sizes,
    };
    configured.matches.each().map(rule).collect()
}

/// The upstream, made after its fallback, which is shared by all that fall back on it. The configuration has no circles
/// of them.
fn compile_upstream(
    configured: &[config::Upstream],
    index: usize,
    made: &mut [Option<Arc<Upstream>>],
    endpoints: &EndpointStates,
) -> Result<Arc<Upstream>, TlsError> {
    if let Some(upstream) = &made[index] {
        return Ok(upstream.clone());
    }
    let fallback = configured[index].fallback;
    let fallback = fallback.map(|index| compile_upstream(configured, index, made, endpoints)).transpose()?;
    let upstream = Arc::new(Upstream::new(&configured[index], fallback, endpoints)?);
    made[index] = Some(upstream.clone());
    Ok(upstream)
}

/// A key with limits of its own gets a tier of its own, under the name of the one that it overrides.
fn compile_key(key: &config::Key, tiers: &mut Vec<Tier>) -> Key {
    let tier = match &key.limits {
        None => key.tier,
        Some(limits) => {
            tiers.push(Tier::new(tiers[key.tier].name.clone(), limits.clone()));
            tiers.len() - 1
        }
    };
    Key {
        id: key.id.clone(),
        hash: key.hash,
        tier: TierIndex(tier),
        expires: key.expires,
        disabled: key.disabled,
    }
}
