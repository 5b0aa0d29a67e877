//! `least-load`: 1 for the worker with the fewest requests, less by 1 / (1 + how many more) for others.

use crate::pick::View;

pub(super) fn score(views: &[View], candidates: &[usize]) -> Vec<f64> {
    let least = candidates.iter().map(|&place| views[place].num_requests).min().unwrap_or(0);
    candidates.iter().map(|&place| 1.0 / (1 + views[place].num_requests - least) as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pick::tests::idle;

    #[test]
    fn fewer_is_more() {
        let views = [3, 5, 4].map(|num_requests| View { num_requests, ..idle("a") });
        assert_eq!(score(&views, &[0, 1, 2]), [1.0, 1.0 / 3.0, 0.5]);
        assert_eq!(score(&views, &[1]), [1.0]);
    }
}
