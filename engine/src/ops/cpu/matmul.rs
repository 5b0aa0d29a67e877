//! Matrix products over quantised rows in the memory map.
//!
//! A few rows are unpacked into a scratch and dotted with every token, four at a time; `pulp` compiles the loops for the
//! widest vector unit at hand. Weights are never expanded beyond the rows at work.

use std::ops::RangeInclusive;

use pulp::{Simd, WithSimd};
use rayon::prelude::*;

use super::super::Write;
use super::dot::{dot, dot_tile};
use super::matrix::Matrix;
use crate::model_file::dequantize_row;

/// Rows and tokens of a tile: twelve accumulators and three row vectors fit sixteen vector registers.
const TILE_ROWS: usize = 3;
const TILE_TOKENS: usize = 4;
/// Rows in the scratch, whole tiles: each passage over the tokens, which come from the second-level cache, serves all of them.
const SCRATCH_ROWS: usize = 9;
/// Tokens whose products are transposed together: their output rows lie a power of two apart and must not crowd one set of
/// the cache.
const TRANSPOSE_TOKENS: usize = 8;
/// Tasks a thread: few, since a decode step has hundreds of small products, yet enough that the threads finish together; more
/// where each would be long.
const TASKS_PER_THREAD: RangeInclusive<usize> = 4..=16;
/// Multiply-adds of a task where there may be more tasks.
const TASK_WORK: usize = 1 << 18;

/// output (tokens × rows) (+)= input (tokens × columns) · matrixᵀ. `products` is a scratch that is kept between calls, so
/// that the system is not asked for pages at each.
pub(super) fn matmul(matrix: &Matrix, input: &[f32], output: &mut [f32], products: &mut Vec<f32>, write: Write) {
    let num_tokens = input.len() / matrix.columns;
    // A chunk that is not a prompt's last wants no logits.
    if num_tokens == 0 {
        return;
    }
    // Tasks own rows, the output is token-major: products go to a row-major scratch, then are transposed.
    let len = num_tokens * matrix.rows;
    if products.len() < len {
        products.resize(len, 0.0);
    }
    let products = &mut products[..len];
    let threads = rayon::current_num_threads();
    let (fewest, most) = TASKS_PER_THREAD.into_inner();
    let tasks = threads * (len * matrix.columns / (threads * TASK_WORK)).clamp(fewest, most);
    let rows_per_task = matrix.rows.div_ceil(tasks).next_multiple_of(SCRATCH_ROWS);
    let arch = pulp::Arch::new();
    products.par_chunks_mut(rows_per_task * num_tokens).enumerate().for_each_init(
        || vec![0.0f32; matrix.columns * SCRATCH_ROWS],
        |scratch, (task, products)| {
            arch.dispatch(RowsTimesTokens { matrix, first_row: task * rows_per_task, scratch, input, products });
        },
    );
    let store = |output: &mut f32, product: f32| {
        *output = if write == Write::Accumulate { *output + product } else { product };
    };
    if num_tokens == 1 {
        output.iter_mut().zip(products).for_each(|(output, product)| store(output, *product));
        return;
    }
    let products = &*products;
    let alone = super::ALONE_VALUES / (TRANSPOSE_TOKENS * matrix.rows);
    let blocks = output.par_chunks_mut(TRANSPOSE_TOKENS * matrix.rows).enumerate();
    blocks.with_min_len(alone).for_each(|(block, output)| {
        let block_tokens = output.len() / matrix.rows;
        for row in 0..matrix.rows {
            let products = &products[row * num_tokens + block * TRANSPOSE_TOKENS..][..block_tokens];
            for (token, &product) in products.iter().enumerate() {
                store(&mut output[token * matrix.rows + row], product);
            }
        }
    });
}

/// Consecutive rows dotted with every token; `products` is row-major. A struct and not a closure: `pulp` compiles
/// `with_simd` for the vector unit only when the compiler is bound to inline it.
struct RowsTimesTokens<'a> {
    matrix: &'a Matrix,
    first_row: usize,
    scratch: &'a mut [f32],
    input: &'a [f32],
    products: &'a mut [f32],
}

impl WithSimd for RowsTimesTokens<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { matrix, first_row, scratch, input, products } = self;
        let columns = matrix.columns;
        let num_tokens = input.len() / columns;
        for (block, products) in products.chunks_mut(SCRATCH_ROWS * num_tokens).enumerate() {
            let num_rows = products.len() / num_tokens;
            let scratch = &mut scratch[..num_rows * columns];
            for (offset, scratch) in scratch.chunks_exact_mut(columns).enumerate() {
                let row = first_row + block * SCRATCH_ROWS + offset;
                let (storage, bytes) = matrix.row(row);
                dequantize_row(storage, bytes, scratch);
            }
            let tiles = input.chunks(TILE_TOKENS * columns);
            for (tile, tokens) in tiles.enumerate() {
                tokens_times_rows(simd, scratch, tokens, columns, &mut products[tile * TILE_TOKENS..], num_tokens);
            }
        }
    }
}

/// The rows of the scratch with up to [`TILE_TOKENS`] tokens; row r's product with the first token lies at r · `stride`.
#[inline(always)]
fn tokens_times_rows<S: Simd>(
    simd: S,
    rows: &[f32],
    tokens: &[f32],
    columns: usize,
    products: &mut [f32],
    stride: usize,
) {
    let num_tokens = tokens.len() / columns;
    let mut row = 0;
    for tile in rows.chunks_exact(TILE_ROWS * columns) {
        let weights: [&[f32]; TILE_ROWS] = std::array::from_fn(|row| &tile[row * columns..][..columns]);
        if num_tokens == TILE_TOKENS {
            let tokens: [&[f32]; TILE_TOKENS] = std::array::from_fn(|token| &tokens[token * columns..][..columns]);
            for sums in dot_tile(simd, weights, tokens) {
                products[row * stride..][..TILE_TOKENS].copy_from_slice(&sums);
                row += 1;
            }
            continue;
        }
        for (token, x) in tokens.chunks_exact(columns).enumerate() {
            for (offset, [sum]) in dot_tile(simd, weights, [x]).into_iter().enumerate() {
                products[(row + offset) * stride + token] = sum;
            }
        }
        row += TILE_ROWS;
    }
    for weights in rows.chunks_exact(columns).skip(row) {
        for (token, x) in tokens.chunks_exact(columns).enumerate() {
            products[row * stride + token] = dot(simd, weights, x);
        }
        row += 1;
    }
}

/// Σ a·a.
pub(super) struct SumOfSquares<'a>(pub(super) &'a [f32]);

impl WithSimd for SumOfSquares<'_> {
    type Output = f32;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> f32 {
        dot(simd, self.0, self.0)
    }
}
