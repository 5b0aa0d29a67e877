//! Reference of `top_k.wgsl`.

/// By row of `width`: the `k` largest as (index, value), largest first, the lowest index first on a tie; `None` where the
/// row holds a NaN.
pub fn top_k(values: &[f32], width: usize, k: usize) -> Vec<Option<Vec<(u32, f32)>>> {
    values
        .chunks(width)
        .map(|row| {
            if row.iter().any(|value| value.is_nan()) {
                return None;
            }
            let mut indexed: Vec<(u32, f32)> = row.iter().enumerate().map(|(i, &value)| (i as u32, value)).collect();
            indexed.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            indexed.truncate(k);
            Some(indexed)
        })
        .collect()
}
