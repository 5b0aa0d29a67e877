//! The kernels' parameter structs, byte for byte as WGSL lays them out in the uniform address space.
//!
//! Filled by the engine's wrappers. Sizes are multiples of 16 and asserted against naga's layout in the portability test.

use bytemuck::{Pod, Zeroable};

macro_rules! params {
    ($(#[$doc:meta] $name:ident { $($field:ident: $type:ty),* $(; $pad:ident: $pads:ty)? })*) => {
        $(
            #[$doc]
            #[repr(C)]
            #[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
            #[expect(missing_docs, reason = "each field is described where the shader declares it")]
            pub struct $name { $(pub $field: $type,)* $(pub $pad: $pads,)? }
            const _: () = assert!(size_of::<$name>() % 16 == 0);
        )*
        /// (kernel family, bytes) of every struct, for the portability test.
        pub const SIZES: &[(&str, usize)] = &[$((stringify!($name), size_of::<$name>())),*];
    };
}

params! {
    /// embedding
    Embedding { num_rows: u32, row_start: u32, num_blocks: u32, scale: f32 }
    /// rms_norm
    RmsNorm { width4: u32, epsilon: f32, accumulate: u32; pad: u32 }
    /// rotate_and_cache
    RotateAndCache { num_heads: u32, num_kv_heads: u32, head_dim: u32, num_pairs: u32, pair_stride: u32, epsilon: f32; pad: [u32; 2] }
    /// add_bias
    AddBias { count4: u32, width4: u32, row_width: u32; pad: u32 }
    /// soft_cap
    SoftCap { count: u32, row_width: u32, cap: f32; pad: u32 }
    /// gather_blocks
    GatherBlocks { block_words4: u32, layer: u32, num_layers: u32; pad: u32 }
    /// scatter_blocks
    ScatterBlocks { block_words4: u32, layer: u32, num_layers: u32; pad: u32 }
    /// paged_attention_decode: `num_items` splits
    PagedAttentionDecode { num_items: u32, num_heads: u32, num_kv_heads: u32, block_table_stride: u32, scale: f32, row_width: u32, soft_cap: f32, window: u32 }
    /// paged_attention_reduce
    PagedAttentionReduce { num_heads: u32; pad: [u32; 3] }
    /// paged_attention_prefill
    PagedAttentionPrefill { num_heads: u32, num_kv_heads: u32, block_table_stride: u32, scale: f32, soft_cap: f32, window: u32; pad: [u32; 2] }
    /// act_and_mul
    ActAndMul { num_blocks: u32, width_blocks: u32, row_width: u32; pad: u32 }
    /// gather_rows
    GatherRows { width4: u32; pad: [u32; 3] }
    /// matmul
    Matmul { num_rows: u32, row_start: u32, num_blocks: u32, num_tokens: u32, output_stride: u32, accumulate: u32; pad: [u32; 2] }
    /// matmul_tiled
    MatmulTiled { num_rows: u32, row_start: u32, num_blocks: u32, num_tokens: u32, output_stride: u32, accumulate: u32, first_token: u32; pad: u32 }
    /// quantize_activations
    QuantizeActivations { num_blocks: u32, row_width: u32; pad: [u32; 2] }
    /// matmul_int8
    MatmulInt8 { num_rows: u32, row_start: u32, num_blocks: u32, num_tokens: u32, output_stride: u32, accumulate: u32; pad: [u32; 2] }
    /// argmax
    Argmax { width: u32; pad: [u32; 3] }
    /// top_k
    TopK { width: u32, k: u32, output_stride: u32; pad: u32 }
    /// adjust_logits
    AdjustLogits { num_entries: u32, row_width: u32; pad: [u32; 2] }
    /// sample
    Sample { width: u32; pad: [u32; 3] }
    /// token_logprobs
    TokenLogprobs { width: u32; pad: [u32; 3] }
}

/// One entry of `adjust_logits`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[expect(missing_docs, reason = "each field is described where the shader declares it")]
pub struct LogitEntry {
    pub index: u32,
    pub bias: f32,
    pub repetition: f32,
    pub subtract: f32,
}

/// One row's draw of `sample`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Pod, Zeroable)]
#[expect(missing_docs, reason = "each field is described where the shader declares it")]
pub struct RowDraw {
    pub kind: u32,
    pub token: u32,
    pub inverse_temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub min_p: f32,
    pub uniform: f32,
    pub pad: u32,
}
