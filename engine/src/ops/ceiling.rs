//! What a device can give at most, measured: bytes a second of a plain copy, multiply-adds a second of a product whose weights
//! stay near. Numbers of a model mean little without these.
//!
//! Asked for by `pagoda bench engine`; each device's ops run the two through the kernels that the model runs through.

use std::time::Instant;

use super::{DeviceError, Ops, Rows, Write};
use crate::batch::{Choice, ModelInput};
use crate::kv::BLOCK_SIZE;
use crate::model_file::{StorageType, Tensor};

/// The most that was seen.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ceiling {
    /// Bytes read and written a second.
    pub copy_bytes_per_s: f64,
    /// Multiply-adds a second of one token, and of `MANY_TOKENS` at once.
    pub dot_per_s: [f64; 2],
}

/// Tokens of the larger product.
pub const MANY_TOKENS: usize = 64;
const ROWS: usize = 512;
const COLUMNS: usize = 512;
const REPEATS: usize = 50;
/// Past every cache.
const COPY_BYTES: usize = 64 << 20;

/// Measures a device.
///
/// # Errors
/// When the device fails.
pub fn measure<O: Ops>(ops: &mut O) -> Result<Ceiling, DeviceError> {
    let mut copy_bytes_per_s = 0.0f64;
    for round in 0..6 {
        let started = Instant::now();
        ops.copy_bytes(COPY_BYTES)?;
        // The first makes the buffers. A copy reads and writes.
        if round > 0 {
            copy_bytes_per_s = copy_bytes_per_s.max(2.0 * COPY_BYTES as f64 / started.elapsed().as_secs_f64());
        }
    }
    Ok(Ceiling { copy_bytes_per_s, dot_per_s: dots(ops)? })
}

/// Products: the best of some rounds.
fn dots<O: Ops>(ops: &mut O) -> Result<[f64; 2], DeviceError> {
    // Codes of one, so that nothing overflows.
    let block = [0, 0x3c].into_iter().chain([1; 32]);
    let bytes = block.cycle().take(ROWS * COLUMNS / 32 * 34).collect();
    let matrix = ops.matrix(&[Tensor::owned("a ceiling", StorageType::Q8_0, ROWS, COLUMNS, bytes)])?;
    let input = ops.buffer(MANY_TOKENS, COLUMNS)?;
    let mut output = ops.buffer(MANY_TOKENS, ROWS)?;
    let mut best = [0.0f64; 2];
    for (tokens, best) in [1, MANY_TOKENS].into_iter().zip(&mut best) {
        for _ in 0..4 {
            let mut step = ModelInput::default();
            let blocks: Vec<u32> = (0..tokens.div_ceil(BLOCK_SIZE) as u32).collect();
            step.push(&vec![0; tokens], 0, &blocks, BLOCK_SIZE);
            step.select_last(Choice::Greedy);
            ops.begin(&step)?;
            let repeats = if tokens == 1 { REPEATS } else { REPEATS / 5 };
            let started = Instant::now();
            for _ in 0..repeats {
                ops.linear(&input, &matrix, &mut output, Write::Store, Rows::Step)?;
            }
            // Ends when all of it has run.
            ops.select(&output)?;
            let work = repeats * tokens * ROWS * COLUMNS;
            *best = best.max(work as f64 / started.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}
