//! `predicted-ttft`: the shortest predicted time to the first token, divided by the worker's own.
//!
//! The time is what is queued and what of the prompt is not held, at the worker's measured speed, the wait for a place
//! where all are taken, and a step. Hardware is unequal by design: a data-centre GPU and a laptop may serve one pool.
//!
//! What a request computes, those that come after it wait for: where all are busy, computing anew what another worker holds
//! costs them as much as it saves this one. So its own part counts once more for each time that it fits into the mean queue.

use crate::pick::{Ask, View};

/// A worker whose speed is not known yet computes as fast as the mean of the others, or so many tokens a second.
const UNKNOWN_SPEED: f64 = 1000.0;
/// Below this, times are equal: no client tells them apart, and measurements waver as much.
const LEAST_SECONDS: f64 = 0.005;
/// Requests behind that count, at most.
const MOST_OTHERS: f64 = 32.0;

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

/// What a worker would take: for what is ahead, and for the request itself.
fn seconds(ask: &Ask, view: &View, unknown: &Unknown) -> (f64, f64) {
    let or = |value: f64, unknown: f64| if value > 0.0 { value } else { unknown };
    let speed = or(view.prefill_tokens_per_s, unknown.prefill_tokens_per_s);
    // The last token of a prompt is computed in any case.
    let own = (ask.num_tokens - view.held_tokens).max(1.0);
    let num_ahead = (view.num_requests + 1).saturating_sub(view.max_num_seqs.max(1));
    let wait = if view.max_num_seqs > 0 { num_ahead as f64 * view.seconds_a_place } else { 0.0 };
    (view.queued_tokens / speed + wait + or(view.decode_step_s, unknown.decode_step_s), own / speed)
}

pub(super) fn score(ask: &Ask, views: &[View], candidates: &[usize]) -> Vec<f64> {
    let seen = || candidates.iter().map(|&place| &views[place]);
    let unknown = Unknown {
        prefill_tokens_per_s: mean(seen().map(|view| view.prefill_tokens_per_s)).unwrap_or(UNKNOWN_SPEED),
        decode_step_s: mean(seen().map(|view| view.decode_step_s)).unwrap_or(0.0),
    };
    let parts: Vec<(f64, f64)> = candidates.iter().map(|&place| seconds(ask, &views[place], &unknown)).collect();
    let ahead = parts.iter().map(|(ahead, _)| ahead).sum::<f64>() / parts.len().max(1) as f64;
    let longest = parts.iter().map(|(_, own)| *own).fold(0.0, f64::max);
    let others = if longest > 0.0 { (ahead / longest).min(MOST_OTHERS) } else { 0.0 };
    let time = |(ahead, own): (f64, f64)| (ahead + own * (1.0 + others)).max(LEAST_SECONDS);
    let times: Vec<f64> = parts.into_iter().map(time).collect();
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
        // The mean queue is a fifth of the longest request: what is computed counts a fifth more.
        let expected = [1.2, 2.2, 0.6, 0.3, 1.2 * 4.0 / 7.0].map(|seconds| 0.3 / seconds);
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
        assert!(scores[1] == 1.0 && (scores[0] - 0.62 / 1.62).abs() < 1e-9, "{scores:?}");
    }

    #[test]
    fn where_all_are_busy_what_is_held_elsewhere_is_not_computed_anew() {
        let ask = Ask { num_tokens: 2000.0, ..Default::default() };
        let of = |queues: [f64; 2]| {
            let holder = View { queued_tokens: queues[0], held_tokens: 1900.0, ..idle("holder") };
            times(&ask, &[holder, View { queued_tokens: queues[1], ..idle("other") }])
        };
        // A few seconds more to wait are worth it for nobody, where the other is idle, and for all, where both are busy.
        assert!(of([5000.0, 0.0])[1] == 1.0 && of([33_000.0, 30_000.0])[0] == 1.0);
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
