//! Reference of `scatter_blocks.wgsl`.

/// Copies blocks of all layers in: the way back of [`super::gather_blocks`].
pub fn scatter_blocks<T: Copy>(
    payloads: &[T],
    block_ids: &[u32],
    caches: &mut [(Vec<T>, Vec<T>)],
    block_values: usize,
) {
    let mut parts = payloads.chunks_exact(block_values);
    for &block_id in block_ids {
        let block = block_id as usize * block_values..(block_id as usize + 1) * block_values;
        for (key, value) in caches.iter_mut() {
            for cache in [key, value] {
                if let Some(part) = parts.next() {
                    cache[block.clone()].copy_from_slice(part);
                }
            }
        }
    }
}
