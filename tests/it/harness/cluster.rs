//! A real Redis Cluster of primaries without replicas.

use std::{path::Path, time::Duration};

use super::{
    patiently,
    redis::{Redis, free_port},
};

/// Ends with the test.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) nodes: Vec<Redis>,
}

/// Between two looks at what a cluster's nodes think of each other.
const LOOK: Duration = Duration::from_millis(50);

impl Cluster {
    /// A part of it that is down leaves the rest in service.
    pub(crate) async fn start(primaries: u16) -> Self {
        let arguments = |_: &Path| {
            let bus = free_port().to_string();
            let words =
                "--cluster-enabled yes --cluster-require-full-coverage no --cluster-node-timeout 2000";
            let mut all: Vec<_> = words.split(' ').map(str::to_owned).collect();
            all.extend(["--cluster-port".to_owned(), bus]);
            all
        };
        let mut nodes = Vec::new();
        for _ in 0..primaries {
            nodes.push(Redis::start_with(Path::new("redis-server"), arguments).await);
        }
        let cluster = Self { nodes };
        let share = 16_384 / primaries;
        for (index, node) in (0..).zip(&cluster.nodes) {
            let last = if index + 1 == primaries { 16_383 } else { (index + 1) * share - 1 };
            let _: () = node.ask(&format!("CLUSTER SET-CONFIG-EPOCH {}", index + 1));
            let _: () = node.ask(&format!("CLUSTER ADDSLOTSRANGE {} {last}", index * share));
            let bus = cluster.nodes[0].ask::<Vec<String>>("CONFIG GET cluster-port")[1].clone();
            let _: () = node.ask(&format!("CLUSTER MEET 127.0.0.1 {} {bus}", cluster.nodes[0].port()));
        }
        patiently("the cluster's agreement", async {
            while !cluster.nodes.iter().all(|node| cluster.is_known_by(node)) {
                tokio::time::sleep(LOOK).await;
            }
        })
        .await;
        cluster
    }

    fn is_known_by(&self, node: &Redis) -> bool {
        let info: String = node.ask("CLUSTER INFO");
        let slots: Vec<redis::Value> = node.ask("CLUSTER SLOTS");
        info.contains("cluster_state:ok") && slots.len() == self.nodes.len()
    }

    /// The line of `[limiter.redis]`.
    pub(crate) fn setting(&self) -> String {
        let urls: Vec<_> = self.nodes.iter().map(|node| format!("\"{}\"", node.url())).collect();
        format!("cluster = [{}]", urls.join(", "))
    }

    /// The slot of a caller's keys.
    pub(crate) fn slot(&self, id: &str) -> u16 {
        self.nodes[0].ask(&format!("CLUSTER KEYSLOT {{{id}}}"))
    }

    /// The index of the node that holds a slot, by its own word: the others hear of a move later.
    pub(crate) fn holder(&self, slot: u16) -> usize {
        self.nodes.iter().position(|node| holds(node, slot)).expect("every slot has a holder")
    }

    /// Moves a slot with all its keys, as `redis-cli --cluster reshard` does, and lets others in between each step.
    pub(crate) async fn move_slot(&self, slot: u16, from: usize, to: usize) {
        let [source, target] = [&self.nodes[from], &self.nodes[to]];
        let [source_id, target_id] = [source, target].map(|node| node.ask::<String>("CLUSTER MYID"));
        let _: () = target.ask(&format!("CLUSTER SETSLOT {slot} IMPORTING {source_id}"));
        let _: () = source.ask(&format!("CLUSTER SETSLOT {slot} MIGRATING {target_id}"));
        loop {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let keys: Vec<String> = source.ask(&format!("CLUSTER GETKEYSINSLOT {slot} 1"));
            let Some(key) = keys.first() else { break };
            let _: String = source.ask(&format!("MIGRATE 127.0.0.1 {} {key} 0 5000", target.port()));
        }
        for node in [target, source] {
            let _: () = node.ask(&format!("CLUSTER SETSLOT {slot} NODE {target_id}"));
        }
    }

    /// How many admissions of a caller are recorded, wherever they are.
    pub(crate) fn recorded(&self, id: &str) -> usize {
        let of_caller = |key: &str| key.contains(&format!("{{{id}}}"));
        let dumps = self.nodes.iter().flat_map(Redis::dump);
        dumps.filter(|(key, _)| of_caller(key)).map(|(_, entries)| entries.len()).sum()
    }
}

/// Whether a node says that it holds a slot itself.
fn holds(node: &Redis, slot: u16) -> bool {
    let array = |value: &redis::Value| value.as_sequence().unwrap().to_vec();
    let number = |value: &redis::Value| redis::from_redis_value::<u16>(value.clone()).unwrap();
    let entries: Vec<Vec<redis::Value>> = node.ask("CLUSTER SLOTS");
    entries.iter().any(|entry| {
        let range = number(&entry[0])..=number(&entry[1]);
        range.contains(&slot) && number(&array(&entry[2])[1]) == node.port()
    })
}
