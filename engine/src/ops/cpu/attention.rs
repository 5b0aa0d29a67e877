//! Paged attention on the CPU: prefill and decode are one code path.
//!
//! A task is a tile of queries of one sequence and one K/V head: the keys and values of its context are converted
//! once for all its queries and query heads. A query folds tokens in order from 0 to its own position, so its result does
//! not depend on the chunk or batch that it came in.

use std::cell::RefCell;
use std::ops::Range;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::cached_row;
use super::exp::{exp, soft_cap};
use crate::batch::SequenceInput;
use crate::kv::{BLOCK_SIZE, KvLayout};
use crate::ops::Attention;

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
    attention: &Attention,
    key_cache: &[u16],
    value_cache: &[u16],
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
        tiles.par_iter().map(|tile| attend_tile(layout, attention, key_cache, value_cache, tile, query)).collect();
    for (tile, result) in tiles.iter().zip(results) {
        for (index, heads) in result.chunks_exact(group * layout.head_dim).enumerate() {
            let row = tile.sequence.first_row + tile.first_query + index;
            let column = tile.kv_head * group * layout.head_dim;
            output[row * row_width + column..][..heads.len()].copy_from_slice(heads);
        }
    }
}

thread_local! {
    /// Kept between tiles, so that none is zeroed before it is overwritten.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// One tile's keys and values as f32, and its queries' weights.
#[derive(Default)]
struct Scratch {
    /// `[block, head_dim, 16]`: sixteen tokens' keys side by side, so that a vector register holds as many scores.
    keys: Vec<f32>,
    /// One block's keys in the cache's order.
    block: Vec<f32>,
    /// `[token, head_dim]`
    values: Vec<f32>,
    /// `[ROWS, tokens]`
    weights: Vec<f32>,
}

/// A scratch larger than this, of a long context, is given back.
const MAX_KEPT_VALUES: usize = 4 << 20;
/// Tokens whose scores are computed together: those of a block.
const LANES: usize = BLOCK_SIZE;
/// Queries that share the loads of the keys.
const ROWS: usize = 4;
/// Widest run of values that is accumulated in registers.
const WIDE: usize = 32;

/// `[queries of the tile, heads of the group, head_dim]`
fn attend_tile(
    layout: &KvLayout,
    attention: &Attention,
    key_cache: &[u16],
    value_cache: &[u16],
    tile: &Tile<'_>,
    query: &[f32],
) -> Vec<f32> {
    let group = layout.num_heads / layout.num_kv_heads;
    let mut output = vec![0.0f32; tile.num_queries * group * layout.head_dim];
    SCRATCH.with_borrow_mut(|scratch| {
        let output = &mut output[..];
        let tile =
            AttendTile { layout, attention, key_cache, value_cache, tile, query, scratch: &mut *scratch, output };
        pulp::Arch::new().dispatch(tile);
        if scratch.values.len() > MAX_KEPT_VALUES {
            *scratch = Scratch::default();
        }
    });
    output
}

struct AttendTile<'a> {
    layout: &'a KvLayout,
    attention: &'a Attention,
    key_cache: &'a [u16],
    value_cache: &'a [u16],
    tile: &'a Tile<'a>,
    query: &'a [f32],
    scratch: &'a mut Scratch,
    output: &'a mut [f32],
}

impl WithSimd for AttendTile<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _simd: S) {
        let Self { layout, attention, key_cache, value_cache, tile, query, scratch, output } = self;
        let head_dim = layout.head_dim;
        let group = layout.num_heads / layout.num_kv_heads;
        let start = tile.sequence.context_len - tile.sequence.query_len + tile.first_query;
        // Whole blocks before the first query's window are not looked at.
        let first_block = attention.first_token(start) / LANES;
        let tokens = first_block * LANES..start + tile.num_queries;
        let keys = gather_keys(layout, key_cache, tile, &tokens, &mut scratch.block, &mut scratch.keys);
        let values = gather_values(layout, value_cache, tile, &tokens, &mut scratch.values);
        let stride = tokens.len().next_multiple_of(LANES);
        let weights = sized(&mut scratch.weights, ROWS * stride);
        for (part, output) in output.chunks_mut(ROWS * head_dim).enumerate() {
            let first = part * ROWS;
            let rows = output.len() / head_dim;
            // Rows past the last repeat it, so that there is one loop.
            let query_of = |index: usize| {
                let index = first + index.min(rows - 1);
                let row = tile.sequence.first_row + tile.first_query + index / group;
                &query[(row * layout.num_heads + tile.kv_head * group + index % group) * head_dim..][..head_dim]
            };
            let visible_to = |index: usize| start + (first + index) / group + 1 - tokens.start;
            let queries: [&[f32]; ROWS] = std::array::from_fn(query_of);
            let blocks = keys.chunks_exact(LANES * head_dim).take(visible_to(rows - 1).div_ceil(LANES));
            for (block, keys) in blocks.enumerate() {
                for (row, scores) in scores_of(queries, keys).into_iter().enumerate() {
                    weights[row * stride + block * LANES..][..LANES].copy_from_slice(&scores);
                }
            }
            for (index, output) in output.chunks_exact_mut(head_dim).enumerate() {
                let visible = visible_to(index);
                let weights = &mut weights[index * stride..][..visible];
                // What lies before the query's own window weighs nothing; the sums stay in the order of blocks.
                let unseen = attention.first_token(tokens.start + visible - 1) - tokens.start;
                weights[..unseen].fill(f32::NEG_INFINITY);
                let sum = softmax(weights, attention);
                weighted_sum(&weights[unseen..], &values[unseen * head_dim..], output);
                output.iter_mut().for_each(|output| *output /= sum);
            }
        }
    }
}

/// q · k of each query with each of a block's keys, summed over the head in order.
#[inline(always)]
fn scores_of(queries: [&[f32]; ROWS], keys: &[f32]) -> [[f32; LANES]; ROWS] {
    let mut scores = [[0.0f32; LANES]; ROWS];
    for (i, keys) in keys.as_chunks::<LANES>().0.iter().enumerate() {
        for row in 0..ROWS {
            let q = queries[row][i];
            for lane in 0..LANES {
                scores[row][lane] = q.mul_add(keys[lane], scores[row][lane]);
            }
        }
    }
    scores
}

/// Scores become exp(scale · (score − largest)), after the soft cap where there is one; returns their sum, by lanes of the
/// token's number.
#[inline(always)]
fn softmax(weights: &mut [f32], attention: &Attention) -> f32 {
    let mut scale = attention.scale;
    if attention.soft_cap > 0.0 {
        weights.iter_mut().for_each(|weight| *weight = capped(*weight, scale, attention.soft_cap));
        scale = 1.0;
    }
    // A NaN is no maximum here; it comes out of the exponential.
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for weights in weights.chunks(LANES) {
        for (weight, lane) in weights.iter().zip(&mut lanes) {
            *lane = if *weight > *lane { *weight } else { *lane };
        }
    }
    let largest = lanes.iter().fold(f32::NEG_INFINITY, |largest, &score| largest.max(score));
    let mut sums = [0.0f32; LANES];
    for weights in weights.chunks_mut(LANES) {
        for (weight, sum) in weights.iter_mut().zip(&mut sums) {
            *weight = exp((*weight - largest) * scale);
            *sum += *weight;
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

/// A score through the soft cap; one that is not seen stays so.
#[inline(always)]
fn capped(score: f32, scale: f32, cap: f32) -> f32 {
    if score == f32::NEG_INFINITY { score } else { soft_cap(score * scale, cap) }
}

/// Σ weight · value, over tokens in order.
#[inline(always)]
fn weighted_sum(weights: &[f32], values: &[f32], output: &mut [f32]) {
    let head_dim = output.len();
    let (wide, narrow) = output.as_chunks_mut::<WIDE>();
    for (part, output) in wide.iter_mut().enumerate() {
        *output = weighted_run(weights, &values[part * WIDE..], head_dim);
    }
    let done = head_dim / WIDE * WIDE;
    // Heads are whole eights (the kernels' head widths).
    for (part, output) in narrow.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *output = weighted_run(weights, &values[done + part * 8..], head_dim);
    }
}

#[inline(always)]
fn weighted_run<const WIDTH: usize>(weights: &[f32], values: &[f32], stride: usize) -> [f32; WIDTH] {
    let mut sums = [0.0f32; WIDTH];
    for (token, &weight) in weights.iter().enumerate() {
        let values: &[f32; WIDTH] = values[token * stride..].first_chunk().unwrap_or(&[0.0; WIDTH]);
        for i in 0..WIDTH {
            sums[i] = weight.mul_add(values[i], sums[i]);
        }
    }
    sums
}

fn sized(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// The keys of one head of these tokens, which begin with a block, block by block, `[head_dim, 16]` each. Slots past the context hold what the block's last user left.
#[inline(always)]
fn gather_keys<'a>(
    layout: &KvLayout,
    cache: &[u16],
    tile: &Tile<'_>,
    tokens: &Range<usize>,
    block: &mut Vec<f32>,
    buffer: &'a mut Vec<f32>,
) -> &'a [f32] {
    let block_values = LANES * layout.head_dim;
    let block = sized(block, block_values);
    let gathered = sized(buffer, tokens.len().div_ceil(LANES) * block_values);
    let block_ids = &tile.sequence.block_table[tokens.start / LANES..];
    for (target, &block_id) in gathered.chunks_exact_mut(block_values).zip(block_ids) {
        // Widened first, in order, which is vector work; then moved, which is not.
        cached_row::load(layout, cache, block_id, tile.kv_head, block);
        for (i, target) in target.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            for lane in 0..LANES {
                target[lane] = block[lane * layout.head_dim + i];
            }
        }
    }
    gathered
}

/// The values of one head of these tokens, which begin with a block, in order.
#[inline(always)]
fn gather_values<'a>(
    layout: &KvLayout,
    cache: &[u16],
    tile: &Tile<'_>,
    tokens: &Range<usize>,
    buffer: &'a mut Vec<f32>,
) -> &'a [f32] {
    let gathered = sized(buffer, tokens.len() * layout.head_dim);
    let blocks = gathered.chunks_mut(LANES * layout.head_dim);
    for (target, &block_id) in blocks.zip(&tile.sequence.block_table[tokens.start / LANES..]) {
        cached_row::load(layout, cache, block_id, tile.kv_head, target);
    }
    gathered
}
