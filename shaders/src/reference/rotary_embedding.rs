//! Reference of `rotary_embedding.wgsl`.

/// Rotates the pairs of every head (tokens × heads × head_dim) by its token's (cos, sin) row of `rotations`
/// (tokens × pairs). `pair_stride` 1: neighbours; otherwise the distance between the halves.
pub fn rotary_embedding(
    rotations: &[[f32; 2]],
    values: &[f32],
    num_heads: usize,
    head_dim: usize,
    pair_stride: usize,
) -> Vec<f64> {
    let num_tokens = values.len() / (num_heads * head_dim);
    let num_pairs = rotations.len() / num_tokens;
    let mut output: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
    for (index, head) in output.chunks_mut(head_dim).enumerate() {
        for pair in 0..num_pairs {
            let [cos, sin] = rotations[index / num_heads * num_pairs + pair].map(f64::from);
            let first = if pair_stride == 1 { 2 * pair } else { pair };
            let (a, b) = (head[first], head[first + pair_stride]);
            head[first] = a * cos - b * sin;
            head[first + pair_stride] = a * sin + b * cos;
        }
    }
    output
}
