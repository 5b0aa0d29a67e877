//! Wrapper of `rotate_and_cache.wgsl`: the step's queries apart, its keys and values into their slots.

use shaders::{ROTATE_AND_CACHE, Value, Variant, params};

use super::{Bindable, Encoder, GpuBuffer, Plan};
use crate::kv::KvLayout;
use crate::ops::DeviceError;

/// How heads are turned.
#[derive(Clone, Copy)]
pub struct Turn<'a> {
    /// Tokens × pairs of (cos, sin).
    pub rotations: &'a GpuBuffer,
    /// Rotated pairs of a head; 0 rotates nothing.
    pub num_pairs: u32,
    /// 1 for neighbouring pairs, `num_pairs` for halves.
    pub pair_stride: u32,
    /// Weights of query heads, then of key heads, and ε.
    pub norms: Option<(&'a GpuBuffer, f32)>,
}

/// Takes `qkv` (tokens × (heads + 2 · kv_heads) × head_dim) apart: normalised and rotated queries into `query`, keys and
/// values into the caches at `slot_mapping`.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn rotate_and_cache(
    encoder: &mut Encoder,
    plan: &Plan,
    turn: Turn<'_>,
    qkv: &GpuBuffer,
    slot_mapping: &GpuBuffer,
    query: &GpuBuffer,
    key_cache: &GpuBuffer,
    value_cache: &GpuBuffer,
    layout: &KvLayout,
    num_tokens: u32,
) -> Result<(), DeviceError> {
    let Turn { rotations, num_pairs, pair_stride, norms } = turn;
    let (num_heads, num_kv_heads) = (layout.num_heads as u32, layout.num_kv_heads as u32);
    let (head_dim, num_all) = (layout.head_dim as u32, num_heads + 2 * num_kv_heads);
    assert!(2 * num_pairs <= head_dim && (pair_stride == 1 || pair_stride == num_pairs));
    assert!(u64::from(num_tokens) * 4 <= slot_mapping.size && layout.layer_bytes() <= key_cache.size);
    assert!(u64::from(num_tokens) * u64::from(num_all * head_dim) * 4 <= qkv.size);
    let values = [
        ("BLOCK_SIZE", Plan::block_size()),
        ("KV", Value::Word(layout.dtype.word())),
        ("NORM", Value::Number(norms.is_some().into())),
        ("SUM", Value::Word(plan.sum)),
        ("WORKGROUP_SIZE", Value::Number(plan.head_size)),
    ];
    let kernel = encoder.kernel(&Variant::new(&ROTATE_AND_CACHE, &values))?;
    let epsilon = norms.map_or(0.0, |(_, epsilon)| epsilon);
    let params = params::RotateAndCache {
        num_heads,
        num_kv_heads,
        head_dim,
        num_pairs,
        pair_stride,
        epsilon,
        ..Default::default()
    };
    // Something is bound where there are no norms.
    let norms = norms.map_or(slot_mapping, |(weights, _)| weights);
    let bound: [&dyn Bindable; 7] = [rotations, qkv, slot_mapping, norms, query, key_cache, value_cache];
    let work = u64::from(num_tokens) * u64::from(num_all * head_dim) * 4;
    encoder.dispatch(&kernel, &bound, &params, [num_all, num_tokens, 1], work)
}
