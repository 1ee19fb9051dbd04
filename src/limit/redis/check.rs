//! A look at Redis after the start: what is set up so that counts would be lost or requests fail is told at once, not
//! when it happens.

use std::{collections::HashMap, time::Duration};

use super::{PROBE_TAG, RedisStore, probe_tag, servers::Node, topology::Topology};
use crate::limit::{Limit, fault::FaultKind};

/// Until Redis can be reached.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A check has no caller that waits.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// The oldest version that the tests run against.
const OLDEST: (u32, u32) = (6, 2);

impl RedisStore {
    /// Warns of everything about Redis that the operator should change. Waits for Redis to be there; what its user may
    /// not ask is skipped.
    pub async fn check(&self) {
        let entry = self.0.servers.deciding(PROBE_TAG);
        let mut told = false;
        while let Err(fault) = entry.link.connection(entry.breaker.epoch()).await {
            if !std::mem::replace(&mut told, true) {
                tracing::warn!(%fault, "can't connect to Redis, and try again");
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
        if self.0.servers.is_cluster() {
            self.0.servers.renew_map().await;
        }
        self.try_out().await;
        for server in self.0.servers.all() {
            if let Some(info) = info(&server).await {
                for warning in warnings(&info, self.0.servers.deployment().topology()) {
                    tracing::warn!("{server} {warning}");
                }
            }
        }
        tracing::debug!("looked at Redis");
    }

    /// Some faults, such as an unwelcome certificate, show only when something is asked.
    async fn try_out(&self) {
        let limits = [Limit::probe()];
        let tag = probe_tag();
        let mut server = self.0.servers.deciding(&tag);
        match self.within_deadline(&tag, &limits, 1, &mut server).await {
            Err(fault) if fault.kind() == FaultKind::NotPermitted => tracing::warn!(
                %fault,
                "{server} does not let this user decide; the README has the permissions that it needs"
            ),
            Err(fault) => tracing::warn!(%fault, "{server} did not decide on a trial"),
            Ok(_) => {}
        }
    }
}

/// What a server tells of itself; nothing where that is not permitted or does not come.
async fn info(server: &Node) -> Option<HashMap<String, String>> {
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, async {
        let (_, mut connection) = server.link.connection(server.breaker.epoch()).await.ok()?;
        let text = connection.send(&redis::cmd("INFO")).await.ok()?;
        redis::from_redis_value::<String>(text).ok()
    });
    let text = answer.await.ok()??;
    let pairs = text.lines().filter_map(|line| line.split_once(':'));
    Some(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}

/// What is wrong with a server, each with what to do, as the end of a sentence that begins with its name.
fn warnings(info: &HashMap<String, String>, topology: &Topology) -> Vec<String> {
    let value = |name: &str| info.get(name).map_or("", String::as_str);
    let mut warnings = Vec::new();
    // Without a bound nothing is evicted, whatever the policy.
    if !["", "0"].contains(&value("maxmemory")) && value("maxmemory_policy") != "noeviction" {
        warnings.push(format!(
            "forgets counts when its memory is full, and then admits too much: maxmemory-policy is {}; set it to noeviction",
            value("maxmemory_policy")
        ));
    }
    if value("role") == "slave" {
        warnings.push("is a replica, which takes no writes: configure the primary, or `sentinel`".to_owned());
    }
    if version(value("redis_version")).is_some_and(|version| version < OLDEST) {
        warnings.push(format!(
            "is version {}: Tollgate is tested from 6.2 on; update it",
            value("redis_version")
        ));
    }
    match (value("cluster_enabled"), matches!(topology, Topology::Cluster(_))) {
        ("1", false) => warnings.push(
            "belongs to a cluster, and decides only on the keys of its own slots: configure `cluster = [\"redis://…\"]` \
             in place of `url`"
                .to_owned(),
        ),
        ("0", true) => warnings
            .push("belongs to no cluster: configure `url = \"redis://…\"` in place of `cluster`".to_owned()),
        _ => {}
    }
    warnings
}

fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.').map(str::parse);
    Some((parts.next()?.ok()?, parts.next()?.ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(lines: &[(&str, &str)], topology: &str) -> Vec<String> {
        let server = "redis://redis".parse().unwrap();
        let topology = match topology {
            "cluster" => Topology::Cluster(vec![server]),
            _ => Topology::Single(server),
        };
        let info = lines.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        warnings(&info, &topology)
    }

    #[test]
    fn a_sound_server_gives_no_warning() {
        let sound = [
            ("redis_version", "7.0.15"),
            ("role", "master"),
            ("maxmemory", "1000"),
            ("maxmemory_policy", "noeviction"),
            ("cluster_enabled", "0"),
        ];
        assert!(told(&sound, "single").is_empty());
        assert!(told(&[("maxmemory", "0"), ("maxmemory_policy", "allkeys-lru")], "single").is_empty());
        assert!(told(&[], "single").is_empty() && told(&[], "cluster").is_empty());
    }

    #[test]
    fn each_fault_has_its_own_warning() {
        let faults = [
            ("maxmemory", "1000"),
            ("maxmemory_policy", "volatile-ttl"),
            ("role", "slave"),
            ("redis_version", "6.0.16"),
            ("cluster_enabled", "1"),
        ];
        let said = told(&faults, "single").join("\n");
        for part in ["volatile-ttl", "noeviction", "replica", "6.0.16", "`cluster = "] {
            assert!(said.contains(part), "{part} is not in\n{said}");
        }
        assert_eq!(told(&faults, "single").len(), 4);
        assert!(told(&[("cluster_enabled", "0")], "cluster")[0].contains("`url = "));
    }
}
