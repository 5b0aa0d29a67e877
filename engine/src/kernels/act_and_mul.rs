//! Wrapper of `act_and_mul.wgsl`.

use shaders::{ACT_AND_MUL, Value, Variant, limits, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::model::Activation;
use crate::ops::DeviceError;

/// `output` (rows × width) = activation of the first half of each row of `gate_up` (rows × 2 · width) times the second;
/// `width` is a multiple of 4.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn act_and_mul(
    encoder: &mut Encoder,
    plan: &Plan,
    activation: Activation,
    gate_up: &GpuBuffer,
    output: &GpuBuffer,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    let count = width * num_rows;
    let bytes = u64::from(count) * 4;
    assert!(width.is_multiple_of(4) && 2 * bytes <= gate_up.size && bytes <= output.size);
    let activation = match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
    };
    let values = [("ACTIVATION", Value::Word(activation)), ("WORKGROUP_SIZE", Value::Number(plan.workgroup_size))];
    let kernel = encoder.kernel(&Variant::new(&ACT_AND_MUL, &values))?;
    let (x, y, row_width) = limits::grid_2d(count / 4, plan.workgroup_size);
    let params = params::ActAndMul { count4: count / 4, width4: width / 4, row_width, ..Default::default() };
    encoder.dispatch(&kernel, &[gate_up, output], &params, [x, y, 1], u64::from(count) * 4)
}
