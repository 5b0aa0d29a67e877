//! Reference of `add_bias.wgsl`.

/// Adds `bias` to every row of `values`.
pub fn add_bias(bias: &[f32], values: &[f32]) -> Vec<f64> {
    values.iter().zip(bias.iter().cycle()).map(|(&value, &bias)| f64::from(value) + f64::from(bias)).collect()
}
