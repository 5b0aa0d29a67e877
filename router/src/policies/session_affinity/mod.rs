//! `session-affinity`: 1 for the worker that the session had last.

use crate::pick::Ask;

pub(super) fn score(ask: &Ask, candidates: &[usize]) -> Vec<f64> {
    candidates.iter().map(|&place| f64::from(u8::from(ask.session == Some(place)))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_one_counts() {
        assert_eq!(score(&Ask { session: Some(2), ..Default::default() }, &[1, 2]), [0.0, 1.0]);
        assert_eq!(score(&Ask::default(), &[1, 2]), [0.0, 0.0]);
    }
}
