//! Reference of `sample.wgsl`.

use crate::params::RowDraw;

/// One row's tokens with the bounds of `uniform` at which each is drawn: (token, from, to), in the order of their indices.
/// A kernel's token is right where its interval, widened by rounding, holds the draw's `uniform`.
pub fn sample(scores: &[f32], draw: &RowDraw) -> Vec<(u32, f64, f64)> {
    let largest = scores.iter().fold(f32::NEG_INFINITY, |largest, &score| largest.max(score));
    let weight = |score: f32| (f64::from(score - largest) * f64::from(draw.inverse_temperature)).exp();
    let mut kept: Vec<(u32, f64)> = (0..).zip(scores).map(|(index, &score)| (index, weight(score))).collect();
    kept.retain(|(_, weight)| *weight >= f64::from(draw.min_p) && *weight > 1e-38);
    let mut sorted: Vec<f64> = kept.iter().map(|(_, weight)| *weight).collect();
    sorted.sort_by(|a, b| b.total_cmp(a));
    if draw.top_k > 0 && (draw.top_k as usize) < sorted.len() {
        let kth = sorted[draw.top_k as usize - 1];
        sorted.retain(|weight| *weight >= kth);
    }
    if draw.top_p < 1.0 {
        let wanted = sorted.iter().sum::<f64>() * f64::from(draw.top_p);
        let mut sum = 0.0;
        let last = sorted.iter().position(|weight| {
            sum += weight;
            sum >= wanted
        });
        let bound = last.map_or(0.0, |last| sorted[last]);
        sorted.retain(|weight| *weight >= bound);
    }
    let bound = sorted.last().copied().unwrap_or(0.0);
    kept.retain(|(_, weight)| *weight >= bound);
    let total: f64 = kept.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    kept.into_iter()
        .map(|(token, weight)| {
            let from = sum / total;
            sum += weight;
            (token, from, sum / total)
        })
        .collect()
}
