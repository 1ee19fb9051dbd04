//! Whatever Redis does, every request is answered as the policy says, nothing counts twice, and the limit holds again
//! when Redis is back.

mod cost;
mod link;
mod outages;
mod refusals;
mod replicas;
mod replies;

use reqwest::Client;
use serde_json::Value;

use crate::harness::{Proxy, ProxyBuilder, Redis, Upstream, patiently};

/// The limit of every caller here.
const LIMIT: &str = r#"{ requests = 3, per = "1h" }"#;

/// More than it takes to give Redis up, and more than the limit.
const REQUESTS: usize = 8;

/// A healthy Redis answers in time even on a busy machine, and one that hangs does not hold a test up for long.
const TIMEOUT: &str = "1s";

/// A proxy with a policy, and a caller that only it serves.
struct Place {
    policy: &'static str,
    proxy: Proxy,
    client: Client,
    _upstream: Upstream,
}

impl Place {
    async fn new(redis_url: &str, policy: &'static str, timeout: &str) -> Self {
        Self::with(redis_url, policy, &format!("timeout = \"{timeout}\"")).await
    }

    /// One worker, so that one connection to Redis is all there is. The lines go to `[limiter.redis]`.
    async fn with(redis_url: &str, policy: &'static str, lines: &str) -> Self {
        let upstream = Upstream::ok().await;
        let limiter = format!(
            "[limiter]\nstore = \"redis\"\non_store_failure = \"{policy}\"\n\
             [limiter.redis]\nurl = \"{redis_url}\"\n{lines}"
        );
        let builder = ProxyBuilder::before(&upstream).server("workers = 1").section(&limiter);
        let proxy = builder.tier(policy, LIMIT).start().await;
        Self { policy, client: proxy.client(), proxy, _upstream: upstream }
    }

    async fn status(&self) -> u16 {
        let answer = patiently("an answer", self.proxy.chat(&self.client, self.policy).send()).await;
        answer.unwrap().status().as_u16()
    }

    async fn statuses(&self, requests: usize) -> Vec<u16> {
        let mut seen = Vec::new();
        for _ in 0..requests {
            seen.push(self.status().await);
        }
        seen
    }

    /// Asks until Redis has decided once.
    async fn first_decision(&self) {
        patiently("the first decision", async { while !self.decided_by_redis().await {} }).await;
    }

    async fn decided_by_redis(&self) -> bool {
        let before = self.metric("tollgate_limiter_faults_total").await;
        self.status().await;
        self.metric("tollgate_limiter_faults_total").await == before
    }

    /// The sum of all series of a metric.
    async fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.proxy.admin("/metrics").await;
        let series = text.lines().filter(|line| line.starts_with(name));
        series.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }

    async fn faults(&self, kind: &str) -> f64 {
        self.metric(&format!("tollgate_limiter_faults_total{{kind=\"{kind}\"}}")).await
    }

    /// One line of the log begins so, once it is written.
    async fn told_once(&self, text: &str) {
        self.proxy.logs.wait_for(text, |line| says(line, text)).await;
        assert_eq!(self.told(text), 1, "{text}");
    }

    /// How many lines of the log begin so.
    fn told(&self, text: &str) -> usize {
        self.proxy.logs.all().iter().filter(|line| says(line, text)).count()
    }

    async fn recovered(&self) {
        self.proxy.logs.wait_for("the recovery", |line| says(line, "Redis decides again")).await;
    }

    /// What this policy answers to [`REQUESTS`] requests that Redis does not decide on.
    fn answers_without_redis(&self) -> Vec<u16> {
        (0..REQUESTS)
            .map(|request| match self.policy {
                "allow" => 200,
                "deny" => 503,
                "local" if request < 3 => 200,
                "local" => 429,
                other => unreachable!("{other} is no policy"),
            })
            .collect()
    }

    /// Redis does not decide now, for this reason.
    async fn falls_back(&self, kind: &str) {
        assert_eq!(self.statuses(REQUESTS).await, self.answers_without_redis(), "{} at {kind}", self.policy);
        let is_error = |line: &Value| line["level"] == "ERROR";
        let told: Vec<_> = self.proxy.logs.all().into_iter().filter(is_error).collect();
        assert!(self.faults(kind).await >= 5.0, "the kind is {kind}: {told:#?}");
        assert_eq!(self.metric("tollgate_limiter_store_up").await, 0.0);
        let applied = format!("tollgate_limiter_fallbacks_total{{policy=\"{}\"}}", self.policy);
        let faults = self.metric("tollgate_limiter_faults_total").await;
        assert_eq!(self.metric(&applied).await, faults, "each fault is answered by the policy");
        self.told_once("Redis does not decide").await;
    }

    /// Redis decides again, and knows of so many admissions.
    async fn is_exact_again(&self, redis: &Redis, known: usize) {
        self.recovered().await;
        let mut expected = vec![200; 3 - known];
        expected.extend([429, 429]);
        assert_eq!(self.statuses(expected.len()).await, expected, "{}", self.policy);
        assert_eq!(redis.admissions(self.policy), 3, "{}", self.policy);
        assert_eq!(self.metric("tollgate_limiter_store_up").await, 1.0);
        assert_eq!((self.told("Redis does not decide"), self.told("Redis decides again")), (1, 1));
    }
}

fn says(line: &Value, text: &str) -> bool {
    line["fields"]["message"].as_str().is_some_and(|said| said.starts_with(text))
}

/// One place for each policy, all before one Redis.
struct Places(Vec<Place>);

impl Places {
    /// Each has asked Redis once.
    async fn before(redis: &Redis) -> Self {
        let mut places = Vec::new();
        for policy in ["allow", "deny", "local"] {
            let place = Place::new(&redis.url(), policy, "20s").await;
            assert_eq!(place.status().await, 200);
            places.push(place);
        }
        Self(places)
    }

    async fn fall_back(&self, kind: &str) {
        for place in &self.0 {
            place.falls_back(kind).await;
        }
    }

    /// Everything that was counted before the fault still counts, and nothing of it is left behind.
    async fn are_exact_again(&self, redis: &Redis, known: usize) {
        for place in &self.0 {
            place.is_exact_again(redis, known).await;
        }
        // Each place has one connection for decisions and may have one for its heartbeat.
        let few = async { while redis.clients() > 2 * self.0.len() + 1 {} };
        patiently("an end of the connections that are not used any more", few).await;
    }
}
