//! Wrapper of `paged_attention_decode.wgsl`: partial results of each (split, head).

use shaders::{PAGED_ATTENTION_DECODE, Value, Variant, limits, params};

use super::{Bindable, Encoder, GpuBuffer, Plan};
use crate::kv::KvLayout;
use crate::ops::{Attention, DeviceError};

/// Attends one query a sequence over its splits; `partials` holds head_dim + 4 values for each (split, head).
/// `total_context` is Σ context lengths, for the work estimate.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn paged_attention_decode(
    encoder: &mut Encoder,
    plan: &Plan,
    query: &GpuBuffer,
    key_cache: &GpuBuffer,
    value_cache: &GpuBuffer,
    block_tables: &GpuBuffer,
    context_lens: &GpuBuffer,
    splits: &GpuBuffer,
    partials: &GpuBuffer,
    layout: &KvLayout,
    attention: &Attention,
    block_table_stride: u32,
    num_splits: u32,
    total_context: u64,
) -> Result<(), DeviceError> {
    let (num_heads, head_dim) = (layout.num_heads as u32, layout.head_dim as u32);
    let items = u64::from(num_splits) * u64::from(num_heads);
    assert!(items * u64::from(head_dim + 4) * 4 <= partials.size && u64::from(num_splits) * 8 <= splits.size);
    let heads = plan.decode_heads(layout);
    let values = [
        ("BLOCK_SIZE", Plan::block_size()),
        ("HEADS", Value::Number(heads)),
        ("HEAD_DIM", Value::Number(head_dim)),
        ("KV", Value::Word(layout.dtype.word())),
        ("SPLIT", Value::Number(plan.split)),
        ("TEAM", Value::Number(plan.decode_team.into())),
        ("WORKGROUP_SIZE", Value::Number(plan.decode_size)),
    ];
    let kernel = encoder.kernel(&Variant::new(&PAGED_ATTENTION_DECODE, &values))?;
    let lanes_an_item = if plan.decode_team { 1 } else { plan.decode_size };
    let (x, y, row_width) = limits::grid_2d(num_splits * (num_heads / heads), lanes_an_item);
    let params = params::PagedAttentionDecode {
        num_items: num_splits,
        num_heads,
        num_kv_heads: layout.num_kv_heads as u32,
        block_table_stride,
        row_width,
        scale: attention.scale,
        soft_cap: attention.soft_cap,
        window: attention.window,
    };
    let bound: [&dyn Bindable; 7] = [query, key_cache, value_cache, block_tables, context_lens, splits, partials];
    let work = total_context * u64::from(num_heads * head_dim) * 2;
    encoder.dispatch(&kernel, &bound, &params, [x, y, 1], work)
}
