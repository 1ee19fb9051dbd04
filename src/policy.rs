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
    upstream::{EndpointStates, Target},
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
        let mut targets = vec![None; config.upstreams.len()];
        for (index, upstream) in config.upstreams.iter().enumerate() {
            let target = compile_target(&config.upstreams, index, &mut targets, endpoints)?;
            let rules = upstream.paths.iter().map(|prefix| compile_rules(upstream, prefix, &target));
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
fn compile_rules(upstream: &config::Upstream, prefix: &str, target: &Arc<Target>) -> Vec<Rule> {
    let rule = |(host, model): (Option<&Pattern>, Option<&Pattern>)| Rule {
        prefix: prefix.to_owned(),
        strip: upstream.strip_prefix.as_deref().unwrap_or_default().into(),
        host: host.cloned(),
        model: model.cloned(),
        target: target.clone(),
        sizes: upstream.body_sizes,
    };
    upstream.matches.each().map(rule).collect()
}

/// The upstream's target, made after that of its fallback, which is shared by all that fall back on it. The configuration
/// has no circles of them.
fn compile_target(
    upstreams: &[config::Upstream],
    index: usize,
    made: &mut [Option<Arc<Target>>],
    endpoints: &EndpointStates,
) -> Result<Arc<Target>, TlsError> {
    if let Some(target) = &made[index] {
        return Ok(target.clone());
    }
    let upstream = &upstreams[index];
    let fallback =
        upstream.fallback.map(|index| compile_target(upstreams, index, made, endpoints)).transpose()?;
    let target = Arc::new(Target::new(upstream, fallback, endpoints)?);
    made[index] = Some(target.clone());
    Ok(target)
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
