//! `random`: a lot for each candidate, by the request's seed.

use twox_hash::XxHash3_64;

use crate::pick::Ask;

pub(super) fn score(ask: &Ask, candidates: &[usize]) -> Vec<f64> {
    let lot = |&place: &usize| XxHash3_64::oneshot_with_seed(ask.seed, &[place.to_le_bytes(), [1; 8]].concat());
    candidates.iter().map(|place| lot(place) as f64 / u64::MAX as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_candidate_wins_as_often() {
        let mut wins = [0usize; 4];
        for seed in 0..4000 {
            let scores = score(&Ask { seed, ..Default::default() }, &[0, 1, 2, 3]);
            assert!(scores.iter().all(|score| (0.0..=1.0).contains(score)));
            wins[(0..4).max_by(|&a, &b| scores[a].total_cmp(&scores[b])).unwrap()] += 1;
        }
        assert!(wins.iter().all(|&wins| (850..1150).contains(&wins)), "{wins:?}");
    }
}
