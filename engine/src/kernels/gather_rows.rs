//! Wrapper of `gather_rows.wgsl`: the rows whose logits are wanted, packed.

use shaders::{GATHER_ROWS, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// `output[i]` = `input[rows[i]]` for `num_rows` rows of `width` values (a multiple of 4).
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn gather_rows(
    encoder: &mut Encoder,
    plan: &Plan,
    input: &GpuBuffer,
    rows: &GpuBuffer,
    output: &GpuBuffer,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    assert!(width.is_multiple_of(4) && u64::from(width) * u64::from(num_rows) * 4 <= output.size);
    let kernel = encoder.kernel(&plan.elementwise(&GATHER_ROWS))?;
    let params = params::GatherRows { width4: width / 4, ..Default::default() };
    let grid = [(width / 4).div_ceil(plan.workgroup_size), num_rows, 1];
    encoder.dispatch(&kernel, &[input, rows, output], &params, grid, u64::from(width) * u64::from(num_rows))
}
