//! Reference of `matmul_tiled.wgsl`.

use super::matmul;

/// As [`matmul`], for tokens `first_token..`: those before it keep what `previous` has, which is what is added to where
/// `accumulate`.
pub fn matmul_tiled(
    weights: &[f32],
    input: &[f32],
    columns: usize,
    first_token: usize,
    previous: &[f32],
    accumulate: bool,
) -> Vec<f64> {
    let rows = weights.len() / columns;
    let (before, after) = previous.split_at(first_token * rows);
    let products = matmul(weights, &input[first_token * columns..], columns, accumulate.then_some(after));
    before.iter().map(|&value| f64::from(value)).chain(products).collect()
}
