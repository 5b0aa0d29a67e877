//! `prefix-cache`: the part of the prompt that the worker holds, as the exact index has it.

use crate::pick::View;

pub(super) fn score(views: &[View], candidates: &[usize]) -> Vec<f64> {
    candidates.iter().map(|&place| views[place].held_share.clamp(0.0, 1.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pick::tests::idle;

    #[test]
    fn it_is_the_share() {
        let views = [0.0, 0.5, 1.0].map(|held_share| View { held_share, ..idle("a") });
        assert_eq!(score(&views, &[2, 0, 1]), [1.0, 0.0, 0.5]);
    }
}
