//! Reference of `gather_blocks.wgsl`.

/// Copies blocks of all layers out: `caches` are (K, V) by layer, `[block, block_values]`; the result is, for each block,
/// `[layer, K then V, block_values]`.
pub fn gather_blocks<T: Copy>(caches: &[(Vec<T>, Vec<T>)], block_ids: &[u32], block_values: usize) -> Vec<T> {
    let mut payloads = Vec::new();
    for &block_id in block_ids {
        let block = block_id as usize * block_values..(block_id as usize + 1) * block_values;
        for (key, value) in caches {
            payloads.extend_from_slice(&key[block.clone()]);
            payloads.extend_from_slice(&value[block.clone()]);
        }
    }
    payloads
}
