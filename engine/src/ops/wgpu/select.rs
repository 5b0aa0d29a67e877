//! The end of a step: argmax and top-k on the device, and reading back no more than was asked for.

use super::{Buffer, DeviceError, Rows, WgpuOps};
use crate::batch::{Selected, Selection};
use crate::kernels;
use crate::ops::cpu::select_row;

/// Largest k that is selected on the device; a larger one reads the row back.
pub const MAX_DEVICE_TOP_K: usize = 128;

/// What came back of the logits rows.
struct ReadBack {
    /// (index or `u32::MAX` for a NaN, value bits) by row.
    best: Vec<[u32; 2]>,
    /// `k` pairs (index, value bits) a row.
    top: Vec<[u32; 2]>,
    k: usize,
    /// Whole rows, where any was asked for.
    logits: Vec<f32>,
    width: usize,
}

impl WgpuOps {
    /// Submits the step and answers its selections.
    pub(super) fn select_rows(&mut self, logits: &Buffer) -> Result<Vec<Selected>, DeviceError> {
        let num_rows = self.num_rows(Rows::Logits);
        if num_rows == 0 {
            self.encoder.submit()?;
            self.gpu.wait()?;
            return Ok(Vec::new());
        }
        let width = logits.width as u32;
        kernels::argmax(&mut self.encoder, &self.plan, &logits.values, &self.best, width, num_rows)?;
        let k = self.device_top_k().min(width);
        if k > 0 {
            kernels::top_k(&mut self.encoder, &self.plan, &logits.values, &self.top, width, k, num_rows)?;
        }
        self.encoder.submit()?;
        let read = self.read_back(logits, num_rows, k)?;
        Ok(self.input.selections.iter().enumerate().map(|(row, (_, selection))| read.answer(row, *selection)).collect())
    }

    /// The largest k that the device is asked for, 0 for none.
    fn device_top_k(&self) -> u32 {
        let wanted = self.input.selections.iter().filter_map(|(_, selection)| match selection {
            Selection::TopK(k) if *k <= MAX_DEVICE_TOP_K => Some(*k as u32),
            _ => None,
        });
        wanted.max().unwrap_or(0)
    }

    fn read_back(&self, logits: &Buffer, num_rows: u32, k: u32) -> Result<ReadBack, DeviceError> {
        let whole_rows = self.input.selections.iter().any(|(_, selection)| match selection {
            Selection::Logits => true,
            Selection::TopK(k) => *k > MAX_DEVICE_TOP_K,
            Selection::Argmax => false,
        });
        let rows = u64::from(num_rows);
        let mut wanted = vec![(&self.best, rows * 8), (&self.top, rows * u64::from(k) * 8)];
        if whole_rows {
            wanted.push((&logits.values, rows * logits.width as u64 * 4));
        }
        let read = self.gpu.read(&wanted)?;
        Ok(ReadBack {
            best: bytemuck::pod_collect_to_vec(&read[0]),
            top: bytemuck::pod_collect_to_vec(&read[1]),
            k: k as usize,
            logits: if whole_rows { bytemuck::pod_collect_to_vec(&read[2]) } else { Vec::new() },
            width: logits.width,
        })
    }
}

impl ReadBack {
    fn answer(&self, row: usize, selection: Selection) -> Selected {
        if self.best[row][0] == u32::MAX {
            return Selected::NotANumber;
        }
        match selection {
            Selection::Argmax => Selected::Token(self.best[row][0]),
            Selection::TopK(wanted) if wanted <= MAX_DEVICE_TOP_K => {
                Selected::TopK(sorted(&self.top[row * self.k..][..self.k], wanted))
            }
            Selection::TopK(_) | Selection::Logits => {
                select_row(&self.logits[row * self.width..][..self.width], selection)
            }
        }
    }
}

/// The kernel leaves its k in no order; the first `wanted` by value, then index.
fn sorted(pairs: &[[u32; 2]], wanted: usize) -> Vec<(u32, f32)> {
    let mut sorted: Vec<(u32, f32)> = pairs.iter().map(|&[index, bits]| (index, f32::from_bits(bits))).collect();
    sorted.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    sorted.truncate(wanted);
    sorted
}
