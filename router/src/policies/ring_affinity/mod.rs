//! `ring-affinity`: 1 for the first worker of the ring's walk whose load is within bounds, then down along the walk.
//!
//! Load is the requests of late, by weight: so prompts spread also where one comes after the other, and a worker that many
//! prefixes fell to passes new ones on.

use crate::pick::{Ask, View};
use crate::ring::LOAD_BOUND;

/// Workers of the walk that are told apart; the rest score 0.
const DEPTH: usize = 16;

pub(super) fn score(ask: &Ask, views: &[View], candidates: &[usize]) -> Vec<f64> {
    let weight: usize = candidates.iter().map(|&place| views[place].weight).sum();
    let load = |view: &View| view.recent_requests.max(view.num_requests as f64);
    let total: f64 = candidates.iter().map(|&place| load(&views[place])).sum();
    let mut scores = vec![0.0; candidates.len()];
    let is_within = |view: &View| {
        let share = view.weight as f64 / weight.max(1) as f64;
        load(view) + 1.0 <= ((total + 1.0) * share * LOAD_BOUND).max(1.0)
    };
    let walk = ask.walk.iter().filter_map(|place| candidates.binary_search(place).ok());
    let (within, beyond): (Vec<usize>, Vec<usize>) = walk.partition(|&index| is_within(&views[candidates[index]]));
    for (rank, index) in within.into_iter().chain(beyond).take(DEPTH).enumerate() {
        scores[index] = 1.0 / (1 + rank) as f64;
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pick::tests::idle;

    fn scores(walk: &[usize], loads: &[f64]) -> Vec<f64> {
        let views: Vec<View> = loads.iter().map(|&recent_requests| View { recent_requests, ..idle("a") }).collect();
        let ask = Ask { walk: walk.to_vec(), ..Default::default() };
        score(&ask, &views, &(0..views.len()).collect::<Vec<_>>())
    }

    #[test]
    fn the_walk_is_the_order() {
        assert_eq!(scores(&[2, 0, 1], &[0.0; 3]), [0.5, 1.0 / 3.0, 1.0]);
    }

    #[test]
    fn who_has_more_than_a_quarter_above_the_mean_comes_last() {
        // 31 requests in all make a bound of 32 / 4 * 1.25 = 10.
        assert_eq!(scores(&[0, 1, 2, 3], &[10.0, 9.0, 6.0, 6.0]), [0.25, 1.0, 0.5, 1.0 / 3.0]);
    }

    #[test]
    fn who_is_filtered_out_is_passed_by() {
        let views = [idle("a"), idle("b"), idle("c")];
        let ask = Ask { walk: vec![1, 2, 0], ..Default::default() };
        assert_eq!(score(&ask, &views, &[0, 2]), [0.5, 1.0]);
    }
}
