//! Reference of `matmul.wgsl`.

/// `input` (tokens × `width`) times the transpose of `weights` (rows × `width`, dequantised), plus `previous` where the
/// product is accumulated. Returns tokens × rows.
pub fn matmul(weights: &[f32], input: &[f32], width: usize, previous: Option<&[f32]>) -> Vec<f64> {
    let mut output = Vec::with_capacity(input.len() / width * (weights.len() / width));
    for token in input.chunks(width) {
        for row in weights.chunks(width) {
            let product: f64 = row.iter().zip(token).map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
            let before = previous.map_or(0.0, |values| f64::from(values[output.len()]));
            output.push(product + before);
        }
    }
    output
}
