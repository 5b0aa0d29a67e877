//! Wrapper of `act_and_mul.wgsl`.

use shaders::{ACT_AND_MUL, Value, Variant, limits, params};

use super::{Encoder, GpuBuffer, Plan, RoundedTo};
use crate::model::Activation;
use crate::ops::DeviceError;

/// `output` (rows × width) = activation of the first half of each row of `gate_up` (rows × 2 · width) times the second;
/// rounded to int8 beside where `rounded` says where to. `width` is a multiple of 32.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn act_and_mul(
    encoder: &mut Encoder,
    plan: &Plan,
    activation: Activation,
    gate_up: &GpuBuffer,
    output: &GpuBuffer,
    rounded: Option<RoundedTo<'_>>,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    let bytes = u64::from(width) * u64::from(num_rows) * 4;
    assert!(width.is_multiple_of(32) && 2 * bytes <= gate_up.size && bytes <= output.size);
    let activation = match activation {
        Activation::Silu => "silu",
        Activation::Gelu => "gelu",
    };
    let values = [
        ("ACTIVATION", Value::Word(activation)),
        ("QUANTIZE", Value::Number(rounded.is_some().into())),
        ("WORKGROUP_SIZE", Value::Number(plan.workgroup_size)),
    ];
    let kernel = encoder.kernel(&Variant::new(&ACT_AND_MUL, &values))?;
    let (num_blocks, width_blocks) = (width / 32 * num_rows, width / 32);
    let (x, y, row_width) = limits::grid_2d(num_blocks, plan.workgroup_size);
    let params = params::ActAndMul { num_blocks, width_blocks, row_width, ..Default::default() };
    let stubs = encoder.stubs()?;
    let RoundedTo { codes, block_scales } = rounded.unwrap_or(RoundedTo { codes: &stubs[0], block_scales: &stubs[1] });
    encoder.dispatch(&kernel, &[gate_up, output, codes, block_scales], &params, [x, y, 1], bytes)
}
