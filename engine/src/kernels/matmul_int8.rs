//! Wrapper of `matmul_int8.wgsl`: quantised weights times int8 activations.

use shaders::{MATMUL_INT8, Value, params};

use super::matmul::{grid, variant};
use super::{Bindable, DeviceMatrix, Encoder, GpuBuffer, MatmulShape};
use crate::ops::DeviceError;

/// As `matmul`, over activations rounded by `quantize_activations`; the matrix's format has integer codes.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
#[expect(clippy::too_many_arguments, reason = "the op's operands")]
pub fn matmul_int8(
    encoder: &mut Encoder,
    shape: MatmulShape,
    matrix: &DeviceMatrix,
    codes: &GpuBuffer,
    block_scales: &GpuBuffer,
    output: &GpuBuffer,
    num_tokens: u32,
    accumulate: bool,
) -> Result<(), DeviceError> {
    let tokens = u64::from(num_tokens);
    assert!(matrix.has_codes(), "a matrix of {} rows has no integer codes", matrix.rows);
    assert!(tokens * matrix.columns as u64 <= codes.size && tokens * matrix.rows as u64 * 4 <= output.size);
    for shard in &matrix.shards {
        let mut variant = variant(&MATMUL_INT8, shape, shard);
        variant.values.insert("SHARE", Value::Number(shape.share.into()));
        let kernel = encoder.kernel(&variant)?;
        let params = params::MatmulInt8 {
            num_rows: shard.num_rows,
            row_start: shard.row_start,
            num_blocks: matrix.num_blocks(),
            num_tokens,
            output_stride: matrix.rows as u32,
            accumulate: accumulate.into(),
            ..Default::default()
        };
        let bound: [&dyn Bindable; 5] = [&shard.weights, &shard.scales, codes, block_scales, output];
        let work = tokens * u64::from(shard.num_rows) * matrix.columns as u64;
        encoder.dispatch(&kernel, &bound, &params, grid(shape, shard.num_rows, num_tokens), work)?;
    }
    Ok(())
}
