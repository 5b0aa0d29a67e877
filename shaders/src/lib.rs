//! The WGSL kernels of the engine, their catalogue, parameter structs and plain-Rust references.
//!
//! The engine's `kernels/` renders a [`Variant`] and builds a pipeline from it; tests compare each kernel with its
//! [`reference`]. Nothing here needs a GPU, a clock or a file: a kernel's text is part of the binary.
//!
//! Invariant: every shader of [`CATALOGUE`] has entry point `main`, all bindings in group 0 in the listed order, and a
//! baseline variant within WebGPU's default limits.

pub mod limits;
pub mod params;
pub mod reference;
pub mod template;
mod variants;

pub use template::{TemplateError, Value, Variant};
pub use variants::variants;

/// How a kernel uses one binding of group 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// `var<storage, read>`
    Read,
    /// As `Read`; with the placeholder IMAGE a storage image whose texels have so many words, 4 or 1.
    Weights(u32),
    /// `var<storage, read_write>`
    ReadWrite,
    /// `var<uniform>` of the kernel's parameter struct, bound with a dynamic offset. Always the last binding.
    Params,
}

/// Of one name there is one.
impl PartialEq for Shader {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Shader {}

impl std::hash::Hash for Shader {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.name.hash(state);
    }
}

/// One kernel: its text and contract.
#[derive(Debug)]
pub struct Shader {
    /// Stem of the `.wgsl` file, of the wrapper, the reference, the test and the bench.
    pub name: &'static str,
    /// Template text; see [`template`].
    pub source: &'static str,
    /// Bindings of group 0 in order.
    pub bindings: &'static [Binding],
    /// Placeholders that a variant must fill, no more and no fewer.
    pub placeholders: &'static [&'static str],
}

use Binding::{Params, Read, ReadWrite, Weights};

macro_rules! catalogue {
    ($($constant:ident $name:literal [$($binding:expr),*] [$($placeholder:literal),*];)*) => {
        $(
            #[doc = concat!("`", $name, ".wgsl`")]
            pub static $constant: Shader = Shader {
                name: $name,
                source: include_str!(concat!("../wgsl/", $name, ".wgsl")),
                bindings: &[$($binding),*],
                placeholders: &[$($placeholder),*],
            };
        )*
        /// Every kernel there is.
        pub static CATALOGUE: &[&Shader] = &[$(&$constant),*];
    };
}

catalogue! {
    EMBEDDING "embedding" [Weights(4), Weights(1), Read, ReadWrite, Params] ["FORMAT", "IMAGE", "WORKGROUP_SIZE"];
    RMS_NORM "rms_norm" [Read, Read, ReadWrite, ReadWrite, ReadWrite, Params] ["QUANTIZE", "SUM", "WORKGROUP_SIZE"];
    ROTATE_AND_CACHE "rotate_and_cache" [Read, Read, Read, Read, ReadWrite, ReadWrite, ReadWrite, Params]
        ["BLOCK_SIZE", "KV", "NORM", "SUM", "WORKGROUP_SIZE"];
    ADD_BIAS "add_bias" [Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    SOFT_CAP "soft_cap" [ReadWrite, Params] ["WORKGROUP_SIZE"];
    GATHER_BLOCKS "gather_blocks" [Read, Read, Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    SCATTER_BLOCKS "scatter_blocks" [Read, Read, ReadWrite, ReadWrite, Params] ["WORKGROUP_SIZE"];
    PAGED_ATTENTION_DECODE "paged_attention_decode" [Read, Read, Read, Read, Read, Read, ReadWrite, Params]
        ["BLOCK_SIZE", "HEADS", "HEAD_DIM", "KV", "SPLIT", "TEAM", "WORKGROUP_SIZE"];
    PAGED_ATTENTION_REDUCE "paged_attention_reduce" [Read, Read, ReadWrite, ReadWrite, ReadWrite, Params]
        ["HEAD_DIM", "QUANTIZE", "WORKGROUP_SIZE"];
    PAGED_ATTENTION_PREFILL "paged_attention_prefill" [Read, Read, Read, Read, Read, Read, ReadWrite, Params]
        ["BLOCK_SIZE", "HEADS", "HEAD_DIM", "KV", "QUERY_TILE", "SHARE"];
    ACT_AND_MUL "act_and_mul" [Read, ReadWrite, ReadWrite, ReadWrite, Params]
        ["ACTIVATION", "QUANTIZE", "WORKGROUP_SIZE"];
    GATHER_ROWS "gather_rows" [Read, Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    MATMUL "matmul" [Weights(4), Weights(1), Read, ReadWrite, Params]
        ["FORMAT", "IMAGE", "ROWS", "SLICES", "TOKENS", "WORKGROUP_SIZE"];
    MATMUL_TILED "matmul_tiled" [Weights(4), Weights(1), Read, ReadWrite, Params] ["ARITHMETIC", "FORMAT"];
    QUANTIZE_ACTIVATIONS "quantize_activations" [Read, ReadWrite, ReadWrite, Params] ["WORKGROUP_SIZE"];
    MATMUL_INT8 "matmul_int8" [Weights(4), Weights(1), Read, Read, ReadWrite, Params]
        ["FORMAT", "IMAGE", "ROWS", "SHARE", "TOKENS", "WORKGROUP_SIZE"];
    ARGMAX "argmax" [Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    TOP_K "top_k" [Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    ADJUST_LOGITS "adjust_logits" [Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    SAMPLE "sample" [ReadWrite, Read, Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
    TOKEN_LOGPROBS "token_logprobs" [Read, Read, ReadWrite, Params] ["WORKGROUP_SIZE"];
}

/// Parts that shaders include: not kernels, so they have no entry point, reference or test of their own.
pub static INCLUDES: &[(&str, &str)] = &[
    ("dequantize.wgsl", include_str!("../wgsl/dequantize.wgsl")),
    ("weights.wgsl", include_str!("../wgsl/weights.wgsl")),
    ("quantize.wgsl", include_str!("../wgsl/quantize.wgsl")),
    ("store.wgsl", include_str!("../wgsl/store.wgsl")),
    ("score.wgsl", include_str!("../wgsl/score.wgsl")),
    ("sum.wgsl", include_str!("../wgsl/sum.wgsl")),
    ("attend.wgsl", include_str!("../wgsl/attend.wgsl")),
    ("decode_team.wgsl", include_str!("../wgsl/decode_team.wgsl")),
    ("cached_row.wgsl", include_str!("../wgsl/cached_row.wgsl")),
    ("load_row.wgsl", include_str!("../wgsl/load_row.wgsl")),
];
