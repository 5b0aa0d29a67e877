//! The end of a step: choosing tokens on the device, and reading back no more than was asked for.
//!
//! All-greedy steps are one argmax. Else the logits are copied to scores, which biases and penalties change and from which
//! tokens are drawn; log probabilities are of the logits as they were.

use shaders::params::{LogitEntry, RowDraw};

use super::{Buffer, DeviceError, Rows, WgpuOps};
use crate::batch::{Choice, Selected, Selection, TokenLogprob};
use crate::kernels::{self, Gpu, GpuBuffer};

/// Most log probabilities a token.
pub const MAX_DEVICE_LOGPROBS: usize = 128;

/// Buffers of the choice, by logits row.
pub(super) struct SelectBuffers {
    best: GpuBuffer,
    chosen: GpuBuffer,
    draws: GpuBuffer,
    logprobs: GpuBuffer,
    top: GpuBuffer,
    /// A copy of the logits, allocated by the first step that changes any: the warm-up, which knows their width.
    scores: Option<GpuBuffer>,
    /// Grown when needed.
    entries: GpuBuffer,
}

impl SelectBuffers {
    pub(super) fn allocate(gpu: &Gpu, max_rows: usize) -> Result<Self, DeviceError> {
        let rows = max_rows as u64;
        Ok(Self {
            best: gpu.allocate("argmax", rows * 8)?,
            chosen: gpu.allocate("chosen tokens", rows * 4)?,
            draws: gpu.allocate("draws", rows * size_of::<RowDraw>() as u64)?,
            logprobs: gpu.allocate("log probabilities", rows * 16)?,
            top: gpu.allocate("top k", rows * MAX_DEVICE_LOGPROBS as u64 * 8)?,
            scores: None,
            entries: gpu.allocate("logit changes", 64 * size_of::<LogitEntry>() as u64)?,
        })
    }
}

/// What came back of the logits rows.
struct ReadBack {
    /// (index or `u32::MAX` for a NaN, value bits) by row.
    best: Vec<[u32; 2]>,
    /// Token by row, where more than greedy was asked for.
    chosen: Vec<u32>,
    /// (logit bits, log Σ exp bits, rank, 0) by row.
    logprobs: Vec<[u32; 4]>,
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
        let selections = std::mem::take(&mut self.input.selections);
        let is_plain = selections.iter().all(|selection| {
            matches!(selection.choice, Choice::Greedy | Choice::Logits)
                && selection.adjustments.is_empty()
                && selection.num_logprobs.is_none()
        });
        if is_plain {
            kernels::argmax(&mut self.encoder, &self.plan, &logits.values, &self.select.best, width, num_rows)?;
        } else {
            self.choose(logits, &selections)?;
        }
        let num_logprobs = selections.iter().filter_map(|selection| selection.num_logprobs).max();
        if num_logprobs.is_some() {
            let SelectBuffers { chosen, logprobs, .. } = &self.select;
            let encoder = &mut self.encoder;
            kernels::token_logprobs(encoder, &self.plan, &logits.values, chosen, logprobs, width, num_rows)?;
        }
        let k = num_logprobs.unwrap_or(0).min(MAX_DEVICE_LOGPROBS).min(logits.width) as u32;
        if k > 0 {
            let encoder = &mut self.encoder;
            kernels::top_k(encoder, &self.plan, &logits.values, &self.select.top, width, k, num_rows)?;
        }
        self.encoder.submit()?;
        let whole_rows = selections.iter().any(|selection| selection.choice == Choice::Logits);
        let read = self.read_back(logits, num_rows, k, !is_plain, num_logprobs.is_some(), whole_rows)?;
        Ok(selections.iter().enumerate().map(|(row, selection)| read.answer(row, selection)).collect())
    }

    /// Changes a copy of the logits and draws from it.
    fn choose(&mut self, logits: &Buffer, selections: &[Selection]) -> Result<(), DeviceError> {
        let (width, num_rows) = (logits.width as u32, selections.len() as u32);
        if self.select.scores.is_none() {
            self.select.scores = Some(self.gpu.allocate("scores", logits.values.size)?);
        }
        let entries = entries(selections, width);
        let bytes = size_of_val(&entries[..]) as u64;
        if bytes > self.select.entries.size {
            self.encoder.forget(&self.select.entries);
            self.select.entries = self.gpu.allocate("logit changes", self.gpu.grown(bytes))?;
        }
        let draws: Vec<RowDraw> = selections.iter().map(row_draw).collect();
        self.gpu.write(&self.select.draws, 0, bytemuck::cast_slice(&draws));
        self.gpu.write(&self.select.entries, 0, bytemuck::cast_slice(&entries));
        let SelectBuffers { best, chosen, draws, scores, entries: entry_buffer, .. } = &self.select;
        let Some(scores) = scores else { return Ok(()) };
        let (encoder, plan) = (&mut self.encoder, &self.plan);
        encoder.copy(&logits.values, scores, u64::from(width) * u64::from(num_rows) * 4);
        if !entries.is_empty() {
            kernels::adjust_logits(encoder, plan, entry_buffer, scores, entries.len() as u32)?;
        }
        kernels::argmax(encoder, plan, scores, best, width, num_rows)?;
        kernels::sample(encoder, plan, scores, best, draws, chosen, width, num_rows)
    }

    fn read_back(
        &self,
        logits: &Buffer,
        num_rows: u32,
        k: u32,
        has_chosen: bool,
        has_logprobs: bool,
        whole_rows: bool,
    ) -> Result<ReadBack, DeviceError> {
        let rows = u64::from(num_rows);
        let only = |wanted: bool, bytes: u64| if wanted { bytes } else { 0 };
        let select = &self.select;
        let read = self.gpu.read(&[
            (&select.best, rows * 8),
            (&select.chosen, only(has_chosen, rows * 4)),
            (&select.logprobs, only(has_logprobs, rows * 16)),
            (&select.top, rows * u64::from(k) * 8),
            (&logits.values, only(whole_rows, rows * logits.width as u64 * 4)),
        ])?;
        Ok(ReadBack {
            best: bytemuck::pod_collect_to_vec(&read[0]),
            chosen: bytemuck::pod_collect_to_vec(&read[1]),
            logprobs: bytemuck::pod_collect_to_vec(&read[2]),
            top: bytemuck::pod_collect_to_vec(&read[3]),
            k: k as usize,
            logits: bytemuck::pod_collect_to_vec(&read[4]),
            width: logits.width,
        })
    }
}

fn entries(selections: &[Selection], width: u32) -> Vec<LogitEntry> {
    let rows = (0u32..).zip(selections);
    rows.flat_map(|(row, selection)| {
        selection.adjustments.iter().map(move |adjustment| LogitEntry {
            index: row * width + adjustment.token,
            bias: adjustment.bias,
            repetition: adjustment.repetition,
            subtract: adjustment.subtract,
        })
    })
    .collect()
}

fn row_draw(selection: &Selection) -> RowDraw {
    match selection.choice {
        Choice::Greedy | Choice::Logits => RowDraw::default(),
        Choice::Given(token) => RowDraw { kind: 2, token, ..Default::default() },
        Choice::Random(draw) => RowDraw {
            kind: 1,
            inverse_temperature: 1.0 / draw.temperature,
            top_k: draw.top_k,
            top_p: draw.top_p,
            min_p: draw.min_p,
            uniform: draw.uniform,
            ..Default::default()
        },
    }
}

impl ReadBack {
    fn answer(&self, row: usize, selection: &Selection) -> Selected {
        let best = self.best[row][0];
        if best == u32::MAX {
            return Selected::NotANumber;
        }
        if selection.choice == Choice::Logits {
            return Selected::Logits(self.logits[row * self.width..][..self.width].to_vec());
        }
        let token = self.chosen.get(row).copied().unwrap_or(best);
        let logprob = selection.num_logprobs.map(|wanted| {
            let [logit, log_sum, rank, _] = self.logprobs[row];
            let log_sum = f32::from_bits(log_sum);
            let top = sorted(&self.top[row * self.k..][..self.k], wanted);
            TokenLogprob {
                logprob: f32::from_bits(logit) - log_sum,
                rank,
                top: top.into_iter().map(|(token, logit)| (token, logit - log_sum)).collect(),
            }
        });
        Selected::Token(token, logprob)
    }
}

/// The kernel leaves its k in no order; the first `wanted` by value, then index.
fn sorted(pairs: &[[u32; 2]], wanted: usize) -> Vec<(u32, f32)> {
    let mut sorted: Vec<(u32, f32)> = pairs.iter().map(|&[index, bits]| (index, f32::from_bits(bits))).collect();
    sorted.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    sorted.truncate(wanted);
    sorted
}
