//! Weight matrices on the device: blocks of 32 repacked into aligned words (`repack`), interleaved by row, sharded by rows.
//!
//! Made at load, read by the matrix and embedding wrappers. Layout: rows lie in tiles of 32, a tile's blocks one behind the
//! other and its rows side by side within each, so that neighbouring lanes (rows) read neighbouring words and a workgroup reads
//! one stretch of memory. A matrix may be stacked from several tensors; a shard has rows
//! of one format and stays within the adapter's binding limit. Invariant: repacking goes by pieces of bounded size, so that
//! no second copy of a matrix is held.

use super::gpu::Gpu;
use super::image::{IMAGE_WIDTH, Words};
use super::repack::{DeviceFormat, UNIT_BLOCKS, pack};
use crate::model_file::{BLOCK_LEN, Tensor};
use crate::ops::DeviceError;

/// Rows `row_start..row_start + num_rows` of a matrix.
pub struct Shard {
    /// First row.
    pub row_start: u32,
    /// Rows.
    pub num_rows: u32,
    /// How they are stored.
    pub format: DeviceFormat,
    /// Codes, four words together.
    pub weights: Words,
    /// Scale words of each block, then units by eight blocks where the format has those; a stub where it has neither.
    pub scales: Words,
}

impl Shard {
    /// Whether kernels read it as images.
    pub fn in_images(&self) -> bool {
        matches!(self.weights, Words::Image(_))
    }
}

/// Where weights may lie.
#[derive(Clone, Copy, Debug)]
pub struct Placement {
    /// Largest part of a buffer that one binding can cover.
    pub max_binding_bytes: u64,
    /// Rows of the tallest image, where weights lie in images.
    pub image_rows: Option<u32>,
}

impl Placement {
    /// Rows of a matrix that one shard can hold.
    fn rows_a_shard(&self, format: DeviceFormat, num_blocks: usize) -> u64 {
        // A row's codes, by texels of four words, and its scale words with a share of its units.
        let code_texels = (num_blocks * format.block_bytes() / 16) as u64;
        let scale_words = (num_blocks * (format.scale_words() + 1)) as u64;
        let by_bytes = self.max_binding_bytes / (16 * code_texels).max(4 * scale_words).max(1);
        let Some(rows) = self.image_rows else { return by_bytes };
        by_bytes.min(u64::from(rows) * u64::from(IMAGE_WIDTH) / code_texels.max(scale_words).max(1))
    }
}

/// A matrix on the device.
pub struct DeviceMatrix {
    /// Rows of all shards.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// In row order.
    pub shards: Vec<Shard>,
}

/// Bytes of codes that are repacked and uploaded at a time.
const PIECE_BYTES: usize = 16 << 20;
/// Rows of a tile: `block_index` of the shaders has it too.
const TILE_ROWS: usize = 32;

/// Rows of one format, in order: the tensor and the row in it.
struct Run<'a> {
    format: DeviceFormat,
    rows: Vec<(&'a Tensor, usize)>,
}

impl DeviceMatrix {
    /// Repacks and uploads tensors of equal columns, one below the other, in shards that fit a binding.
    ///
    /// # Errors
    /// When columns differ or are not whole blocks, or the device has no memory.
    pub fn upload(gpu: &Gpu, tensors: &[Tensor], placement: Placement) -> Result<Self, DeviceError> {
        let refused = |tensor: &Tensor, reason: String| DeviceError::Refused {
            what: format!("tensor `{}`", tensor.name),
            reason,
        };
        let columns = tensors.first().map_or(0, |tensor| tensor.columns);
        for tensor in tensors {
            if !tensor.columns.is_multiple_of(BLOCK_LEN) {
                return Err(refused(tensor, format!("{} columns are not a multiple of {BLOCK_LEN}", tensor.columns)));
            }
            if tensor.columns != columns {
                return Err(refused(tensor, format!("{} columns, those above it have {columns}", tensor.columns)));
            }
        }
        let num_blocks = columns / BLOCK_LEN;
        let (mut shards, mut row_start) = (Vec::new(), 0);
        for run in runs(tensors) {
            let rows_per_shard = placement.rows_a_shard(run.format, num_blocks);
            if rows_per_shard == 0 {
                let bytes = num_blocks * run.format.block_bytes();
                let reason = format!("one row has {bytes} bytes, a binding at most {}", placement.max_binding_bytes);
                return Err(refused(run.rows[0].0, reason));
            }
            let rows_per_shard = usize::try_from(rows_per_shard).unwrap_or(usize::MAX);
            for rows in run.rows.chunks(rows_per_shard) {
                shards.push(upload_shard(
                    gpu,
                    run.format,
                    rows,
                    row_start,
                    num_blocks,
                    placement.image_rows.is_some(),
                )?);
                row_start += rows.len();
            }
        }
        Ok(Self { rows: row_start, columns, shards })
    }

    /// Blocks of 32 along a row.
    pub fn num_blocks(&self) -> u32 {
        (self.columns / BLOCK_LEN) as u32
    }

    /// Whether all shards have integer codes.
    pub fn has_codes(&self) -> bool {
        self.shards.iter().all(|shard| shard.format.has_codes())
    }
}

/// Neighbouring tensors of one format are one run.
fn runs(tensors: &[Tensor]) -> Vec<Run<'_>> {
    let mut runs: Vec<Run<'_>> = Vec::new();
    for tensor in tensors {
        let format = DeviceFormat::of(tensor.storage);
        let rows = (0..tensor.rows).map(|row| (tensor, row));
        match runs.last_mut().filter(|run| run.format == format) {
            Some(run) => run.rows.extend(rows),
            None => runs.push(Run { format, rows: rows.collect() }),
        }
    }
    runs
}

fn upload_shard(
    gpu: &Gpu,
    format: DeviceFormat,
    rows: &[(&Tensor, usize)],
    row_start: usize,
    num_blocks: usize,
    in_images: bool,
) -> Result<Shard, DeviceError> {
    let (name, num_rows) = (&rows[0].0.name, rows.len());
    let (block_bytes, scale_words) = (format.block_bytes(), format.scale_words());
    let num_units = if format.has_units() { num_blocks.div_ceil(UNIT_BLOCKS) } else { 0 };
    let scale_count = num_rows * (num_blocks * scale_words + num_units);
    let weights = Words::allocate(gpu, name, (num_rows * num_blocks * block_bytes / 16) as u64, 4, in_images)?;
    let scales = Words::allocate(gpu, name, scale_count as u64, 1, in_images)?;
    let tile_bytes = TILE_ROWS * num_blocks * block_bytes;
    let tiles_a_piece = (PIECE_BYTES / tile_bytes.max(1)).max(1);
    let (mut codes, mut words, mut units) = (Vec::new(), Vec::new(), Vec::new());
    for (piece, rows) in rows.chunks(tiles_a_piece * TILE_ROWS).enumerate() {
        let first_row = piece * tiles_a_piece * TILE_ROWS;
        fill(&mut codes, rows.len() * num_blocks * block_bytes);
        fill(&mut words, rows.len() * num_blocks * scale_words);
        fill(&mut units, rows.len() * num_units);
        for (tile, tile_rows) in rows.chunks(TILE_ROWS).enumerate() {
            let (first, width) = (tile * TILE_ROWS, tile_rows.len());
            for (row, (tensor, source)) in tile_rows.iter().enumerate() {
                pack(tensor.storage, tensor.row(*source), |block, block_codes, block_words| {
                    let index = first * num_blocks + block * width + row;
                    codes[index * block_bytes..][..block_bytes].copy_from_slice(block_codes);
                    words[index * scale_words..][..scale_words].copy_from_slice(&block_words[..scale_words]);
                    if let Some(unit) = block_words.get(scale_words) {
                        units[first * num_units + block / UNIT_BLOCKS * width + row] = *unit;
                    }
                });
            }
        }
        weights.write(gpu, (first_row * num_blocks * block_bytes / 16) as u64, 4, &codes);
        if scale_words > 0 {
            scales.write(gpu, (first_row * num_blocks * scale_words) as u64, 1, bytemuck::cast_slice(&words));
        }
        if num_units > 0 {
            let start = num_rows * num_blocks * scale_words + first_row * num_units;
            scales.write(gpu, start as u64, 1, bytemuck::cast_slice(&units));
        }
        // What was written is copied before the next piece waits in staging memory.
        gpu.queue.submit([]);
        gpu.wait()?;
    }
    Ok(Shard { row_start: row_start as u32, num_rows: num_rows as u32, format, weights, scales })
}

fn fill<T: Clone + Default>(values: &mut Vec<T>, len: usize) {
    values.clear();
    values.resize(len, T::default());
}
