//! Wrapper of `top_k.wgsl`: the k largest logits of each row, unordered.

use shaders::{TOP_K, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Invocations a workgroup: one histogram bin each.
const WORKGROUP_SIZE: u32 = 256;

/// `top[row · k ..]` = k pairs (index, value bits) for `num_rows` rows of `width` values.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn top_k(
    encoder: &mut Encoder,
    plan: &Plan,
    values: &GpuBuffer,
    top: &GpuBuffer,
    width: u32,
    k: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    assert!(k >= 1 && k <= width, "top {k} of {width}");
    assert!(u64::from(num_rows) * u64::from(k) * 8 <= top.size);
    let kernel = encoder.kernel(&plan.reduction(&TOP_K, WORKGROUP_SIZE))?;
    let params = params::TopK { width, k, output_stride: k, ..Default::default() };
    let work = u64::from(width) * u64::from(num_rows) * 6;
    encoder.dispatch(&kernel, &[values, top], &params, [num_rows, 1, 1], work)
}
