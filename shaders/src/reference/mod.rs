//! What each kernel computes, as plain loops with f64 accumulation: one file a kernel, same stem, same argument order.
//!
//! Called by tests only. The references face hand-computed cases and a NumPy fixture (`tests/golden/kernels.json` of the
//! root package), so that they do not certify themselves.

mod act_and_mul;
mod add_bias;
mod adjust_logits;
mod argmax;
mod embedding;
mod gather_blocks;
mod gather_rows;
mod matmul;
mod matmul_int8;
mod matmul_tiled;
mod paged_attention_decode;
mod paged_attention_prefill;
mod paged_attention_reduce;
mod quantize_activations;
mod rms_norm;
mod rotate_and_cache;
mod sample;
mod scatter_blocks;
mod soft_cap;
mod token_logprobs;
mod top_k;

pub use act_and_mul::act_and_mul;
pub use add_bias::add_bias;
pub use adjust_logits::adjust_logits;
pub use argmax::argmax;
pub use embedding::embedding;
pub use gather_blocks::gather_blocks;
pub use gather_rows::gather_rows;
pub use matmul::matmul;
pub use matmul_int8::matmul_int8;
pub use matmul_tiled::matmul_tiled;
pub use paged_attention_decode::{Partial, paged_attention_decode};
pub use paged_attention_prefill::{Chunk, paged_attention_prefill};
pub use paged_attention_reduce::paged_attention_reduce;
pub use quantize_activations::{QuantizedRow, quantize_activations};
pub use rms_norm::rms_norm;
pub use rotate_and_cache::{HeadShape, TakenApart, rotate_and_cache, round_row};
pub use sample::sample;
pub use scatter_blocks::scatter_blocks;
pub use soft_cap::soft_cap;
pub use token_logprobs::token_logprobs;
pub use top_k::top_k;

/// What is done to scores, and which of them count.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    /// They are multiplied by this.
    pub factor: f64,
    /// Then s becomes cap · tanh(s / cap); 0 leaves it.
    pub soft_cap: f64,
    /// Tokens that a query sees, itself included; 0 for all before it.
    pub window: usize,
}

impl Scale {
    /// Multiplied by `factor` and no more.
    pub fn plain(factor: f64) -> Self {
        Self { factor, soft_cap: 0.0, window: 0 }
    }

    /// The first token that the query at `position` sees.
    pub fn first_token(&self, position: usize) -> usize {
        if self.window == 0 { 0 } else { (position + 1).saturating_sub(self.window) }
    }
}

/// One layer's K and V cache as f32, in the device layout `[block, kv_head, offset, head_dim]`, with its shape.
#[derive(Clone, Copy, Debug)]
pub struct CacheView<'a> {
    /// Keys.
    pub key: &'a [f32],
    /// Values.
    pub value: &'a [f32],
    /// Heads of K and V.
    pub num_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// Tokens a block.
    pub block_size: usize,
}

impl CacheView<'_> {
    /// Start of `token`'s vector of `kv_head`, through `block_table`.
    pub fn base(&self, block_table: &[u32], token: usize, kv_head: usize) -> usize {
        let block_id = block_table[token / self.block_size] as usize;
        ((block_id * self.num_kv_heads + kv_head) * self.block_size + token % self.block_size) * self.head_dim
    }

    /// The score of a query and a key, scaled, and capped where there is a cap.
    fn score(&self, query: &[f32], base: usize, scale: Scale) -> f64 {
        let dot: f64 = query.iter().zip(&self.key[base..]).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum();
        match scale.soft_cap {
            0.0 => dot * scale.factor,
            cap => cap * (dot * scale.factor / cap).tanh(),
        }
    }

    /// softmax(scale · q Kᵀ) V over tokens `first..last` of one head: (maximum score, Σ weights, Σ weight · v),
    /// weights relative to the maximum.
    fn attend(
        &self,
        query: &[f32],
        block_table: &[u32],
        tokens: std::ops::Range<usize>,
        kv_head: usize,
        scale: Scale,
    ) -> Partial {
        let bases: Vec<usize> = tokens.map(|token| self.base(block_table, token, kv_head)).collect();
        let scores: Vec<f64> = bases.iter().map(|&base| self.score(query, base, scale)).collect();
        let maximum = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut sum = 0.0;
        let mut weighted = vec![0.0; self.head_dim];
        for (&base, &score) in bases.iter().zip(&scores) {
            let weight = (score - maximum).exp();
            sum += weight;
            for (acc, &v) in weighted.iter_mut().zip(&self.value[base..]) {
                *acc += weight * f64::from(v);
            }
        }
        Partial { weighted, maximum, sum }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_of_three_four_is_by_hand() {
        // mean of squares 12.5, root 3.5355339
        let out = rms_norm(&[3.0, 4.0], &[1.0, 2.0], 0.0);
        assert!((out[0] - 0.848_528_137).abs() < 1e-8 && (out[1] - 2.262_741_7).abs() < 1e-7, "{out:?}");
    }

    #[test]
    fn rotation_by_a_quarter_turn_swaps_a_pair_of_queries_and_keys() {
        let shape = HeadShape { num_heads: 1, num_kv_heads: 1, head_dim: 2, pair_stride: 1 };
        let apart = rotate_and_cache(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &[[0.0, 1.0]], None, shape);
        assert_eq!(apart, [[-2.0, 1.0], [-4.0, 3.0], [5.0, 6.0]].map(Vec::from));
    }

    #[test]
    fn a_window_of_one_token_sees_itself() {
        let cache = CacheView { key: &[1.0, 1.0], value: &[10.0, 30.0], num_kv_heads: 1, head_dim: 1, block_size: 1 };
        let chunk = Chunk { row: 0, query_len: 2, context_len: 2, block_table: &[1, 0] };
        let scale = Scale { window: 1, ..Scale::plain(0.5) };
        assert_eq!(paged_attention_prefill(&[2.0, 2.0], cache, &[chunk], 1, scale), vec![30.0, 10.0]);
    }

    #[test]
    fn attention_over_equal_keys_is_the_mean_of_values() {
        // Two tokens in two shuffled blocks of one: equal scores, so the weights are one half each.
        let cache = CacheView { key: &[1.0, 1.0], value: &[10.0, 30.0], num_kv_heads: 1, head_dim: 1, block_size: 1 };
        let chunk = Chunk { row: 0, query_len: 1, context_len: 2, block_table: &[1, 0] };
        assert_eq!(paged_attention_prefill(&[2.0], cache, &[chunk], 1, Scale::plain(0.5)), vec![20.0]);
        let partials = paged_attention_decode(&[2.0], cache, &[&[1, 0]], &[(0, 0, 1), (0, 1, 2)], 1, Scale::plain(0.5));
        assert_eq!(paged_attention_reduce(&partials, &[0, 2], 1), vec![20.0]);
    }

    #[test]
    fn blocks_are_gathered_layer_by_layer_and_scattered_back() {
        let caches = [(vec![1, 2, 3, 4], vec![5, 6, 7, 8]), (vec![10, 20, 30, 40], vec![50, 60, 70, 80])];
        let payloads = gather_blocks(&caches, &[1, 0], 2);
        assert_eq!(payloads, [3, 4, 7, 8, 30, 40, 70, 80, 1, 2, 5, 6, 10, 20, 50, 60]);
        let mut back = vec![(vec![0; 4], vec![0; 4]); 2];
        scatter_blocks(&payloads, &[1, 0], &mut back, 2);
        assert_eq!(back, caches);
    }

    #[test]
    fn activations_of_one_times_two_are_by_hand() {
        let silu = act_and_mul(&[1.0, 2.0], 1, false);
        assert!((silu[0] - 1.462_117_157).abs() < 1e-8);
        let gelu = act_and_mul(&[1.0, 2.0], 1, true);
        assert!((gelu[0] - 1.682_383_984).abs() < 1e-8);
    }

    #[test]
    fn matrix_products_are_by_hand() {
        // [[1, 2], [3, 4]] times (5, 6)
        assert_eq!(matmul(&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0], 2, None), vec![17.0, 39.0]);
        assert_eq!(matmul(&[1.0, 2.0, 3.0, 4.0], &[5.0, 6.0], 2, Some(&[1.0, 1.0])), vec![18.0, 40.0]);
    }

    #[test]
    fn rounding_to_int8_is_by_hand() {
        let mut row = [0.0f32; 32];
        row[0] = -254.0;
        row[1] = 3.1;
        let quantized = quantize_activations(&row);
        assert_eq!((quantized.codes[0], quantized.codes[1], quantized.scales[0]), (-127, 2, 2.0));
        let mut weights = [0.0f32; 32];
        weights[0] = 1.0;
        weights[1] = 10.0;
        assert_eq!(matmul_int8(&weights, &quantized, 32, None), vec![-254.0 + 40.0]);
    }

    #[test]
    fn ties_go_to_the_lowest_index() {
        assert_eq!(argmax(&[1.0, 3.0, 3.0], 3), vec![Some((1, 3.0))]);
        assert_eq!(argmax(&[1.0, f32::NAN, 3.0], 3), vec![None]);
        assert_eq!(top_k(&[2.0, 5.0, 2.0, 2.0], 4, 2), vec![Some(vec![(1, 5.0), (0, 2.0)])]);
    }
}
