//! Wrapper of `rms_norm.wgsl`.

use shaders::{RMS_NORM, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// `output` (+)= `input` / rms(`input`) · `weight` for `num_rows` rows of `width` values (a multiple of 4).
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn rms_norm(
    encoder: &mut Encoder,
    plan: &Plan,
    input: &GpuBuffer,
    weight: &GpuBuffer,
    output: &GpuBuffer,
    width: u32,
    epsilon: f32,
    num_rows: u32,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let bytes = u64::from(width) * u64::from(num_rows) * 4;
    assert!(width.is_multiple_of(4) && bytes <= input.size && bytes <= output.size);
    let kernel = encoder.kernel(&plan.reduction(&RMS_NORM, plan.reduce_size))?;
    let params = params::RmsNorm { width4: width / 4, epsilon, accumulate: accumulate.into(), ..Default::default() };
    encoder.dispatch(&kernel, &[input, weight, output], &params, [num_rows, 1, 1], bytes)
}
