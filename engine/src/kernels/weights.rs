//! Weight matrices on the device: GGUF blocks repacked into aligned words, interleaved by row, sharded by rows.
//!
//! Made at load, read by the matrix and embedding wrappers. Layout: block b of row r lies at index b · num_rows + r, so
//! that neighbouring lanes (rows) read neighbouring words. Formats: `q4` (Q4_0 and Q4_1: 16 code bytes, d and m as two
//! f16), `q8` (Q8_0: 32 code bytes, d), `f16`, `f32`. A shard stays within the adapter's binding limit.

use half::f16;

use super::gpu::{Gpu, GpuBuffer};
use crate::gguf::{BLOCK_LEN, StorageType, Tensor};
use crate::ops::DeviceError;

/// A storage format of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceFormat {
    /// 128 bytes a block.
    F32,
    /// 64 bytes a block.
    F16,
    /// 16 bytes a block and (d, m).
    Q4,
    /// 32 bytes a block and d.
    Q8,
}

impl DeviceFormat {
    /// The format that holds a storage type.
    pub fn of(storage: StorageType) -> Self {
        match storage {
            StorageType::F32 => Self::F32,
            StorageType::F16 => Self::F16,
            StorageType::Q4_0 | StorageType::Q4_1 => Self::Q4,
            StorageType::Q8_0 => Self::Q8,
        }
    }

    /// The placeholder's value.
    pub fn word(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Q4 => "q4",
            Self::Q8 => "q8",
        }
    }

    /// Bytes of a block's codes.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 128,
            Self::F16 => 64,
            Self::Q4 => 16,
            Self::Q8 => 32,
        }
    }

    /// Whether blocks carry a scale word.
    pub fn has_scales(self) -> bool {
        matches!(self, Self::Q4 | Self::Q8)
    }
}

/// Rows `row_start..row_start + num_rows` of a matrix.
pub struct Shard {
    /// First row.
    pub row_start: u32,
    /// Rows.
    pub num_rows: u32,
    /// Codes.
    pub weights: GpuBuffer,
    /// (d, m) of each block as two f16; a stub where the format has none.
    pub scales: GpuBuffer,
}

/// A matrix on the device.
pub struct DeviceMatrix {
    /// Rows of all shards.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// How the shards are stored.
    pub format: DeviceFormat,
    /// In row order.
    pub shards: Vec<Shard>,
}

impl DeviceMatrix {
    /// Repacks and uploads `tensor`; no buffer passes `max_binding_bytes`.
    ///
    /// # Errors
    /// When columns are not whole blocks, or the device has no memory.
    pub fn upload(gpu: &Gpu, tensor: &Tensor, max_binding_bytes: u64) -> Result<Self, DeviceError> {
        let format = DeviceFormat::of(tensor.storage);
        if !tensor.columns.is_multiple_of(BLOCK_LEN) {
            let reason = format!("{} columns are not a multiple of {BLOCK_LEN}", tensor.columns);
            return Err(DeviceError::Refused { what: format!("tensor `{}`", tensor.name), reason });
        }
        let num_blocks = tensor.columns / BLOCK_LEN;
        let row_bytes = (num_blocks * format.block_bytes()) as u64;
        let rows_per_shard = (max_binding_bytes / row_bytes).min(tensor.rows as u64) as usize;
        if rows_per_shard == 0 {
            let reason = format!("one row has {row_bytes} bytes, a binding at most {max_binding_bytes}");
            return Err(DeviceError::Refused { what: format!("tensor `{}`", tensor.name), reason });
        }
        let mut shards = Vec::new();
        for row_start in (0..tensor.rows).step_by(rows_per_shard) {
            let num_rows = rows_per_shard.min(tensor.rows - row_start);
            let packed = repack(tensor, row_start, num_rows);
            let weights = gpu.upload(&tensor.name, &packed.codes)?;
            let scales = gpu.upload(&tensor.name, bytemuck::cast_slice(&packed.scales))?;
            shards.push(Shard { row_start: row_start as u32, num_rows: num_rows as u32, weights, scales });
        }
        Ok(Self { rows: tensor.rows, columns: tensor.columns, format, shards })
    }

    /// Blocks of 32 along a row.
    pub fn num_blocks(&self) -> u32 {
        (self.columns / BLOCK_LEN) as u32
    }
}

struct Packed {
    codes: Vec<u8>,
    scales: Vec<u32>,
}

fn pack_halves(low: f16, high: f16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

fn half_at(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

/// Interleaves the blocks of `num_rows` rows: block-major, rows within.
fn repack(tensor: &Tensor, row_start: usize, num_rows: usize) -> Packed {
    let format = DeviceFormat::of(tensor.storage);
    let num_blocks = tensor.columns / BLOCK_LEN;
    let (source_bytes, target_bytes) = (tensor.storage.block_bytes(), format.block_bytes());
    let mut codes = vec![0u8; num_blocks * num_rows * target_bytes];
    let mut scales = vec![0u32; if format.has_scales() { num_blocks * num_rows } else { 4 }];
    for row in 0..num_rows {
        let blocks = tensor.row(row_start + row).chunks_exact(source_bytes);
        for (block_index, block) in blocks.enumerate() {
            let index = block_index * num_rows + row;
            let target = &mut codes[index * target_bytes..][..target_bytes];
            match tensor.storage {
                StorageType::F32 | StorageType::F16 => target.copy_from_slice(block),
                StorageType::Q4_0 => {
                    let d = half_at(block, 0);
                    // −8·d only changes the exponent, so it is exact in f16 (short of overflow, which stays infinite).
                    scales[index] = pack_halves(d, f16::from_f32(-8.0 * d.to_f32()));
                    target.copy_from_slice(&block[2..]);
                }
                StorageType::Q4_1 => {
                    scales[index] = pack_halves(half_at(block, 0), half_at(block, 2));
                    target.copy_from_slice(&block[4..]);
                }
                StorageType::Q8_0 => {
                    scales[index] = pack_halves(half_at(block, 0), f16::ZERO);
                    target.copy_from_slice(&block[2..]);
                }
            }
        }
    }
    Packed { codes, scales }
}
