//! Wrapper of `soft_cap.wgsl`.

use shaders::{SOFT_CAP, limits, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// `values` = cap · tanh(`values` / cap), for `count` of them.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn soft_cap(
    encoder: &mut Encoder,
    plan: &Plan,
    values: &GpuBuffer,
    cap: f32,
    count: u32,
) -> Result<(), DeviceError> {
    assert!(u64::from(count) * 4 <= values.size);
    let kernel = encoder.kernel(&plan.elementwise(&SOFT_CAP))?;
    let (x, y, row_width) = limits::grid_2d(count, plan.workgroup_size);
    let params = params::SoftCap { count, row_width, cap, ..Default::default() };
    encoder.dispatch(&kernel, &[values], &params, [x, y, 1], u64::from(count) * 4)
}
