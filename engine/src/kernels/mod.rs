//! The `wgpu` device: memory, the encoder that records a step, and a typed wrapper for each WGSL kernel.
//!
//! Called by `ops/wgpu.rs` only. A wrapper checks shapes, fills the parameter struct and hands the encoder a dispatch.

mod act_and_mul;
mod add_bias;
mod adjust_logits;
mod argmax;
mod embedding;
mod encoder;
mod gather_blocks;
mod gather_rows;
mod gpu;
mod image;
mod matmul;
mod matmul_int8;
mod paged_attention_decode;
mod paged_attention_prefill;
mod paged_attention_reduce;
mod plan;
mod profile;
mod quantize_activations;
mod repack;
mod rms_norm;
mod rotate_and_cache;
mod sample;
mod scatter_blocks;
mod soft_cap;
mod token_logprobs;
mod top_k;
mod weights;

pub use act_and_mul::act_and_mul;
pub use add_bias::add_bias;
pub use adjust_logits::adjust_logits;
pub use argmax::argmax;
pub use embedding::embedding;
pub use encoder::{Encoder, Kernel};
pub use gather_blocks::gather_blocks;
pub use gather_rows::gather_rows;
pub use gpu::{Gpu, GpuBuffer};
pub use image::{Bindable, GpuImage, IMAGE_WIDTH, Words};
pub use matmul::matmul;
pub use matmul_int8::matmul_int8;
pub use paged_attention_decode::paged_attention_decode;
pub use paged_attention_prefill::paged_attention_prefill;
pub use paged_attention_reduce::paged_attention_reduce;
pub use plan::{Activations, MatmulShape, Plan, SPLIT};
pub use profile::{KernelTime, KernelTimes};
pub use quantize_activations::{RoundedTo, quantize_activations};
pub use repack::DeviceFormat;
pub use rms_norm::{Norm, rms_norm};
pub use rotate_and_cache::{Turn, rotate_and_cache};
pub use sample::sample;
pub use scatter_blocks::scatter_blocks;
pub use soft_cap::soft_cap;
pub use token_logprobs::token_logprobs;
pub use top_k::top_k;
pub use weights::{DeviceMatrix, Placement, Shard};
