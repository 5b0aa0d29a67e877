//! Wrapper of `matmul.wgsl`: quantised weights times f32 activations, matrix-vector and matrix-matrix.

use shaders::{MATMUL, Shader, Value, Variant, params};

use super::{Bindable, DeviceMatrix, Encoder, GpuBuffer, MatmulShape, Shard};
use crate::ops::DeviceError;

/// `output` (tokens × rows) (+)= `input` (tokens × columns) · `matrix`ᵀ; one dispatch a shard.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn matmul(
    encoder: &mut Encoder,
    shape: MatmulShape,
    matrix: &DeviceMatrix,
    input: &GpuBuffer,
    output: &GpuBuffer,
    num_tokens: u32,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let tokens = u64::from(num_tokens);
    assert!(tokens * matrix.columns as u64 * 4 <= input.size && tokens * matrix.rows as u64 * 4 <= output.size);
    for shard in &matrix.shards {
        let mut variant = variant(&MATMUL, shape, shard);
        variant.values.insert("SLICES", Value::Number(shape.slices));
        let kernel = encoder.kernel(&variant)?;
        let params = params::Matmul {
            num_rows: shard.num_rows,
            row_start: shard.row_start,
            num_blocks: matrix.num_blocks(),
            num_tokens,
            output_stride: matrix.rows as u32,
            accumulate: accumulate.into(),
            ..Default::default()
        };
        let bound: [&dyn Bindable; 4] = [&shard.weights, &shard.scales, input, output];
        let work = tokens * u64::from(shard.num_rows) * matrix.columns as u64;
        // Lanes of other slices have the same rows.
        let [x, y, z] = grid(shape, shard.num_rows * shape.slices, num_tokens);
        encoder.dispatch(&kernel, &bound, &params, [x, y, z], work)?;
    }
    Ok(())
}

/// The variant of a matrix kernel for this shape and what a shard holds.
pub(super) fn variant(shader: &'static Shader, shape: MatmulShape, shard: &Shard) -> Variant {
    let values = [
        ("FORMAT", Value::Word(shard.format.word())),
        ("IMAGE", Value::Number(shard.in_images().into())),
        ("ROWS", Value::Number(shape.rows)),
        ("TOKENS", Value::Number(shape.tokens)),
        ("WORKGROUP_SIZE", Value::Number(shape.workgroup_size)),
    ];
    Variant::new(shader, &values)
}

/// Rows along x, tokens along y.
pub(super) fn grid(shape: MatmulShape, num_rows: u32, num_tokens: u32) -> [u32; 3] {
    [num_rows.div_ceil(shape.workgroup_size * shape.rows), num_tokens.div_ceil(shape.tokens), 1]
}
