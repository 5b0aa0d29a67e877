//! Wrapper of `adjust_logits.wgsl`: biases and penalties of single logits.

use shaders::params::LogitEntry;
use shaders::{ADJUST_LOGITS, limits, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Changes `num_entries` logits as `entries` (of [`LogitEntry`]) say.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn adjust_logits(
    encoder: &mut Encoder,
    plan: &Plan,
    entries: &GpuBuffer,
    logits: &GpuBuffer,
    num_entries: u32,
) -> Result<(), DeviceError> {
    assert!(u64::from(num_entries) * size_of::<LogitEntry>() as u64 <= entries.size);
    let kernel = encoder.kernel(&plan.elementwise(&ADJUST_LOGITS))?;
    let (x, y, row_width) = limits::grid_2d(num_entries, plan.workgroup_size);
    let params = params::AdjustLogits { num_entries, row_width, ..Default::default() };
    encoder.dispatch(&kernel, &[entries, logits], &params, [x, y, 1], u64::from(num_entries))
}
