//! Wrapper of `add_bias.wgsl`.

use shaders::{ADD_BIAS, limits, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Adds `bias` (a multiple of 4 values) to every row of `values`.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn add_bias(
    encoder: &mut Encoder,
    plan: &Plan,
    bias: &GpuBuffer,
    values: &GpuBuffer,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    let count = width * num_rows;
    assert!(width.is_multiple_of(4) && u64::from(count) * 4 <= values.size && u64::from(width) * 4 <= bias.size);
    let kernel = encoder.kernel(&plan.elementwise(&ADD_BIAS))?;
    let (x, y, row_width) = limits::grid_2d(count / 4, plan.workgroup_size);
    let params = params::AddBias { count4: count / 4, width4: width / 4, row_width, ..Default::default() };
    encoder.dispatch(&kernel, &[bias, values], &params, [x, y, 1], u64::from(count))
}
