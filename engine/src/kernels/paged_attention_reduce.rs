//! Wrapper of `paged_attention_reduce.wgsl`: merges the splits of each sequence.

use shaders::{PAGED_ATTENTION_REDUCE, Value, Variant, params};

use super::{Encoder, GpuBuffer, Plan, RoundedTo};
use crate::kv::KvLayout;
use crate::ops::DeviceError;

/// `output` (sequences × heads × head_dim) from `partials`; `split_starts` bounds each sequence's splits. Rounded to int8
/// beside where `rounded` says where to; heads are then whole blocks of 32.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn paged_attention_reduce(
    encoder: &mut Encoder,
    plan: &Plan,
    partials: &GpuBuffer,
    split_starts: &GpuBuffer,
    output: &GpuBuffer,
    rounded: Option<RoundedTo<'_>>,
    layout: &KvLayout,
    num_sequences: u32,
) -> Result<(), DeviceError> {
    let (num_heads, head_dim) = (layout.num_heads as u32, layout.head_dim as u32);
    assert!(u64::from(num_sequences * num_heads * head_dim) * 4 <= output.size);
    assert!(rounded.is_none() || head_dim.is_multiple_of(32));
    let values = [
        ("HEAD_DIM", Value::Number(head_dim)),
        ("QUANTIZE", Value::Number(rounded.is_some().into())),
        ("WORKGROUP_SIZE", Value::Number(plan.workgroup_size)),
    ];
    let kernel = encoder.kernel(&Variant::new(&PAGED_ATTENTION_REDUCE, &values))?;
    let params = params::PagedAttentionReduce { num_heads, ..Default::default() };
    let values_each = if rounded.is_some() { 32 } else { 4 };
    let grid = [(num_heads * head_dim / values_each).div_ceil(plan.workgroup_size), num_sequences, 1];
    let work = u64::from(num_sequences * num_heads * head_dim) * 8;
    let stubs = encoder.stubs()?;
    let RoundedTo { codes, block_scales } = rounded.unwrap_or(RoundedTo { codes: &stubs[0], block_scales: &stubs[1] });
    encoder.dispatch(&kernel, &[partials, split_starts, output, codes, block_scales], &params, grid, work)
}
