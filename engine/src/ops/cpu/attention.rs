//! Paged attention on the CPU: prefill and decode are one code path.
//!
//! A task is a tile of queries of one sequence and one K/V head: the f16 keys and values of its context are converted
//! once for all its queries and query heads. A query folds tokens in order from 0 to its own position, so its result does
//! not depend on the chunk or batch that it came in.

use std::cell::RefCell;

use half::f16;
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

thread_local! {
    /// Kept between tiles: fresh pages cost as much as the tile.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One tile's keys and values as f32, and a query's weights.
#[derive(Default)]
struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    weights: Vec<f32>,
}

/// `[queries of the tile, heads of the group, head_dim]`
fn attend_tile(layout: &KvLayout, key_cache: &[f16], value_cache: &[f16], tile: &Tile<'_>, query: &[f32]) -> Vec<f32> {
    let group = layout.num_heads / layout.num_kv_heads;
    let mut output = vec![0.0f32; tile.num_queries * group * layout.head_dim];
    SCRATCH.with_borrow_mut(|scratch| {
        let output = &mut output[..];
        pulp::Arch::new().dispatch(AttendTile { layout, key_cache, value_cache, tile, query, scratch, output });
    });
    output
}

struct AttendTile<'a> {
    layout: &'a KvLayout,
    key_cache: &'a [f16],
    value_cache: &'a [f16],
    tile: &'a Tile<'a>,
    query: &'a [f32],
    scratch: &'a mut Scratch,
    output: &'a mut [f32],
}

impl WithSimd for AttendTile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { layout, key_cache, value_cache, tile, query, scratch, output } = self;
        let head_dim = layout.head_dim;
        let group = layout.num_heads / layout.num_kv_heads;
        let start = tile.sequence.context_len - tile.sequence.query_len + tile.first_query;
        let num_tokens = start + tile.num_queries;
        let keys = gather(layout, key_cache, tile, num_tokens, &mut scratch.keys);
        let values = gather(layout, value_cache, tile, num_tokens, &mut scratch.values);
        let weights = sized(&mut scratch.weights, num_tokens);
        let scale = 1.0 / (head_dim as f32).sqrt();
        for (index, output) in output.chunks_exact_mut(head_dim).enumerate() {
            let (query_index, head) = (index / group, tile.kv_head * group + index % group);
            let row = tile.sequence.first_row + tile.first_query + query_index;
            let query = &query[(row * layout.num_heads + head) * head_dim..][..head_dim];
            let weights = &mut weights[..start + query_index + 1];
            AttendQuery { query, keys, values, scale, weights, output }.with_simd(simd);
        }
    }
}

fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// The first `num_tokens` vectors of one head, in order, as f32.
#[inline(always)]
fn gather<'a>(
    layout: &KvLayout,
    cache: &[f16],
    tile: &Tile<'_>,
    num_tokens: usize,
    buffer: &'a mut Vec<f32>,
) -> &'a [f32] {
    let gathered = sized(buffer, num_tokens * layout.head_dim);
    let blocks = gathered.chunks_mut(layout.block_size * layout.head_dim);
    for (target, &block_id) in blocks.zip(&tile.sequence.block_table) {
        let base = layout.slot_base(block_id as usize * layout.block_size, tile.kv_head);
        for (target, half) in target.iter_mut().zip(&cache[base..]) {
            *target = widened(*half);
        }
    }
    gathered
}

/// f16 to f32 without a branch, so that the loop above becomes vector instructions: the bits moved into place and scaled
/// by 2¹¹² to the right exponent, which is exact for subnormals too; infinities and NaN get their exponent by hand.
#[inline(always)]
fn widened(half: f16) -> f32 {
    let bits = u32::from(half.to_bits());
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let is_finite = bits & 0x7c00 != 0x7c00;
    let special = if is_finite { 0 } else { 0x7f80_0000 };
    f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_to_itself() {
        for bits in 0..=u16::MAX {
            let half = f16::from_bits(bits);
            let (got, expected) = (widened(half), half.to_f32());
            assert!(got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()), "{bits:#06x}: {got}");
        }
    }
}
