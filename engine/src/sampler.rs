//! What a sequence wants of its logits row: its choice, with counter-based randomness, and what changes before it.
//!
//! Called by the engine for each row; the device makes the choice. Pure: a token depends on the logits, the parameters,
//! the tokens before it and its position alone, so a request gives the same tokens when retried or batched differently.

use crate::batch::{Adjustment, Choice, Draw, Selection};
use crate::sampling_params::SamplingParams;
use crate::sequence::{Sequence, TokenCount};

/// Taken from the logit of a token that must not be chosen. Finite, since a shader may assume that no infinity occurs.
const FORBIDDEN: f32 = 1e30;

/// The selection of a sequence's next token, from row `row`. `eos_token_ids` are the model's.
pub fn selection(sequence: &Sequence, row: usize, eos_token_ids: &[u32]) -> Selection {
    let params = &sequence.params;
    let position = sequence.tokens.len() as u64;
    let choice = if params.temperature == 0.0 || params.top_k == Some(1) {
        Choice::Greedy
    } else {
        Choice::Random(Draw {
            temperature: params.temperature,
            top_k: params.top_k.map_or(0, |k| u32::try_from(k).unwrap_or(u32::MAX)),
            top_p: params.top_p,
            min_p: params.min_p,
            uniform: uniform(params.seed, params.choice, position),
        })
    };
    Selection { row, choice, adjustments: adjustments(sequence, eos_token_ids), num_logprobs: params.logprobs }
}

/// Whether a token ends the answer.
pub fn ends(params: &SamplingParams, token: u32, eos_token_ids: &[u32]) -> bool {
    params.stop_token_ids.contains(&token) || (!params.ignore_eos && eos_token_ids.contains(&token))
}

/// Biases, penalties, and the ends that come too early, one entry a token.
fn adjustments(sequence: &Sequence, eos_token_ids: &[u32]) -> Vec<Adjustment> {
    let params = &sequence.params;
    let is_early = sequence.num_generated() < params.min_tokens;
    if params.logit_bias.is_empty() && sequence.counts.is_empty() && !is_early {
        return Vec::new();
    }
    let none = |token| Adjustment { token, bias: 0.0, repetition: 1.0, subtract: 0.0 };
    let mut all: Vec<Adjustment> =
        sequence.counts.iter().map(|(token, count)| penalty(params, *token, *count)).collect();
    all.extend(params.logit_bias.iter().map(|&(token, bias)| Adjustment { bias, ..none(token) }));
    if is_early {
        let model_ends = eos_token_ids.iter().filter(|_| !params.ignore_eos);
        let ends = model_ends.chain(&params.stop_token_ids);
        all.extend(ends.map(|&token| Adjustment { subtract: FORBIDDEN, ..none(token) }));
    }
    all.sort_unstable_by_key(|adjustment| adjustment.token);
    // One entry a token: the device changes each logit once.
    all.dedup_by(|next, kept| {
        let is_same = next.token == kept.token;
        if is_same {
            kept.bias += next.bias;
            kept.repetition *= next.repetition;
            kept.subtract += next.subtract;
        }
        is_same
    });
    all
}

fn penalty(params: &SamplingParams, token: u32, count: TokenCount) -> Adjustment {
    let presence = if count.generated > 0 { params.presence_penalty } else { 0.0 };
    let subtract = presence + params.frequency_penalty * count.generated as f32;
    Adjustment { token, bias: 0.0, repetition: params.repetition_penalty, subtract }
}

/// A multiple of 2⁻²⁴ in [0, 1), so that f32 holds it exactly, that is a pure function of its three counters: SplitMix64's
/// finaliser (Steele, Lea & Flood, 2014) over each in turn.
pub fn uniform(seed: u64, choice: u64, position: u64) -> f32 {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for counter in [seed, choice, position] {
        state = mix(state ^ mix(counter.wrapping_add(0x9e37_79b9_7f4a_7c15)));
    }
    (state >> 40) as f32 / (1u32 << 24) as f32
}

/// SplitMix64's finaliser.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::{EngineRequest, RequestId};

    fn sequence(params: SamplingParams, generated: &[u32]) -> Sequence {
        let request = EngineRequest { prompt: vec![1, 2, 2], params, ..Default::default() };
        let mut sequence = Sequence::new(RequestId(0), request, 16);
        generated.iter().for_each(|&token| sequence.push(token));
        sequence
    }

    fn entry(token: u32, bias: f32, repetition: f32, subtract: f32) -> Adjustment {
        Adjustment { token, bias, repetition, subtract }
    }

    #[test]
    fn penalties_count_the_answer_and_repetition_the_prompt_as_well() {
        let params = SamplingParams {
            repetition_penalty: 1.5,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            logit_bias: vec![(9, -3.0), (7, 1.0)],
            ..Default::default()
        };
        let got = selection(&sequence(params, &[7, 7, 2]), 0, &[]).adjustments;
        let expected =
            [entry(1, 0.0, 1.5, 0.0), entry(2, 0.0, 1.5, 0.75), entry(7, 1.0, 1.5, 1.25), entry(9, -3.0, 1.0, 0.0)];
        assert_eq!(got, expected);
    }

    #[test]
    fn ends_are_forbidden_until_min_tokens() {
        let params = SamplingParams { min_tokens: 2, stop_token_ids: vec![5], ..Default::default() };
        let forbidden = |generated: &[u32]| {
            let selection = selection(&sequence(params.clone(), generated), 0, &[3]);
            selection.adjustments.iter().map(|adjustment| adjustment.token).collect::<Vec<_>>()
        };
        assert_eq!((forbidden(&[]), forbidden(&[8]), forbidden(&[8, 8])), (vec![3, 5], vec![3, 5], vec![]));
    }

    #[test]
    fn a_plain_greedy_request_asks_for_nothing_more() {
        let got = selection(&sequence(SamplingParams::default(), &[4]), 6, &[3]);
        assert_eq!(got, Selection::plain(6, Choice::Greedy));
    }

    #[test]
    fn randomness_is_a_pure_function_of_its_counters() {
        assert_eq!(uniform(1, 0, 5).to_bits(), uniform(1, 0, 5).to_bits());
        let others = [uniform(2, 0, 5), uniform(1, 1, 5), uniform(1, 0, 6)];
        assert!(others.iter().all(|other| *other != uniform(1, 0, 5)));
        let mean: f64 = (0..10_000).map(|position| f64::from(uniform(3, 0, position))).sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.012, "{mean}");
    }
}
