//! Reference of `matmul_int8.wgsl`.

use super::QuantizedRow;

/// As `matmul`, over activations rounded by `quantize_activations`: the same rounding in f64.
pub fn matmul_int8(weights: &[f32], input: &QuantizedRow, width: usize, previous: Option<&[f32]>) -> Vec<f64> {
    let mut output = Vec::with_capacity(input.codes.len() / width * (weights.len() / width));
    let rounded: Vec<f64> = input
        .codes
        .iter()
        .enumerate()
        .map(|(index, &code)| f64::from(code) * f64::from(input.scales[index / 32]))
        .collect();
    for token in rounded.chunks(width) {
        for row in weights.chunks(width) {
            let product: f64 = row.iter().zip(token).map(|(&w, &x)| f64::from(w) * x).sum();
            let before = previous.map_or(0.0, |values| f64::from(values[output.len()]));
            output.push(product + before);
        }
    }
    output
}
