//! A worker's circuit: after some failures in a row it is not asked for a while, which doubles as long as it fails.
//!
//! Held by the worker; outcomes of requests and probes come in. Time comes in as a value. Invariants: while open, nothing is
//! asked; when the time is over requests may try again: a failure opens it for twice as long, a success closes it.

use std::time::Duration;

use tokio::time::Instant;

/// Bounds of a circuit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerLimits {
    /// Failures in a row that open it.
    pub max_failures: u32,
    /// First time that it stays open.
    pub first_pause: Duration,
    /// Longest.
    pub longest_pause: Duration,
}

impl Default for BreakerLimits {
    fn default() -> Self {
        Self { max_failures: 3, first_pause: Duration::from_millis(500), longest_pause: Duration::from_secs(15) }
    }
}

/// The circuit.
#[derive(Clone, Copy, Debug, Default)]
pub struct Breaker {
    num_failures: u32,
    open_until: Option<Instant>,
}

impl Breaker {
    /// Whether the worker may be asked.
    pub fn is_closed(&self, now: Instant) -> bool {
        self.open_until.is_none_or(|until| until <= now)
    }

    /// A request or a probe went well.
    pub fn succeed(&mut self) {
        *self = Self::default();
    }

    /// One failed. Whether that opened the circuit.
    pub fn fail(&mut self, now: Instant, limits: &BreakerLimits) -> bool {
        // Of requests that were under way together, the first that fails speaks for all.
        if !self.is_closed(now) {
            return false;
        }
        self.num_failures += 1;
        let Some(beyond) = self.num_failures.checked_sub(limits.max_failures) else { return false };
        let pause = limits.first_pause.saturating_mul(1 << beyond.min(16)).min(limits.longest_pause);
        self.open_until = Some(now + pause);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_opens_doubles_and_closes() {
        let limits = BreakerLimits::default();
        let (mut breaker, mut now) = (Breaker::default(), Instant::now());
        assert!(!breaker.fail(now, &limits) && !breaker.fail(now, &limits) && breaker.is_closed(now));
        assert!(breaker.fail(now, &limits) && !breaker.is_closed(now));
        assert!(!breaker.fail(now, &limits), "what was under way does not count again");
        now += limits.first_pause;
        assert!(breaker.is_closed(now) && breaker.fail(now, &limits));
        now += limits.first_pause;
        assert!(!breaker.is_closed(now), "twice as long");
        now += limits.first_pause;
        assert!(breaker.is_closed(now));
        breaker.succeed();
        assert!(!breaker.fail(now, &limits) && breaker.is_closed(now));
        for _ in 0..40 {
            now += limits.longest_pause;
            breaker.fail(now, &limits);
        }
        assert!(breaker.is_closed(now + limits.longest_pause));
    }
}
