//! Wrapper of `rms_norm.wgsl`.

use shaders::{RMS_NORM, Value, Variant, params};

use super::{Encoder, GpuBuffer, Plan, RoundedTo};
use crate::ops::DeviceError;

/// What a norm is asked to do.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Values of a row, a multiple of 4, of 32 where the output is rounded beside.
    pub width: u32,
    /// ε.
    pub epsilon: f32,
    /// Rows.
    pub num_rows: u32,
    /// Whether the output is added to; then it is not rounded.
    pub accumulate: bool,
}

/// `output` (+)= `input` / rms(`input`) · `weight`; rounded to int8 beside where `rounded` says where to.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn rms_norm(
    encoder: &mut Encoder,
    plan: &Plan,
    norm: Norm,
    input: &GpuBuffer,
    weight: &GpuBuffer,
    output: &GpuBuffer,
    rounded: Option<RoundedTo<'_>>,
) -> Result<(), DeviceError> {
    let Norm { width, epsilon, num_rows, accumulate } = norm;
    let bytes = u64::from(width) * u64::from(num_rows) * 4;
    assert!(width.is_multiple_of(4) && bytes <= input.size && bytes <= output.size);
    assert!(rounded.is_none() || (width.is_multiple_of(32) && !accumulate));
    let quantize = Value::Number(rounded.is_some().into());
    let size = Value::Number(plan.reduce_size);
    let values = [("QUANTIZE", quantize), ("SUM", Value::Word(plan.sum)), ("WORKGROUP_SIZE", size)];
    let kernel = encoder.kernel(&Variant::new(&RMS_NORM, &values))?;
    let params = params::RmsNorm { width4: width / 4, epsilon, accumulate: accumulate.into(), ..Default::default() };
    let stubs = encoder.stubs()?;
    let RoundedTo { codes, block_scales } = rounded.unwrap_or(RoundedTo { codes: &stubs[0], block_scales: &stubs[1] });
    encoder.dispatch(&kernel, &[input, weight, output, codes, block_scales], &params, [num_rows, 1, 1], bytes)
}
