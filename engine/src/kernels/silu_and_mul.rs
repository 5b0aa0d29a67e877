//! Wrapper of `silu_and_mul.wgsl`.

use shaders::{SILU_AND_MUL, limits, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// `gate` = silu(`gate`) · `up` over `count` values (a multiple of 4), in place.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn silu_and_mul(
    encoder: &mut Encoder,
    plan: &Plan,
    gate: &GpuBuffer,
    up: &GpuBuffer,
    count: u32,
) -> Result<(), DeviceError> {
    let bytes = u64::from(count) * 4;
    assert!(count.is_multiple_of(4) && bytes <= gate.size && bytes <= up.size);
    let kernel = encoder.kernel(&plan.elementwise(&SILU_AND_MUL))?;
    let (x, y, row_width) = limits::grid_2d(count / 4, plan.workgroup_size);
    let params = params::SiluAndMul { count4: count / 4, row_width, ..Default::default() };
    encoder.dispatch(&kernel, &[gate, up], &params, [x, y, 1], u64::from(count) * 4)
}
