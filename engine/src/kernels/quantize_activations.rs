//! Wrapper of `quantize_activations.wgsl`: activations rounded to int8 in blocks of 32.

use shaders::{QUANTIZE_ACTIVATIONS, limits, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Where a kernel puts what it rounds: eight words of codes a block of 32, and (scale, scale · sum of codes).
#[derive(Clone, Copy)]
pub struct RoundedTo<'a> {
    /// Codes.
    pub codes: &'a GpuBuffer,
    /// Scales and sums.
    pub block_scales: &'a GpuBuffer,
}

/// Rounds `num_blocks` blocks of `input` into `codes` (32 bytes each) and `block_scales` (two f32 each).
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn quantize_activations(
    encoder: &mut Encoder,
    plan: &Plan,
    input: &GpuBuffer,
    codes: &GpuBuffer,
    block_scales: &GpuBuffer,
    num_blocks: u32,
) -> Result<(), DeviceError> {
    let blocks = u64::from(num_blocks);
    assert!(blocks * 128 <= input.size && blocks * 32 <= codes.size && blocks * 8 <= block_scales.size);
    let kernel = encoder.kernel(&plan.elementwise(&QUANTIZE_ACTIVATIONS))?;
    let (x, y, row_width) = limits::grid_2d(num_blocks, plan.workgroup_size);
    let params = params::QuantizeActivations { num_blocks, row_width, ..Default::default() };
    encoder.dispatch(&kernel, &[input, codes, block_scales], &params, [x, y, 1], blocks * 128)
}
