//! `queue`: llm-d's scorer of waiting requests: 1 for the shortest queue, 0 for the longest, in between by their distance.

use crate::pick::View;

pub(super) fn score(views: &[View], candidates: &[usize]) -> Vec<f64> {
    let waiting = |&place: &usize| views[place].num_waiting as f64;
    let least = candidates.iter().map(waiting).fold(f64::INFINITY, f64::min);
    let most = candidates.iter().map(waiting).fold(0.0, f64::max);
    candidates.iter().map(|place| if most > least { (most - waiting(place)) / (most - least) } else { 1.0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pick::tests::idle;

    #[test]
    fn scores_lie_between_the_shortest_and_the_longest() {
        let views = [0, 4, 1].map(|num_waiting| View { num_waiting, ..idle("a") });
        assert_eq!(score(&views, &[0, 1, 2]), [1.0, 0.0, 0.75]);
        assert_eq!(score(&views, &[1]), [1.0]);
    }
}
