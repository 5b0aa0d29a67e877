//! Wrapper of `paged_attention_reduce.wgsl`: merges the splits of each sequence.

use shaders::{PAGED_ATTENTION_REDUCE, Value, Variant, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::kv::KvLayout;
use crate::ops::DeviceError;

/// `output` (sequences × heads × head_dim) from `partials`; `split_starts` bounds each sequence's splits.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn paged_attention_reduce(
    encoder: &mut Encoder,
    plan: &Plan,
    partials: &GpuBuffer,
    split_starts: &GpuBuffer,
    output: &GpuBuffer,
    layout: &KvLayout,
    num_sequences: u32,
) -> Result<(), DeviceError> {
    let (num_heads, head_dim) = (layout.num_heads as u32, layout.head_dim as u32);
    assert!(u64::from(num_sequences * num_heads * head_dim) * 4 <= output.size);
    let values = [("HEAD_DIM", Value::Number(head_dim)), ("WORKGROUP_SIZE", Value::Number(plan.workgroup_size))];
    let kernel = encoder.kernel(&Variant::new(&PAGED_ATTENTION_REDUCE, &values))?;
    let params = params::PagedAttentionReduce { num_heads, ..Default::default() };
    let grid = [(num_heads * head_dim / 4).div_ceil(plan.workgroup_size), num_sequences, 1];
    let work = u64::from(num_sequences * num_heads * head_dim) * 8;
    encoder.dispatch(&kernel, &[partials, split_starts, output], &params, grid, work)
}
