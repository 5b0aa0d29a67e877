//! What each step uploads: tokens, slots, rotations, block tables and the attention kernels' work lists.
//!
//! Buffers are allocated once for the largest step and written at the start of each, so that bind groups stay valid.

use super::{DeviceError, Rotary};
use crate::batch::ModelInput;
use crate::kernels::{Encoder, Gpu, GpuBuffer, Plan};
use crate::kv::KvLayout;

/// Bounds of one step, fixed at start: they size the buffers.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Rows of a step.
    pub max_rows: usize,
    /// Sequences of a step.
    pub max_sequences: usize,
    /// Rows of a step whose logits are computed.
    pub max_logits_rows: usize,
    /// Tokens of one sequence.
    pub max_model_len: usize,
}

/// The step's inputs on the device.
pub(super) struct StepInputs {
    pub(super) token_ids: GpuBuffer,
    pub(super) slot_mapping: GpuBuffer,
    /// Of each table: (cos, sin) by row and pair.
    pub(super) rotations: Vec<GpuBuffer>,
    /// By sequence, padded to the longest.
    pub(super) block_tables: GpuBuffer,
    pub(super) context_lens: GpuBuffer,
    /// (sequence, split) of each decode work item.
    pub(super) splits: GpuBuffer,
    /// Bounds of each sequence's work items.
    pub(super) split_starts: GpuBuffer,
    /// (first row, query_len, context_len, 0) by sequence.
    pub(super) chunks: GpuBuffer,
    /// (sequence, first query) of each prefill work item.
    pub(super) tiles: GpuBuffer,
    pub(super) logits_rows: GpuBuffer,
}

/// Numbers of the current step that dispatches need.
#[derive(Default)]
pub(super) struct StepShape {
    pub(super) num_splits: u32,
    pub(super) num_tiles: u32,
    pub(super) block_table_stride: u32,
    /// Σ context lengths in decode.
    pub(super) decode_context: u64,
    /// Σ queries × context lengths in prefill.
    pub(super) prefill_pairs: u64,
}

impl StepInputs {
    pub(super) fn allocate(
        gpu: &Gpu,
        plan: &Plan,
        layout: &KvLayout,
        rotaries: &[Rotary],
        limits: StepLimits,
        max_splits: u64,
    ) -> Result<Self, DeviceError> {
        let (rows, sequences) = (limits.max_rows as u64, limits.max_sequences as u64);
        let blocks_per_sequence = limits.max_model_len.div_ceil(layout.block_size) as u64;
        let max_tiles = rows / u64::from(plan.query_tile) + sequences + 1;
        let mut rotations = Vec::with_capacity(rotaries.len());
        for rotary in rotaries {
            rotations.push(gpu.allocate("rotary table", rows * rotary.num_pairs() as u64 * 8)?);
        }
        Ok(Self {
            token_ids: gpu.allocate("token ids", rows * 4)?,
            slot_mapping: gpu.allocate("slot mapping", rows * 4)?,
            rotations,
            block_tables: gpu.allocate("block tables", sequences * blocks_per_sequence * 4)?,
            context_lens: gpu.allocate("context lengths", sequences * 4)?,
            splits: gpu.allocate("splits", max_splits * 8)?,
            split_starts: gpu.allocate("split bounds", (sequences + 1) * 4)?,
            chunks: gpu.allocate("chunks", sequences * 16)?,
            tiles: gpu.allocate("query tiles", max_tiles * 8)?,
            logits_rows: gpu.allocate("logits rows", limits.max_logits_rows as u64 * 4)?,
        })
    }

    /// Writes a step's inputs; returns its shape.
    pub(super) fn upload(
        &mut self,
        gpu: &Gpu,
        encoder: &mut Encoder,
        plan: &Plan,
        rotaries: &[Rotary],
        input: &ModelInput,
    ) -> Result<StepShape, DeviceError> {
        gpu.write(&self.token_ids, 0, bytemuck::cast_slice(&input.token_ids));
        gpu.write(&self.slot_mapping, 0, bytemuck::cast_slice(&input.slot_mapping));
        for (rotary, buffer) in rotaries.iter().zip(&self.rotations) {
            gpu.write(buffer, 0, bytemuck::cast_slice(&rotary.table(&input.positions)));
        }
        let logits_rows: Vec<u32> = input.selections.iter().map(|selection| selection.row as u32).collect();
        gpu.write(&self.logits_rows, 0, bytemuck::cast_slice(&logits_rows));
        let tables = Tables::of(plan, input);
        gpu.write(&self.block_tables, 0, bytemuck::cast_slice(&tables.block_tables));
        gpu.write(&self.context_lens, 0, bytemuck::cast_slice(&tables.context_lens));
        gpu.write(&self.chunks, 0, bytemuck::cast_slice(&tables.chunks));
        let splits_bytes = size_of_val(&tables.splits[..]) as u64;
        if splits_bytes > self.splits.size {
            encoder.forget(&self.splits);
            self.splits = gpu.allocate("splits", gpu.grown(splits_bytes))?;
        }
        gpu.write(&self.splits, 0, bytemuck::cast_slice(&tables.splits));
        gpu.write(&self.split_starts, 0, bytemuck::cast_slice(&tables.split_starts));
        gpu.write(&self.tiles, 0, bytemuck::cast_slice(&tables.tiles));
        Ok(tables.shape)
    }
}

/// The sequences of a step as the attention kernels want them.
#[derive(Default)]
struct Tables {
    block_tables: Vec<u32>,
    context_lens: Vec<u32>,
    chunks: Vec<[u32; 4]>,
    splits: Vec<[u32; 2]>,
    split_starts: Vec<u32>,
    tiles: Vec<[u32; 2]>,
    shape: StepShape,
}

impl Tables {
    fn of(plan: &Plan, input: &ModelInput) -> Self {
        let stride = input.sequences.iter().map(|sequence| sequence.block_table.len()).max().unwrap_or(0);
        let block_tables = vec![0; stride * input.sequences.len()];
        let mut tables = Self { block_tables, split_starts: vec![0], ..Self::default() };
        for (index, sequence) in input.sequences.iter().enumerate() {
            tables.block_tables[index * stride..][..sequence.block_table.len()].copy_from_slice(&sequence.block_table);
            let (query_len, context_len) = (sequence.query_len as u32, sequence.context_len as u32);
            tables.context_lens.push(context_len);
            tables.chunks.push([sequence.first_row as u32, query_len, context_len, 0]);
            if index < input.num_decodes {
                tables.splits.extend((0..context_len.div_ceil(plan.split)).map(|split| [index as u32, split]));
                tables.split_starts.push(tables.splits.len() as u32);
                tables.shape.decode_context += u64::from(context_len);
            } else {
                let firsts = (0..query_len).step_by(plan.query_tile as usize);
                tables.tiles.extend(firsts.map(|first| [index as u32, first]));
                tables.shape.prefill_pairs += u64::from(query_len) * u64::from(context_len);
            }
        }
        tables.shape.num_splits = tables.splits.len() as u32;
        tables.shape.num_tiles = tables.tiles.len() as u32;
        tables.shape.block_table_stride = stride as u32;
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::BLOCK_SIZE;

    #[test]
    fn decodes_become_splits_and_prefills_become_tiles() {
        let plan = Plan::baseline();
        let mut input = ModelInput { num_decodes: 1, ..Default::default() };
        let blocks: Vec<u32> = (0..10).collect();
        input.push(&[1], 128, &blocks, BLOCK_SIZE);
        input.push(&[1; 40], 5, &[20, 21, 22], BLOCK_SIZE);
        let tables = Tables::of(&plan, &input);
        assert_eq!(tables.splits, [[0, 0], [0, 1], [0, 2]], "129 tokens in splits of 64");
        assert_eq!(tables.split_starts, [0, 3]);
        assert_eq!(tables.tiles, [[1, 0], [1, 32]], "40 queries in tiles of 32");
        assert_eq!(tables.chunks[1], [1, 40, 45, 0]);
        assert_eq!(
            (tables.shape.block_table_stride, &tables.block_tables[9..]),
            (9, &[20, 21, 22, 0, 0, 0, 0, 0, 0][..])
        );
    }
}
