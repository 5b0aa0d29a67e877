//! `round-robin`: 1 for the candidate whose turn it is, then down in order.

use crate::pick::Ask;

pub(super) fn score(ask: &Ask, candidates: &[usize]) -> Vec<f64> {
    let count = candidates.len();
    let turn = (ask.turn % count.max(1) as u64) as usize;
    (0..count).map(|index| 1.0 - ((index + count - turn) % count) as f64 / count as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_round() {
        let of = |turn| score(&Ask { turn, ..Default::default() }, &[4, 7, 9, 2]);
        assert_eq!(of(0), [1.0, 0.75, 0.5, 0.25]);
        assert_eq!(of(5), [0.25, 1.0, 0.75, 0.5]);
        assert!(score(&Ask::default(), &[]).is_empty());
    }
}
