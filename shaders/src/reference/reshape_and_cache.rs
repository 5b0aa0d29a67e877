//! Reference of `reshape_and_cache.wgsl`.

use half::f16;

/// Writes each token's heads (tokens × kv_heads × head_dim) into its slot of `cache`
/// (`[block, kv_head, offset, head_dim]`), rounded to f16. Called once for K and once for V.
pub fn reshape_and_cache(
    values: &[f32],
    slot_mapping: &[u32],
    cache: &mut [f16],
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
) {
    for (token, &slot) in slot_mapping.iter().enumerate() {
        let (block_id, offset) = (slot as usize / block_size, slot as usize % block_size);
        for head in 0..num_kv_heads {
            let source = (token * num_kv_heads + head) * head_dim;
            let target = ((block_id * num_kv_heads + head) * block_size + offset) * head_dim;
            for i in 0..head_dim {
                cache[target + i] = f16::from_f32(values[source + i]);
            }
        }
    }
}
