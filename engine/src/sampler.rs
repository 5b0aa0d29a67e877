//! From logits to a token: greedy, temperature, top-k, min-p, top-p, with counter-based randomness.
//!
//! Called by `Engine::step` on what the device selected. Pure: a token depends on the logits, the parameters and the
//! position alone, so a request gives the same tokens when retried or batched differently.

use crate::batch::{Selected, Selection};
use crate::ops::wgpu::MAX_DEVICE_TOP_K;
use crate::sampling_params::SamplingParams;

/// What the sampler needs from the device for these parameters.
pub fn selection(params: &SamplingParams) -> Selection {
    if params.temperature == 0.0 {
        return Selection::Argmax;
    }
    match params.top_k {
        Some(1) => Selection::Argmax,
        Some(k) if k <= MAX_DEVICE_TOP_K => Selection::TopK(k),
        _ => Selection::Logits,
    }
}

/// The token at `position`; `None` where the logits hold a NaN.
pub fn sample(selected: &Selected, params: &SamplingParams, position: usize) -> Option<u32> {
    let mut candidates: Vec<(u32, f32)> = match selected {
        Selected::NotANumber => return None,
        Selected::Token(token) => return Some(*token),
        Selected::TopK(pairs) => pairs.clone(),
        Selected::Logits(row) => (0..).zip(row.iter().copied()).collect(),
    };
    let weights = truncated_weights(&mut candidates, params);
    let total: f64 = weights.iter().sum();
    let mut left = uniform(params.seed, 0, position as u64) * total;
    for (weight, (token, _)) in weights.iter().zip(&candidates) {
        left -= weight;
        if left < 0.0 {
            return Some(*token);
        }
    }
    candidates.last().map(|(token, _)| *token)
}

/// Unnormalised probabilities of the candidates that top-k, min-p and top-p leave. Candidates are put in order, likeliest
/// first, only where a truncation looks at it: a vocabulary takes milliseconds to sort.
fn truncated_weights(candidates: &mut Vec<(u32, f32)>, params: &SamplingParams) -> Vec<f64> {
    let largest = candidates.iter().map(|(_, logit)| *logit).fold(f32::NEG_INFINITY, f32::max);
    let temperature = f64::from(params.temperature);
    let weight = |logit: f32| ((f64::from(logit) - f64::from(largest)) / temperature).exp();
    // The likeliest has weight 1, so min-p is a bound on the weights themselves. It keeps at least the likeliest.
    if params.min_p > 0.0 {
        let least = f64::from(params.min_p).min(1.0);
        candidates.retain(|(_, logit)| weight(*logit) >= least);
    }
    if params.top_k.is_some() || params.top_p < 1.0 {
        candidates.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        candidates.truncate(params.top_k.unwrap_or(usize::MAX));
    }
    let mut weights: Vec<f64> = candidates.iter().map(|(_, logit)| weight(*logit)).collect();
    if params.top_p < 1.0 {
        let wanted = weights.iter().sum::<f64>() * f64::from(params.top_p);
        let mut sum = 0.0;
        let last = weights.iter().position(|weight| {
            sum += weight;
            sum >= wanted
        });
        weights.truncate(last.map_or(weights.len(), |last| last + 1));
        candidates.truncate(weights.len());
    }
    weights
}

/// A number in [0, 1) that is a pure function of its three counters: SplitMix64's finaliser (Steele, Lea & Flood, 2014)
/// over each in turn.
pub fn uniform(seed: u64, choice: u64, position: u64) -> f64 {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for counter in [seed, choice, position] {
        state = mix(state ^ mix(counter.wrapping_add(0x9e37_79b9_7f4a_7c15)));
    }
    (state >> 11) as f64 / (1u64 << 53) as f64
}

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: [f32; 4] = [0.0, 2.0, 1.0, -30.0];

    fn frequencies(params: &SamplingParams, draws: usize) -> [f64; 4] {
        let mut counts = [0u32; 4];
        let selected = Selected::Logits(ROW.to_vec());
        for position in 0..draws {
            counts[sample(&selected, params, position).unwrap() as usize] += 1;
        }
        counts.map(|count| f64::from(count) / draws as f64)
    }

    fn hot(temperature: f32) -> SamplingParams {
        SamplingParams { temperature, seed: 7, ..Default::default() }
    }

    #[test]
    fn frequencies_follow_the_softmax_at_the_temperature() {
        let weights = ROW.map(|logit| (f64::from(logit) / 0.8).exp());
        let total: f64 = weights.iter().sum();
        let drawn = frequencies(&hot(0.8), 20_000);
        for (drawn, weight) in drawn.iter().zip(weights) {
            // Four standard deviations of a binomial at 20,000 draws are below 0.0142.
            assert!((drawn - weight / total).abs() < 0.0142, "{drawn} against {}", weight / total);
        }
    }

    #[test]
    fn truncations_keep_the_likeliest() {
        assert_eq!(frequencies(&SamplingParams { top_p: 0.1, ..hot(1.0) }, 200), [0.0, 1.0, 0.0, 0.0]);
        assert_eq!(frequencies(&SamplingParams { min_p: 0.9, ..hot(1.0) }, 200), [0.0, 1.0, 0.0, 0.0]);
        let two = frequencies(&SamplingParams { top_k: Some(2), ..hot(1.0) }, 2_000);
        assert!(two[0] == 0.0 && two[2] > 0.2 && two[3] == 0.0, "{two:?}");
        // exp(1 - 2) = 0.37 survives min-p 0.3, exp(0 - 2) = 0.14 does not.
        let above = frequencies(&SamplingParams { min_p: 0.3, ..hot(1.0) }, 2_000);
        assert!(above[0] == 0.0 && above[2] > 0.2, "{above:?}");
    }

    #[test]
    fn device_top_k_and_the_whole_row_give_the_same_token() {
        let params = SamplingParams { top_k: Some(3), top_p: 0.95, ..hot(1.3) };
        assert_eq!(selection(&params), Selection::TopK(3));
        let pairs = Selected::TopK(vec![(1, 2.0), (2, 1.0), (0, 0.0)]);
        for position in 0..500 {
            let whole = sample(&Selected::Logits(ROW.to_vec()), &params, position);
            assert_eq!(sample(&pairs, &params, position), whole);
        }
    }

    #[test]
    fn randomness_is_a_pure_function_of_its_counters() {
        assert_eq!(uniform(1, 0, 5).to_bits(), uniform(1, 0, 5).to_bits());
        assert!(uniform(1, 0, 5) != uniform(2, 0, 5) && uniform(1, 0, 5) != uniform(1, 0, 6));
        let mean: f64 = (0..10_000).map(|position| uniform(3, 0, position)).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.012, "{mean}");
    }

    #[test]
    fn a_row_with_nan_has_no_token() {
        assert_eq!(sample(&Selected::NotANumber, &hot(1.0), 0), None);
    }
}
