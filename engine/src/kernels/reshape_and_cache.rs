//! Wrapper of `reshape_and_cache.wgsl`: the step's K and V into their slots.

use shaders::{RESHAPE_AND_CACHE, Value, Variant, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::kv::KvLayout;
use crate::ops::DeviceError;

/// Writes `key` and `value` (tokens × kv_heads × head_dim) into the caches at `slot_mapping`.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn reshape_and_cache(
    encoder: &mut Encoder,
    plan: &Plan,
    key: &GpuBuffer,
    value: &GpuBuffer,
    slot_mapping: &GpuBuffer,
    key_cache: &GpuBuffer,
    value_cache: &GpuBuffer,
    layout: &KvLayout,
    num_tokens: u32,
) -> Result<(), DeviceError> {
    let head_dim8 = (layout.head_dim / 8) as u32;
    let num_kv_heads = layout.num_kv_heads as u32;
    assert!(u64::from(num_tokens) * 4 <= slot_mapping.size && layout.layer_bytes() <= key_cache.size);
    let values = [("BLOCK_SIZE", Plan::block_size()), ("WORKGROUP_SIZE", Value::Number(plan.workgroup_size))];
    let kernel = encoder.kernel(&Variant::new(&RESHAPE_AND_CACHE, &values))?;
    let params = params::ReshapeAndCache { num_kv_heads, head_dim8, ..Default::default() };
    let grid = [(num_kv_heads * head_dim8).div_ceil(plan.workgroup_size), num_tokens, 1];
    let work = u64::from(num_tokens) * u64::from(num_kv_heads * head_dim8) * 16;
    encoder.dispatch(&kernel, &[key, value, slot_mapping, key_cache, value_cache], &params, grid, work)
}
