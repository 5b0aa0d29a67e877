//! Wrapper of `argmax.wgsl`: the largest logit of each row.

use shaders::{ARGMAX, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// `best[row]` = (index, value bits) for `num_rows` rows of `width` values.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn argmax(
    encoder: &mut Encoder,
    plan: &Plan,
    values: &GpuBuffer,
    best: &GpuBuffer,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    assert!(u64::from(width) * u64::from(num_rows) * 4 <= values.size && u64::from(num_rows) * 8 <= best.size);
    let kernel = encoder.kernel(&plan.reduction(&ARGMAX, plan.reduce_size))?;
    let params = params::Argmax { width, ..Default::default() };
    encoder.dispatch(&kernel, &[values, best], &params, [num_rows, 1, 1], u64::from(width) * u64::from(num_rows))
}
