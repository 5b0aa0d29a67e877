//! Paged attention on the CPU: prefill and decode are one code path.
//!
//! A task is a tile of queries of one sequence and one K/V head: the f16 keys and values of its context are converted
//! once for all its queries and query heads. A query folds tokens in order from 0 to its own position, so its result does
//! not depend on the chunk or batch that it came in.

use half::f16;
use half::slice::HalfFloatSliceExt;
use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::dot::dot;
use crate::batch::SequenceInput;
use crate::kv::KvLayout;

/// Queries of one task.
const QUERY_TILE: usize = 32;

struct Tile<'a> {
    sequence: &'a SequenceInput,
    first_query: usize,
    num_queries: usize,
    kv_head: usize,
}

/// Attention of all rows; `query` and `output` are `[rows, heads, head_dim]`.
pub(super) fn paged_attention(
    layout: &KvLayout,
    key_cache: &[f16],
    value_cache: &[f16],
    sequences: &[SequenceInput],
    query: &[f32],
    output: &mut [f32],
) {
    let mut tiles = Vec::new();
    for sequence in sequences {
        for first_query in (0..sequence.query_len).step_by(QUERY_TILE) {
            let num_queries = QUERY_TILE.min(sequence.query_len - first_query);
            for kv_head in 0..layout.num_kv_heads {
                tiles.push(Tile { sequence, first_query, num_queries, kv_head });
            }
        }
    }
    let group = layout.num_heads / layout.num_kv_heads;
    let row_width = layout.num_heads * layout.head_dim;
    let results: Vec<Vec<f32>> =
        tiles.par_iter().map(|tile| attend_tile(layout, key_cache, value_cache, tile, query)).collect();
    for (tile, result) in tiles.iter().zip(results) {
        for (index, heads) in result.chunks_exact(group * layout.head_dim).enumerate() {
            let row = tile.sequence.first_row + tile.first_query + index;
            let column = tile.kv_head * group * layout.head_dim;
            output[row * row_width + column..][..heads.len()].copy_from_slice(heads);
        }
    }
}

/// `[queries of the tile, heads of the group, head_dim]`
fn attend_tile(layout: &KvLayout, key_cache: &[f16], value_cache: &[f16], tile: &Tile<'_>, query: &[f32]) -> Vec<f32> {
    let head_dim = layout.head_dim;
    let group = layout.num_heads / layout.num_kv_heads;
    let start = tile.sequence.context_len - tile.sequence.query_len + tile.first_query;
    let num_tokens = start + tile.num_queries;
    let keys = gather(layout, key_cache, &tile.sequence.block_table, tile.kv_head, num_tokens);
    let values = gather(layout, value_cache, &tile.sequence.block_table, tile.kv_head, num_tokens);
    let scale = 1.0 / (head_dim as f32).sqrt();
    let arch = pulp::Arch::new();
    let mut output = vec![0.0f32; tile.num_queries * group * head_dim];
    let mut weights = vec![0.0f32; num_tokens];
    for (index, output) in output.chunks_exact_mut(head_dim).enumerate() {
        let (query_index, head) = (index / group, tile.kv_head * group + index % group);
        let row = tile.sequence.first_row + tile.first_query + query_index;
        let query = &query[(row * layout.num_heads + head) * head_dim..][..head_dim];
        let visible = start + query_index + 1;
        let weights = &mut weights[..visible];
        arch.dispatch(AttendQuery { query, keys: &keys, values: &values, scale, weights, output });
    }
    output
}

/// The first `num_tokens` vectors of one head, in order, as f32.
fn gather(layout: &KvLayout, cache: &[f16], block_table: &[u32], kv_head: usize, num_tokens: usize) -> Vec<f32> {
    let mut gathered = vec![0.0f32; num_tokens * layout.head_dim];
    for (target, &block_id) in gathered.chunks_mut(layout.block_size * layout.head_dim).zip(block_table) {
        let base = layout.slot_base(block_id as usize * layout.block_size, kv_head);
        cache[base..][..target.len()].convert_to_f32_slice(target);
    }
    gathered
}

/// softmax(scale · q Kᵀ) V of one query over the first `weights.len()` tokens.
struct AttendQuery<'a> {
    query: &'a [f32],
    keys: &'a [f32],
    values: &'a [f32],
    scale: f32,
    weights: &'a mut [f32],
    output: &'a mut [f32],
}

impl WithSimd for AttendQuery<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { query, keys, values, scale, weights, output } = self;
        let mut maximum = f32::NEG_INFINITY;
        for (weight, key) in weights.iter_mut().zip(keys.chunks_exact(query.len())) {
            *weight = dot(simd, query, key) * scale;
            maximum = maximum.max(*weight);
        }
        let mut sum = 0.0;
        for weight in weights.iter_mut() {
            *weight = (*weight - maximum).exp();
            sum += *weight;
        }
        for (&weight, value) in weights.iter().zip(values.chunks_exact(query.len())) {
            for (output, &value) in output.iter_mut().zip(value) {
                *output = weight.mul_add(value, *output);
            }
        }
        for output in output.iter_mut() {
            *output /= sum;
        }
    }
}
