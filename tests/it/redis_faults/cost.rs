//! What an answer costs while Redis is given up.

use std::{
    num::NonZeroU32,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tollgate::limit::{
    Limit, Window,
    breaker::Change,
    redis::{Deployment, RedisStore, topology::Topology},
};

use super::Place;
use crate::harness::{Redis, WeakLink};

/// It is there at the first poll, outside any runtime: so no timer was armed, no task started and no socket touched, all
/// of which would have panicked.
#[test]
fn a_store_that_is_given_up_answers_at_once() {
    let topology = Topology::Single("redis://127.0.0.1:1".parse().unwrap());
    let deployment = Arc::new(Deployment::new(topology, None));
    while deployment.breaker().failed() != Change::Opened {}
    let store = RedisStore::new(&deployment, Duration::from_secs(20), None);
    let window = Window::new(Duration::from_secs(60)).unwrap();
    let limits = [Limit::new(NonZeroU32::MIN, window)];
    let (key, mut context) = ("alice".parse().unwrap(), Context::from_waker(Waker::noop()));
    for _ in 0..1000 {
        let answer = pin!(store.decide(&key, &limits)).poll(&mut context);
        assert!(matches!(answer, Poll::Ready(Err(_))), "{answer:?}");
    }
}

/// Behind a link that swallows everything the number of connections depends on time alone, not on requests.
#[tokio::test(flavor = "multi_thread")]
async fn requests_cost_a_store_that_is_given_up_nothing() {
    let redis = Redis::start().await;
    let link = WeakLink::to(&redis).await;
    let place = Place::new(&link.url(), "allow", "100ms").await;
    link.black_hole().await;
    place.falls_back("timeout").await;
    let (connections, bytes) = (link.connections(), link.bytes());
    assert_eq!(place.statuses(300).await, [200; 300]);
    let attempts = link.connections() - connections;
    assert!(attempts < 150, "{attempts} attempts for 300 requests");
    assert!(link.bytes() - bytes < 300 * 100, "no question was asked for a request");
}
