//! The end of a step in plain Rust: from a row of logits to its token, and how likely it was.
//!
//! Called by `CpuOps::select`, a row a task. The choice is the one that `batch::Draw` defines, as on the device.

use crate::batch::{Adjustment, Choice, Draw, Selected, Selection, TokenLogprob};

/// Answers one selection from its row.
pub(super) fn select_row(row: &[f32], selection: &Selection) -> Selected {
    if row.iter().any(|logit| logit.is_nan()) {
        return Selected::NotANumber;
    }
    let adjusted;
    let scores = if selection.adjustments.is_empty() {
        row
    } else {
        adjusted = adjust(row, &selection.adjustments);
        &adjusted
    };
    let token = match selection.choice {
        Choice::Logits => return Selected::Logits(row.to_vec()),
        Choice::Given(token) => token,
        Choice::Greedy => argmax(scores),
        Choice::Random(draw) => sample(scores, &draw),
    };
    Selected::Token(token, selection.num_logprobs.map(|top| token_logprob(row, token, top)))
}

fn adjust(row: &[f32], adjustments: &[Adjustment]) -> Vec<f32> {
    let mut scores = row.to_vec();
    for adjustment in adjustments {
        let score = &mut scores[adjustment.token as usize];
        let biased = *score + adjustment.bias;
        let penalised = if biased > 0.0 { biased / adjustment.repetition } else { biased * adjustment.repetition };
        *score = penalised - adjustment.subtract;
    }
    scores
}

fn argmax(scores: &[f32]) -> u32 {
    let mut best = 0;
    for (index, &score) in scores.iter().enumerate() {
        if score > scores[best] {
            best = index;
        }
    }
    best as u32
}

/// The draw's token. Weights are sorted only where a truncation looks at their order: a vocabulary takes milliseconds.
fn sample(scores: &[f32], draw: &Draw) -> u32 {
    let largest = scores[argmax(scores) as usize];
    let inverse = 1.0 / draw.temperature;
    let weight = |score: f32| ((score - largest) * inverse).exp();
    let mut kept: Vec<(u32, f32)> = (0..).zip(scores).map(|(token, &score)| (token, weight(score))).collect();
    kept.retain(|(_, weight)| *weight > 0.0 && *weight >= draw.min_p);
    let bound = bound(&kept, draw);
    kept.retain(|(_, weight)| *weight >= bound);
    let total: f64 = kept.iter().map(|(_, weight)| f64::from(*weight)).sum();
    let target = f64::from(draw.uniform) * total;
    let mut sum = 0.0;
    let passes = |(_, weight): &&(u32, f32)| {
        sum += f64::from(*weight);
        sum > target
    };
    let drawn = kept.iter().find(passes).or(kept.last());
    drawn.map_or_else(|| argmax(scores), |(token, _)| *token)
}

/// The least weight that top-k and top-p leave.
fn bound(kept: &[(u32, f32)], draw: &Draw) -> f32 {
    let top_k = draw.top_k as usize;
    let cuts_k = top_k > 0 && top_k < kept.len();
    if !cuts_k && draw.top_p >= 1.0 {
        return 0.0;
    }
    let mut weights: Vec<f32> = kept.iter().map(|(_, weight)| *weight).collect();
    if cuts_k {
        let (_, kth, _) = weights.select_nth_unstable_by(top_k - 1, |a, b| b.total_cmp(a));
        let kth = *kth;
        weights.retain(|weight| *weight >= kth);
    }
    weights.sort_unstable_by(|a, b| b.total_cmp(a));
    let least = weights.last().copied().unwrap_or(0.0);
    if draw.top_p >= 1.0 {
        return least;
    }
    let wanted = weights.iter().map(|weight| f64::from(*weight)).sum::<f64>() * f64::from(draw.top_p);
    let mut sum = 0.0;
    let reaches = |weight: &&f32| {
        sum += f64::from(**weight);
        sum >= wanted
    };
    weights.iter().find(reaches).copied().unwrap_or(least)
}

fn token_logprob(row: &[f32], token: u32, top: usize) -> TokenLogprob {
    let logit = row[token as usize];
    let largest = row.iter().fold(f32::NEG_INFINITY, |largest, &x| largest.max(x));
    let sum: f64 = row.iter().map(|&x| f64::from(x - largest).exp()).sum();
    let log_sum = largest + sum.ln() as f32;
    let rank = row.iter().filter(|&&x| x > logit).count() as u32 + 1;
    let top = top_k(row, top).into_iter().map(|(token, logit)| (token, logit - log_sum)).collect();
    TokenLogprob { logprob: logit - log_sum, rank, top }
}

/// The `k` largest, largest first, the lowest index of a tie.
fn top_k(row: &[f32], k: usize) -> Vec<(u32, f32)> {
    if k == 0 {
        return Vec::new();
    }
    let mut indexed: Vec<(u32, f32)> = (0..).zip(row.iter().copied()).collect();
    let k = k.min(indexed.len());
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    indexed.select_nth_unstable_by(k - 1, order);
    indexed.truncate(k);
    indexed.sort_unstable_by(order);
    indexed
}

#[cfg(test)]
mod tests {
    use super::*;
    use shaders::params::RowDraw;

    const ROW: [f32; 6] = [0.0, 2.0, 1.0, -3.0, 1.0, 0.5];

    fn draw(temperature: f32, top_k: u32, top_p: f32, min_p: f32) -> Draw {
        Draw { temperature, top_k, top_p, min_p, uniform: 0.0 }
    }

    #[test]
    fn frequencies_follow_the_reference_through_every_truncation() {
        let all = [
            draw(0.8, 0, 1.0, 0.0),
            draw(1.0, 2, 1.0, 0.0),
            draw(1.3, 0, 0.7, 0.0),
            draw(1.0, 0, 1.0, 0.3),
            draw(2.0, 4, 0.9, 0.1),
        ];
        for truncation in all {
            let reference = RowDraw {
                kind: 1,
                inverse_temperature: 1.0 / truncation.temperature,
                top_k: truncation.top_k,
                top_p: truncation.top_p,
                min_p: truncation.min_p,
                ..Default::default()
            };
            let mut counts = [0u32; ROW.len()];
            for position in 0..20_000 {
                let uniform = crate::sampler::uniform(7, 0, position);
                counts[sample(&ROW, &Draw { uniform, ..truncation }) as usize] += 1;
            }
            let mut expected = [0.0; ROW.len()];
            for (token, from, to) in shaders::reference::sample(&ROW, &reference) {
                expected[token as usize] = to - from;
            }
            for (count, expected) in counts.iter().zip(expected) {
                // Four standard deviations of a binomial at 20,000 draws are below 0.0142.
                let drawn = f64::from(*count) / 20_000.0;
                assert!((drawn - expected).abs() < 0.0142, "{truncation:?}: {counts:?}");
                assert!(expected > 0.0 || *count == 0, "{truncation:?}: a token that is cut off was drawn");
            }
        }
    }

    #[test]
    fn ties_stay_together_and_the_lowest_index_is_the_greedy_one() {
        let kept = |draw| shaders_kept(&draw);
        assert_eq!(kept(draw(1.0, 2, 1.0, 0.0)), [1, 2, 4]);
        assert_eq!(argmax(&[1.0, 3.0, 3.0]), 1);
        assert_eq!(top_k(&ROW, 3), [(1, 2.0), (2, 1.0), (4, 1.0)]);
    }

    fn shaders_kept(truncation: &Draw) -> Vec<u32> {
        let mut kept: Vec<u32> =
            (0..1000).map(|i| sample(&ROW, &Draw { uniform: i as f32 / 1000.0, ..*truncation })).collect();
        kept.dedup();
        kept
    }

    #[test]
    fn adjustments_move_the_choice_and_not_the_log_probabilities() {
        let forbid = Adjustment { token: 1, bias: 0.0, repetition: 1.0, subtract: 1e30 };
        let favour = Adjustment { token: 3, bias: 4.5, repetition: 1.0, subtract: 0.0 };
        let mut selection = Selection { num_logprobs: Some(2), ..Selection::plain(0, Choice::Greedy) };
        selection.adjustments = vec![forbid, favour];
        let Selected::Token(token, Some(logprob)) = select_row(&ROW, &selection) else { panic!("no token") };
        let (logit, log_sum, rank) = shaders::reference::token_logprobs(&ROW, 3);
        assert_eq!((token, logprob.rank, logprob.top[0].0), (3, rank, 1));
        assert!((f64::from(logprob.logprob) - (logit - log_sum)).abs() < 1e-6);
    }

    #[test]
    fn a_row_with_nan_has_no_token() {
        let selection = Selection::plain(0, Choice::Random(draw(1.0, 0, 1.0, 0.0)));
        assert_eq!(select_row(&[0.0, f32::NAN], &selection), Selected::NotANumber);
    }
}
