//! Reference of `quantize_activations.wgsl`.

/// Activations rounded to int8 in blocks of 32.
#[derive(Clone, Debug)]
pub struct QuantizedRow {
    /// One code a value.
    pub codes: Vec<i8>,
    /// One scale a block.
    pub scales: Vec<f32>,
    /// scale · Σ codes, one a block.
    pub sums: Vec<f32>,
}

/// code = round(x / scale), ties to even, scale = max|x| / 127. The scale is rounded to f32 as the kernel's is, so that
/// codes agree but for values within rounding of a half.
pub fn quantize_activations(input: &[f32]) -> QuantizedRow {
    let mut quantized = QuantizedRow { codes: Vec::new(), scales: Vec::new(), sums: Vec::new() };
    for block in input.chunks(32) {
        let peak = block.iter().fold(0.0f32, |peak, x| peak.max(x.abs()));
        let scale = peak / 127.0;
        let inverse = if peak > 0.0 { 127.0 / peak } else { 0.0 };
        let codes: Vec<i8> = block.iter().map(|x| (x * inverse).round_ties_even() as i8).collect();
        let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
        quantized.sums.push(scale * sum as f32);
        quantized.scales.push(scale);
        quantized.codes.extend(codes);
    }
    quantized
}
