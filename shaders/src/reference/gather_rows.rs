//! Reference of `gather_rows.wgsl`.

/// Rows `rows` of `input` (row-major, `width` columns).
pub fn gather_rows(input: &[f32], rows: &[u32], width: usize) -> Vec<f64> {
    rows.iter().flat_map(|&row| input[row as usize * width..][..width].iter().map(|&value| f64::from(value))).collect()
}
