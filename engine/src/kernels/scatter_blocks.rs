//! Wrapper of `scatter_blocks.wgsl`: KV blocks of one layer from their canonical order.

use shaders::{SCATTER_BLOCKS, Value, Variant, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::kv::KvLayout;
use crate::ops::DeviceError;

/// Copies `num_blocks` canonical payloads, one after the other, into the caches of `layer`. No block id comes twice.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn scatter_blocks(
    encoder: &mut Encoder,
    plan: &Plan,
    payloads: &GpuBuffer,
    block_ids: &GpuBuffer,
    key_cache: &GpuBuffer,
    value_cache: &GpuBuffer,
    layout: &KvLayout,
    layer: usize,
    num_blocks: u32,
) -> Result<(), DeviceError> {
    assert!(layout.payload_bytes() as u64 * u64::from(num_blocks) <= payloads.size && layer < layout.num_layers);
    let block_words4 = (layout.block_bytes() / 16) as u32;
    let kernel =
        encoder.kernel(&Variant::new(&SCATTER_BLOCKS, &[("WORKGROUP_SIZE", Value::Number(plan.workgroup_size))]))?;
    let (layer, num_layers) = (layer as u32, layout.num_layers as u32);
    let params = params::ScatterBlocks { block_words4, layer, num_layers, ..Default::default() };
    let grid = [block_words4.div_ceil(plan.workgroup_size), num_blocks, 1];
    let work = u64::from(num_blocks) * u64::from(block_words4) * 16;
    encoder.dispatch(&kernel, &[payloads, block_ids, key_cache, value_cache], &params, grid, work)
}
