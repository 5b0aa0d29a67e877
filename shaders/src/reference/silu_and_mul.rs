//! Reference of `silu_and_mul.wgsl`.

/// silu(gate) · up, elementwise.
pub fn silu_and_mul(gate: &[f32], up: &[f32]) -> Vec<f64> {
    gate.iter()
        .zip(up)
        .map(|(&gate, &up)| {
            let x = f64::from(gate);
            x / (1.0 + (-x).exp()) * f64::from(up)
        })
        .collect()
}
