//! `predicted-ttft`: the shortest predicted time to the first token, divided by the worker's own.
//!
//! The time is what is queued and what of the prompt is not held, at the worker's measured speed, the wait for a place
//! where all are taken, and a step. Hardware is unequal by design: a data-centre GPU and a laptop may serve one pool.

use crate::pick::{Ask, View};

/// A worker whose speed is not known yet computes as fast as the mean of the others, or so many tokens a second.
const UNKNOWN_SPEED: f64 = 1000.0;
/// Below this, times are equal: no client tells them apart, and measurements waver as much.
const LEAST_SECONDS: f64 = 0.005;

/// What stands for speeds that are not known.
struct Unknown {
    prefill_tokens_per_s: f64,
    decode_step_s: f64,
}

/// The mean of what is known.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let known: Vec<f64> = values.filter(|value| *value > 0.0).collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}

fn seconds(ask: &Ask, view: &View, unknown: &Unknown) -> f64 {
    let or = |value: f64, unknown: f64| if value > 0.0 { value } else { unknown };
    let speed = or(view.prefill_tokens_per_s, unknown.prefill_tokens_per_s);
    // The last token of a prompt is computed in any case.
    let own = (ask.num_tokens - view.held_tokens).max(1.0);
    let num_ahead = (view.num_requests + 1).saturating_sub(view.max_num_seqs.max(1));
    let wait = if view.max_num_seqs > 0 { num_ahead as f64 * view.seconds_a_place } else { 0.0 };
    (view.queued_tokens + own) / speed + wait + or(view.decode_step_s, unknown.decode_step_s)
}

pub(super) fn score(ask: &Ask, views: &[View], candidates: &[usize]) -> Vec<f64> {
    let seen = || candidates.iter().map(|&place| &views[place]);
    let unknown = Unknown {
        prefill_tokens_per_s: mean(seen().map(|view| view.prefill_tokens_per_s)).unwrap_or(UNKNOWN_SPEED),
        decode_step_s: mean(seen().map(|view| view.decode_step_s)).unwrap_or(0.0),
    };
    let times: Vec<f64> =
        candidates.iter().map(|&place| seconds(ask, &views[place], &unknown).max(LEAST_SECONDS)).collect();
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    times.into_iter().map(|time| best / time).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pick::tests::idle;

    fn times(ask: &Ask, views: &[View]) -> Vec<f64> {
        score(ask, views, &(0..views.len()).collect::<Vec<_>>())
    }

    #[test]
    fn queue_and_what_is_missing_count_at_the_workers_speed() {
        let ask = Ask { num_tokens: 1000.0, ..Default::default() };
        let plain = View { decode_step_s: 0.0, ..idle("a") };
        let views = [
            plain.clone(),
            View { queued_tokens: 1000.0, ..plain.clone() },
            View { held_tokens: 500.0, ..plain.clone() },
            View { prefill_tokens_per_s: 4000.0, ..plain.clone() },
            // Of unknown speed: the mean of 1, 1, 1 and 4 thousand.
            View { prefill_tokens_per_s: 0.0, ..plain },
        ];
        let expected = [1.0, 2.0, 0.5, 0.25, 4.0 / 7.0].map(|seconds| 0.25 / seconds);
        for (score, expected) in times(&ask, &views).into_iter().zip(expected) {
            assert!((score - expected).abs() < 1e-9, "{score} {expected}");
        }
    }

    #[test]
    fn who_has_not_answered_yet_is_not_faster_for_it() {
        let ask = Ask { num_tokens: 100.0, ..Default::default() };
        let holder = View { held_tokens: 90.0, decode_step_s: 0.1, ..idle("holder") };
        let new = View { prefill_tokens_per_s: 0.0, decode_step_s: 0.0, ..idle("new") };
        let scores = times(&ask, &[holder, new]);
        assert!(scores[0] == 1.0 && scores[1] < 1.0, "{scores:?}");
    }

    #[test]
    fn who_has_no_place_free_makes_wait() {
        let ask = Ask { num_tokens: 100.0, ..Default::default() };
        let full = View { num_requests: 9, max_num_seqs: 8, seconds_a_place: 0.5, ..idle("full") };
        let scores = times(&ask, &[full, View { num_requests: 7, ..idle("free") }]);
        assert!(scores[1] == 1.0 && (scores[0] - 0.11 / 1.11).abs() < 1e-9, "{scores:?}");
    }

    #[test]
    fn differences_that_no_client_notices_are_none() {
        let views = [
            View { prefill_tokens_per_s: 1e6, decode_step_s: 0.0, ..idle("a") },
            View { prefill_tokens_per_s: 9e5, decode_step_s: 0.001, ..idle("b") },
        ];
        assert_eq!(times(&Ask { num_tokens: 500.0, ..Default::default() }, &views), [1.0, 1.0]);
    }
}
