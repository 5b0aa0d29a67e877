//! Reference of `soft_cap.wgsl`.

/// cap · tanh(value / cap).
pub fn soft_cap(values: &[f32], cap: f32) -> Vec<f64> {
    values.iter().map(|&value| f64::from(cap) * (f64::from(value) / f64::from(cap)).tanh()).collect()
}
