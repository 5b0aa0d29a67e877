//! Reference of `rotate_and_cache.wgsl`.

use half::f16;

/// Shape of the heads of a row, and how they are turned.
#[derive(Clone, Copy, Debug)]
pub struct HeadShape {
    /// Query heads.
    pub num_heads: usize,
    /// Key heads, and value heads.
    pub num_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// 1: neighbours are rotated together; otherwise the distance between the halves.
    pub pair_stride: usize,
}

/// Queries, keys and values, each tokens × heads × head_dim.
pub type TakenApart = [Vec<f64>; 3];

/// Takes rows of query, key and value heads apart. Heads of queries and keys are normalised by `norms` (weights of query
/// heads, then of key heads, and ε), then rotated by their token's (cos, sin) row of `rotations` (tokens × pairs).
pub fn rotate_and_cache(
    qkv: &[f32],
    rotations: &[[f32; 2]],
    norms: Option<(&[f32], f64)>,
    shape: HeadShape,
) -> TakenApart {
    let HeadShape { num_heads, num_kv_heads, head_dim, pair_stride } = shape;
    let row_width = (num_heads + 2 * num_kv_heads) * head_dim;
    let num_pairs = rotations.len() / (qkv.len() / row_width);
    let mut apart = [Vec::new(), Vec::new(), Vec::new()];
    for (token, row) in qkv.chunks(row_width).enumerate() {
        for (index, head) in row.chunks(head_dim).enumerate() {
            let mut head: Vec<f64> = head.iter().map(|&x| f64::from(x)).collect();
            let part = usize::from(index >= num_heads) + usize::from(index >= num_heads + num_kv_heads);
            if let Some((weights, epsilon)) = norms.filter(|_| part < 2) {
                let mean = head.iter().map(|x| x * x).sum::<f64>() / head_dim as f64;
                let weights = &weights[part * head_dim..];
                let scale = 1.0 / (mean + epsilon).sqrt();
                head.iter_mut().zip(weights).for_each(|(x, &weight)| *x *= scale * f64::from(weight));
            }
            for pair in 0..if part < 2 { num_pairs } else { 0 } {
                let [cos, sin] = rotations[token * num_pairs + pair].map(f64::from);
                let first = if pair_stride == 1 { 2 * pair } else { pair };
                let (a, b) = (head[first], head[first + pair_stride]);
                head[first] = a * cos - b * sin;
                head[first + pair_stride] = a * sin + b * cos;
            }
            apart[part].extend(head);
        }
    }
    apart
}

/// Rounds a row of a head to signed bytes, by blocks of 32 with a scale in f16 each: codes and bits of scales.
pub fn round_row(row: &[f32]) -> (Vec<i8>, Vec<u16>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in row.chunks(32) {
        let peak = block.iter().fold(0.0f32, |peak, value| peak.max(value.abs()));
        let finite = block.iter().all(|value| value.is_finite());
        let scale = if finite { f16::from_f32(peak / 127.0) } else { f16::NAN };
        let code = |value: &f32| if scale > f16::ZERO { (value / scale.to_f32()).round() } else { 0.0 };
        codes.extend(block.iter().map(|value| code(value).clamp(-127.0, 127.0) as i8));
        scales.push(scale.to_bits());
    }
    (codes, scales)
}
