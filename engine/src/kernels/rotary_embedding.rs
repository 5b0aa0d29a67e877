//! Wrapper of `rotary_embedding.wgsl`.

use shaders::{ROTARY_EMBEDDING, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Rotates `values` (tokens × heads × head_dim) in place by `rotations` (tokens × pairs of (cos, sin)). `pair_stride` is 1
/// for neighbouring pairs, `num_pairs` for halves.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn rotary_embedding(
    encoder: &mut Encoder,
    plan: &Plan,
    rotations: &GpuBuffer,
    values: &GpuBuffer,
    num_heads: u32,
    head_dim: u32,
    num_pairs: u32,
    pair_stride: u32,
    num_tokens: u32,
) -> Result<(), DeviceError> {
    assert!(2 * num_pairs <= head_dim && (pair_stride == 1 || pair_stride == num_pairs));
    assert!(u64::from(num_tokens) * u64::from(num_heads * head_dim) * 4 <= values.size);
    let kernel = encoder.kernel(&plan.elementwise(&ROTARY_EMBEDDING))?;
    let params = params::RotaryEmbedding { num_heads, head_dim, num_pairs, pair_stride };
    let grid = [(num_heads * num_pairs).div_ceil(plan.workgroup_size), num_tokens, 1];
    let work = u64::from(num_tokens) * u64::from(num_heads * num_pairs) * 4;
    encoder.dispatch(&kernel, &[rotations, values], &params, grid, work)
}
