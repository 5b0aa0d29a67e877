//! Reference of `rms_norm.wgsl`.

/// Rows of `weight.len()` columns, each divided by its root mean square and scaled by `weight`.
pub fn rms_norm(input: &[f32], weight: &[f32], epsilon: f64) -> Vec<f64> {
    let mut output = Vec::with_capacity(input.len());
    for row in input.chunks(weight.len()) {
        let mean = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + epsilon).sqrt();
        output.extend(row.iter().zip(weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)));
    }
    output
}
