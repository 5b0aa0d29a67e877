//! Reference of `paged_attention_decode.wgsl`.

use super::{CacheView, Scale};

/// What one split of one head leaves: Σ weight · v, the largest score, Σ weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// Σ weight · v, weights relative to `maximum`.
    pub weighted: Vec<f64>,
    /// Largest score of the split.
    pub maximum: f64,
    /// Σ weights.
    pub sum: f64,
}

/// By (split, head): attention of the sequence's one query over tokens `first..last` of the split.
/// `splits` are (sequence, first, last), `query` is sequences × heads × head_dim.
pub fn paged_attention_decode(
    query: &[f32],
    cache: CacheView<'_>,
    block_tables: &[&[u32]],
    splits: &[(usize, usize, usize)],
    num_heads: usize,
    scale: Scale,
) -> Vec<Partial> {
    let group = num_heads / cache.num_kv_heads;
    let mut partials = Vec::new();
    for &(sequence, first, last) in splits {
        for head in 0..num_heads {
            let query = &query[(sequence * num_heads + head) * cache.head_dim..][..cache.head_dim];
            partials.push(cache.attend(query, block_tables[sequence], first..last, head / group, scale));
        }
    }
    partials
}
