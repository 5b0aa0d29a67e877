//! Reference of `argmax.wgsl`.

/// By row of `width`: (index, value) of the largest, the lowest index on a tie; `None` where the row holds a NaN.
pub fn argmax(values: &[f32], width: usize) -> Vec<Option<(u32, f32)>> {
    values
        .chunks(width)
        .map(|row| {
            if row.iter().any(|value| value.is_nan()) {
                return None;
            }
            let mut best = (0u32, row[0]);
            for (index, &value) in row.iter().enumerate() {
                if value > best.1 {
                    best = (index as u32, value);
                }
            }
            Some(best)
        })
        .collect()
}
