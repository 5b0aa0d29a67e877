//! Reference of `paged_attention_reduce.wgsl`.

use super::Partial;

/// Merges the partial results of each sequence: `split_starts[s]..split_starts[s + 1]` are the splits of sequence `s`.
/// Returns sequences × heads × head_dim.
pub fn paged_attention_reduce(partials: &[Partial], split_starts: &[usize], num_heads: usize) -> Vec<f64> {
    let mut output = Vec::new();
    for bounds in split_starts.windows(2) {
        for head in 0..num_heads {
            let splits: Vec<&Partial> =
                (bounds[0]..bounds[1]).map(|split| &partials[split * num_heads + head]).collect();
            let maximum = splits.iter().map(|split| split.maximum).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = splits.iter().map(|split| split.sum * (split.maximum - maximum).exp()).sum();
            for dimension in 0..splits[0].weighted.len() {
                let weighted: f64 =
                    splits.iter().map(|split| split.weighted[dimension] * (split.maximum - maximum).exp()).sum();
                output.push(weighted / sum);
            }
        }
    }
    output
}
