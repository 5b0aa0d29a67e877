//! Reference of `embedding.wgsl`.

/// Rows `token_ids` of `table` (row-major, `width` columns, dequantised).
pub fn embedding(table: &[f32], token_ids: &[u32], width: usize) -> Vec<f64> {
    token_ids
        .iter()
        .flat_map(|&id| table[id as usize * width..][..width].iter().map(|&value| f64::from(value)))
        .collect()
}
