//! Wrapper of `sample.wgsl`: one token a row.

use shaders::params::RowDraw;
use shaders::{SAMPLE, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Invocations a workgroup: a row has tens of thousands of weights.
const WORKGROUP_SIZE: u32 = 256;

/// `chosen[row]` = the token of `draws[row]` (a [`RowDraw`]) from `scores`, which become weights; `best` is argmax's answer
/// for the scores.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "one a binding")]
pub fn sample(
    encoder: &mut Encoder,
    plan: &Plan,
    scores: &GpuBuffer,
    best: &GpuBuffer,
    draws: &GpuBuffer,
    chosen: &GpuBuffer,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    let rows = u64::from(num_rows);
    assert!(u64::from(width) * rows * 4 <= scores.size && rows * 8 <= best.size && rows * 4 <= chosen.size);
    assert!(rows * size_of::<RowDraw>() as u64 <= draws.size);
    let kernel = encoder.kernel(&plan.reduction(&SAMPLE, WORKGROUP_SIZE))?;
    let params = params::Sample { width, ..Default::default() };
    // Up to sixty passes look for the bounds of top-k and top-p.
    let work = u64::from(width) * rows * 64;
    encoder.dispatch(&kernel, &[scores, best, draws, chosen], &params, [num_rows, 1, 1], work)
}
