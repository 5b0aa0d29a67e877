//! Wrapper of `embedding.wgsl`: the rows of the step's tokens.

use shaders::{EMBEDDING, Value, Variant, params};

use super::{DeviceMatrix, Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// `output[row]` = `table[token_ids[row]]` · `scale` for `num_tokens` rows; one dispatch a shard.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn embedding(
    encoder: &mut Encoder,
    plan: &Plan,
    table: &DeviceMatrix,
    token_ids: &GpuBuffer,
    output: &GpuBuffer,
    num_tokens: u32,
    scale: f32,
) -> Result<(), DeviceError> {
    assert!(u64::from(num_tokens) * table.columns as u64 * 4 <= output.size);
    let num_blocks = table.num_blocks();
    for shard in &table.shards {
        let values = [
            ("FORMAT", Value::Word(shard.format.word())),
            ("IMAGE", Value::Number(shard.in_images().into())),
            ("WORKGROUP_SIZE", Value::Number(plan.workgroup_size)),
        ];
        let kernel = encoder.kernel(&Variant::new(&EMBEDDING, &values))?;
        let params = params::Embedding { num_rows: shard.num_rows, row_start: shard.row_start, num_blocks, scale };
        let grid = [num_blocks.div_ceil(plan.workgroup_size), num_tokens, 1];
        let work = u64::from(num_tokens) * table.columns as u64;
        encoder.dispatch(&kernel, &[&shard.weights, &shard.scales, token_ids, output], &params, grid, work)?;
    }
    Ok(())
}
