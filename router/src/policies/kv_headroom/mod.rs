//! `kv-headroom`: the part of a worker's KV blocks that is free. A full pool preempts.

use crate::pick::View;

pub(super) fn score(views: &[View], candidates: &[usize]) -> Vec<f64> {
    candidates.iter().map(|&place| (1.0 - views[place].kv_used).clamp(0.0, 1.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pick::tests::idle;

    #[test]
    fn a_full_pool_has_none() {
        let of = |kv_used| score(&[View { kv_used, ..idle("a") }], &[0])[0];
        assert_eq!([0.0, 0.25, 1.0, 1.5].map(of), [1.0, 0.75, 0.0, 0.0]);
    }
}
