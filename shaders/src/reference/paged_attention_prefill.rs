//! Reference of `paged_attention_prefill.wgsl`.

use super::{CacheView, Scale};

/// The query tokens of one sequence in this step.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// First row in `query`.
    pub row: usize,
    /// Rows.
    pub query_len: usize,
    /// Tokens visible to the last query, itself included.
    pub context_len: usize,
    /// Physical block of each block of the sequence.
    pub block_table: &'a [u32],
}

/// Causal attention of each chunk's queries; returns rows × heads × head_dim, zero for rows of no chunk.
pub fn paged_attention_prefill(
    query: &[f32],
    cache: CacheView<'_>,
    chunks: &[Chunk<'_>],
    num_heads: usize,
    scale: Scale,
) -> Vec<f64> {
    let group = num_heads / cache.num_kv_heads;
    let mut output = vec![0.0; query.len()];
    for chunk in chunks {
        for index in 0..chunk.query_len {
            let visible = chunk.context_len - chunk.query_len + index + 1;
            for head in 0..num_heads {
                let base = ((chunk.row + index) * num_heads + head) * cache.head_dim;
                let query = &query[base..][..cache.head_dim];
                let partial = cache.attend(
                    query,
                    chunk.block_table,
                    scale.first_token(visible - 1)..visible,
                    head / group,
                    scale,
                );
                for (out, weighted) in output[base..].iter_mut().zip(&partial.weighted) {
                    *out = weighted / partial.sum;
                }
            }
        }
    }
    output
}
