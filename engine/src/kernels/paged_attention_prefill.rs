//! Wrapper of `paged_attention_prefill.wgsl`: chunks of queries over cached and new blocks.

use shaders::{PAGED_ATTENTION_PREFILL, Value, Variant, params};

use super::{Bindable, Encoder, GpuBuffer, Plan};
use crate::kv::KvLayout;
use crate::ops::{Attention, DeviceError};

/// Attends the queries of `num_tiles` tiles; `tiles[i]` = (sequence, first query), `chunks[sequence]` = (first row,
/// query_len, context_len, 0). `pairs` is Σ visible tokens over queries, for the work estimate.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn paged_attention_prefill(
    encoder: &mut Encoder,
    plan: &Plan,
    query: &GpuBuffer,
    key_cache: &GpuBuffer,
    value_cache: &GpuBuffer,
    block_tables: &GpuBuffer,
    chunks: &GpuBuffer,
    tiles: &GpuBuffer,
    output: &GpuBuffer,
    layout: &KvLayout,
    attention: &Attention,
    block_table_stride: u32,
    num_tiles: u32,
    pairs: u64,
) -> Result<(), DeviceError> {
    let (num_heads, head_dim) = (layout.num_heads as u32, layout.head_dim as u32);
    assert!(u64::from(num_tiles) * 8 <= tiles.size && query.size <= output.size);
    let heads = plan.prefill_heads(layout);
    let values = [
        ("BLOCK_SIZE", Plan::block_size()),
        ("HEADS", Value::Number(heads)),
        ("HEAD_DIM", Value::Number(head_dim)),
        ("KV", Value::Word(layout.dtype.word())),
        ("QUERY_TILE", Value::Number(plan.query_tile)),
        ("SHARE", Value::Number(plan.single.share.into())),
    ];
    let kernel = encoder.kernel(&Variant::new(&PAGED_ATTENTION_PREFILL, &values))?;
    let params = params::PagedAttentionPrefill {
        num_heads,
        num_kv_heads: layout.num_kv_heads as u32,
        block_table_stride,
        scale: attention.scale,
        soft_cap: attention.soft_cap,
        window: attention.window,
        ..Default::default()
    };
    let bound: [&dyn Bindable; 7] = [query, key_cache, value_cache, block_tables, chunks, tiles, output];
    let work = pairs * u64::from(num_heads * head_dim) * 2;
    encoder.dispatch(&kernel, &bound, &params, [num_tiles, num_heads / heads, 1], work)
}
