//! Whether an endpoint is worth a request, learnt from what became of others. Pure: time is an argument.
//!
//! Nothing is asked for the sake of asking: an endpoint that is out gets one request when its time is over, and what
//! becomes of that decides.

use std::time::Duration;

use tokio::time::Instant;

/// So many failures in a row put an endpoint out. A connection that did not come about does so at once.
const FAILURES: u32 = 3;

/// How long an endpoint is out at first. It doubles with each probe that fails.
const FIRST_EJECTION: Duration = Duration::from_secs(1);

/// It does not double beyond this.
const LONGEST_EJECTION: Duration = Duration::from_secs(30);

/// A provider that names a longer time is asked again after this.
pub(super) const LONGEST_COOLDOWN: Duration = Duration::from_secs(60);

/// What is known of an endpoint.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// In a row.
    failures: u32,
    ejection: Option<Ejection>,
    cooldown: Option<Cooldown>,
    /// A request is on its way that decides whether the ejection is over.
    probing: bool,
}

#[derive(Clone, Copy, Debug)]
struct Ejection {
    since: Instant,
    length: Duration,
}

impl Ejection {
    fn end(&self) -> Instant {
        self.since + self.length
    }
}

#[derive(Clone, Copy, Debug)]
struct Cooldown {
    until: Instant,
    /// Another process was told to wait, and this one has heard of it.
    heard: bool,
}

/// What a request may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Go there.
    Available,
    /// Go there alone: what becomes of it decides for others.
    Due,
    /// Better go elsewhere until then.
    Out(Instant),
}

/// How bad a failure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Nobody is there.
    Unreachable,
    /// Somebody is there, but of no use.
    Faulty,
}

/// What an operator is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// It is out for so long.
    Ejected(Duration),
    /// It is back.
    Recovered,
    /// Its provider wants so long a pause.
    Cooling(Duration),
}

/// A request that was sent there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    pub(super) at: Instant,
    /// It decides whether the ejection is over.
    pub(super) probe: bool,
}

impl Health {
    /// Whether there is nothing to know.
    pub(super) fn is_clean(&self) -> bool {
        self.failures == 0 && self.ejection.is_none() && self.cooldown.is_none()
    }

    pub(super) fn standing(&self, now: Instant) -> Standing {
        let cooling = self.cooldown.map(|cooldown| cooldown.until).filter(|until| *until > now);
        match (&self.ejection, cooling) {
            (None, None) => Standing::Available,
            (None, Some(until)) => Standing::Out(until),
            (Some(ejection), cooling) => {
                let until = cooling.into_iter().fold(ejection.end(), Instant::max);
                if until <= now && !self.probing { Standing::Due } else { Standing::Out(until) }
            }
        }
    }

    /// Takes note that a request is sent there.
    pub(super) fn send(&mut self, now: Instant) -> Sent {
        let probe = self.standing(now) == Standing::Due;
        self.probing |= probe;
        Sent { at: now, probe }
    }

    /// The request has got an answer that is of use.
    pub(super) fn succeeded(&mut self, sent: Sent) -> Option<Change> {
        self.ended(sent);
        // An answer that was asked for before the fault says nothing about it.
        if self.ejection.is_some_and(|ejection| sent.at < ejection.since) {
            return None;
        }
        self.failures = 0;
        self.cooldown = self.cooldown.filter(|cooldown| cooldown.until > sent.at);
        self.ejection.take().map(|_| Change::Recovered)
    }

    /// The request has failed.
    pub(super) fn failed(&mut self, sent: Sent, failure: Failure, now: Instant) -> Option<Change> {
        self.ended(sent);
        self.failures = self.failures.saturating_add(1);
        let length = match self.ejection {
            // Others that were on their way when it broke must not put it out for longer.
            Some(_) if !sent.probe => return None,
            Some(ejection) => (ejection.length * 2).min(LONGEST_EJECTION),
            None if failure == Failure::Faulty && self.failures < FAILURES => return None,
            None => FIRST_EJECTION,
        };
        self.ejection = Some(Ejection { since: now, length });
        Some(Change::Ejected(length))
    }

    /// The request is over, however it ended. A probe makes room for the next one.
    pub(super) fn ended(&mut self, sent: Sent) {
        self.probing &= !sent.probe;
    }

    /// The provider wants a pause. `heard`: from another process.
    pub(super) fn cool(&mut self, pause: Duration, heard: bool, now: Instant) -> Option<Change> {
        let pause = pause.min(LONGEST_COOLDOWN);
        let until = now + pause;
        let before = self.cooldown.filter(|cooldown| cooldown.until > now);
        if pause.is_zero() || before.is_some_and(|before| before.until >= until) {
            return None;
        }
        self.cooldown = Some(Cooldown { until, heard });
        before.is_none().then_some(Change::Cooling(pause))
    }

    /// How much longer the provider wants a pause, where it was this process that was told.
    pub(super) fn own_cooldown(&self, now: Instant) -> Option<Duration> {
        let own = self.cooldown.filter(|cooldown| !cooldown.heard)?;
        Some(own.until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn fail(health: &mut Health, failure: Failure, now: Instant) -> Option<Change> {
        let sent = health.send(now);
        health.failed(sent, failure, now)
    }

    #[test]
    fn three_faults_in_a_row_put_it_out_and_an_answer_in_between_does_not_let_them() {
        let (mut health, now) = (Health::default(), Instant::now());
        for _ in 0..2 {
            assert_eq!(fail(&mut health, Failure::Faulty, now), None);
        }
        let sent = health.send(now);
        assert_eq!(health.succeeded(sent), None);
        assert!(health.is_clean());
        for _ in 0..2 {
            assert_eq!(fail(&mut health, Failure::Faulty, now), None);
            assert_eq!(health.standing(now), Standing::Available);
        }
        assert_eq!(fail(&mut health, Failure::Faulty, now), Some(Change::Ejected(SECOND)));
        assert_eq!(health.standing(now), Standing::Out(now + SECOND));
    }

    #[test]
    fn nobody_there_puts_it_out_at_once_and_for_longer_each_time() {
        let (mut health, mut now) = (Health::default(), Instant::now());
        for seconds in [1, 2, 4, 8, 16, 30, 30] {
            let length = SECOND * seconds;
            assert_eq!(fail(&mut health, Failure::Unreachable, now), Some(Change::Ejected(length)));
            assert_eq!(health.standing(now + length - SECOND / 1000), Standing::Out(now + length));
            now += length;
            assert_eq!(health.standing(now), Standing::Due);
        }
        let probe = health.send(now);
        assert_eq!(health.succeeded(probe), Some(Change::Recovered));
        assert_eq!(fail(&mut health, Failure::Unreachable, now), Some(Change::Ejected(SECOND)), "anew");
    }

    #[test]
    fn one_probe_at_a_time_decides() {
        let (mut health, start) = (Health::default(), Instant::now());
        fail(&mut health, Failure::Unreachable, start);
        let due = start + SECOND;
        let probe = health.send(due);
        assert!(probe.probe);
        assert!(matches!(health.standing(due), Standing::Out(_)), "somebody is there already");
        let other = health.send(due);
        assert!(!other.probe);
        assert_eq!(health.failed(other, Failure::Unreachable, due), None, "it decides nothing");
        health.ended(probe);
        assert_eq!(health.standing(due), Standing::Due, "its client went away, so the next one decides");
        let probe = health.send(due);
        assert_eq!(health.failed(probe, Failure::Faulty, due), Some(Change::Ejected(SECOND * 2)));
    }

    #[test]
    fn what_was_sent_before_the_fault_says_nothing_about_it() {
        let (mut health, start) = (Health::default(), Instant::now());
        let early = health.send(start);
        let now = start + SECOND;
        fail(&mut health, Failure::Unreachable, now);
        assert_eq!(health.succeeded(early), None);
        let late = health.send(now);
        assert_eq!(health.succeeded(late), Some(Change::Recovered), "it was tried though it was out");
    }

    #[test]
    fn a_cooldown_ends_by_itself_and_is_never_shortened_nor_endless() {
        let (mut health, now) = (Health::default(), Instant::now());
        assert_eq!(health.cool(Duration::ZERO, false, now), None);
        assert_eq!(health.cool(SECOND * 5, false, now), Some(Change::Cooling(SECOND * 5)));
        assert_eq!(health.cool(SECOND * 2, false, now), None);
        assert_eq!(health.standing(now + SECOND * 4), Standing::Out(now + SECOND * 5));
        assert_eq!(health.cool(SECOND * 7, false, now), None, "it is known to cool");
        assert_eq!(health.standing(now + SECOND * 6), Standing::Out(now + SECOND * 7));
        assert_eq!(health.standing(now + SECOND * 7), Standing::Available);
        let sent = health.send(now + SECOND * 7);
        assert_eq!(health.succeeded(sent), None);
        assert!(health.is_clean());
        let later = now + SECOND * 8;
        assert_eq!(health.cool(SECOND * 3600, false, later), Some(Change::Cooling(LONGEST_COOLDOWN)));
    }

    #[test]
    fn an_answer_does_not_end_a_cooldown_and_a_probe_waits_for_it() {
        let (mut health, now) = (Health::default(), Instant::now());
        health.cool(SECOND * 5, false, now);
        let sent = health.send(now);
        assert_eq!(health.succeeded(sent), None);
        assert_eq!(health.standing(now), Standing::Out(now + SECOND * 5));
        fail(&mut health, Failure::Unreachable, now);
        assert_eq!(health.standing(now + SECOND * 2), Standing::Out(now + SECOND * 5));
        assert_eq!(health.standing(now + SECOND * 5), Standing::Due);
    }

    #[test]
    fn only_what_this_process_was_told_is_told_to_others() {
        let (mut health, now) = (Health::default(), Instant::now());
        health.cool(SECOND * 5, false, now);
        assert_eq!(health.own_cooldown(now + SECOND * 2), Some(SECOND * 3));
        health.cool(SECOND * 9, true, now);
        assert_eq!(health.own_cooldown(now), None);
        health.cool(SECOND * 10, false, now);
        assert_eq!(health.own_cooldown(now + SECOND * 10), None, "it is over");
    }
}
