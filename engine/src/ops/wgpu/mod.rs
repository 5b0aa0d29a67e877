//! The ops as WGSL dispatches: each records one or two kernels, `select` submits and reads the answer back.
//!
//! Called by the model definitions on the engine thread. Only selected tokens (or asked-for logits) leave the device.

mod copy;
mod select;
mod step;

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::rotary::Rotary;
use super::{Attention, DeviceError, Ops, Rows, Write};
use crate::batch::{ModelInput, Selected};
use crate::kernels::{
    self, Activations, Arithmetic, DeviceMatrix, Encoder, Gpu, GpuBuffer, KernelTimes, Norm, Plan, RoundedTo, Turn,
};
use crate::kv::{BlockId, KvLayout, Load};
use crate::model::{Activation, PairOrder};
use crate::model_file::Tensor;
use copy::CopyBuffers;
pub use select::MAX_DEVICE_LOGPROBS;
use select::SelectBuffers;
pub use step::StepLimits;
use step::{StepInputs, StepShape};

/// Activations on the device, with room for their int8 rounding.
pub struct Buffer {
    values: GpuBuffer,
    width: usize,
    rounded: Option<Rounded>,
}

/// A buffer rounded to int8; made when the first product needs it, stale once the buffer is written again.
struct Rounded {
    codes: GpuBuffer,
    block_scales: GpuBuffer,
    fresh: Cell<bool>,
}

impl Buffer {
    fn written(&mut self) {
        if let Some(rounded) = &self.rounded {
            rounded.fresh.set(false);
        }
    }

    /// Where a kernel that writes the buffer puts its rounding, which is then fresh; `None` where nobody wants one.
    fn rounded_with(&self) -> Option<RoundedTo<'_>> {
        let rounded = self.rounded.as_ref()?;
        rounded.fresh.set(true);
        Some(RoundedTo { codes: &rounded.codes, block_scales: &rounded.block_scales })
    }
}

struct LayerCache {
    key: GpuBuffer,
    value: GpuBuffer,
}

/// The `wgpu` device.
pub struct WgpuOps {
    gpu: Arc<Gpu>,
    encoder: Encoder,
    plan: Plan,
    layout: KvLayout,
    rotaries: Vec<Rotary>,
    pair_order: PairOrder,
    cache: Vec<LayerCache>,
    inputs: StepInputs,
    partials: GpuBuffer,
    select: SelectBuffers,
    copies: CopyBuffers,
    /// Between these bytes are copied to see how fast that is.
    copied: Option<[GpuBuffer; 2]>,
    input: ModelInput,
    shape: StepShape,
}

impl WgpuOps {
    /// Allocates the KV cache and the step's buffers; pipelines are kept in `pipeline_cache`.
    ///
    /// # Errors
    /// When the device cannot hold them.
    pub fn new(
        gpu: Arc<Gpu>,
        mut plan: Plan,
        layout: KvLayout,
        rotaries: Vec<Rotary>,
        pair_order: PairOrder,
        limits: StepLimits,
        pipeline_cache: Option<&Path>,
    ) -> Result<Self, DeviceError> {
        let mut cache = Vec::with_capacity(layout.num_layers);
        for layer in 0..layout.num_layers {
            let what = format!("the KV cache of layer {layer}");
            let key = gpu.allocate(&what, layout.layer_bytes())?;
            let value = gpu.allocate(&what, layout.layer_bytes())?;
            cache.push(LayerCache { key, value });
        }
        let sequences = limits.max_sequences as u64;
        // Where no sequences share blocks, the splits of a step are bounded by the pool and one partial split each; a step
        // that has more grows its buffers, up to what the scheduler's bound on contexts allows.
        let max_splits = (layout.num_blocks * layout.block_size / plan.split as usize) as u64 + sequences;
        let inputs = StepInputs::allocate(&gpu, &plan, &layout, &rotaries, limits, max_splits)?;
        let mut encoder = Encoder::new(Arc::clone(&gpu), plan.max_work);
        pipeline_cache.into_iter().for_each(|directory| encoder.keep_pipelines(directory));
        let matrices = [Arithmetic::Matrix8, Arithmetic::Matrix16];
        if let Some(arithmetic) = plan.prefill.filter(|arithmetic| matrices.contains(arithmetic))
            && !kernels::agrees(&gpu, &mut encoder, &plan, arithmetic).map_err(failed_trial)?
        {
            plan.prefill = None;
        }
        Ok(Self {
            encoder,
            partials: gpu.allocate("attention splits", max_splits * partial_bytes(&layout))?,
            select: SelectBuffers::allocate(&gpu, limits.max_logits_rows)?,
            copies: CopyBuffers::default(),
            copied: None,
            pair_order,
            input: ModelInput::default(),
            shape: StepShape::default(),
            gpu,
            plan,
            layout,
            rotaries,
            cache,
            inputs,
        })
    }

    fn num_rows(&self, rows: Rows) -> u32 {
        match rows {
            Rows::Step => self.input.num_rows() as u32,
            Rows::Logits => self.input.selections.len() as u32,
        }
    }
}

/// A device that fails in the trial of its matrix units can be used without them.
fn failed_trial(error: DeviceError) -> DeviceError {
    let what = "the trial of the adapter's matrix units, which --activations f32 does without".to_owned();
    DeviceError::Refused { what, reason: error.to_string() }
}

/// To be raised by every change of kernels that changes the bits of keys or values.
const KERNELS_REVISION: u32 = 2;

/// Bytes of one split's partial results, all heads.
pub fn partial_bytes(layout: &KvLayout) -> u64 {
    ((layout.head_dim + 4) * layout.num_heads * 4) as u64
}

impl Ops for WgpuOps {
    type Buffer = Buffer;
    type Matrix = DeviceMatrix;
    type Vector = GpuBuffer;

    fn buffer(&mut self, max_rows: usize, width: usize) -> Result<Buffer, DeviceError> {
        let values = self.gpu.allocate("activations", (max_rows * width * 4) as u64)?;
        let rounds = self.plan.activations == Activations::Int8 && width.is_multiple_of(32);
        let rounded = if rounds {
            let codes = self.gpu.allocate("int8 activations", (max_rows * width) as u64)?;
            let block_scales = self.gpu.allocate("int8 activation scales", (max_rows * width / 4) as u64)?;
            Some(Rounded { codes, block_scales, fresh: Cell::new(false) })
        } else {
            None
        };
        Ok(Buffer { values, width, rounded })
    }

    fn matrix(&mut self, tensors: &[Tensor]) -> Result<DeviceMatrix, DeviceError> {
        DeviceMatrix::upload(&self.gpu, tensors, self.plan.placement(&self.gpu))
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> Result<GpuBuffer, DeviceError> {
        self.gpu.upload(name, bytemuck::cast_slice(values))
    }

    fn begin(&mut self, input: &ModelInput) -> Result<(), DeviceError> {
        self.gpu.check()?;
        self.input = input.clone();
        self.shape = self.inputs.upload(&self.gpu, &mut self.encoder, &self.plan, &self.rotaries, input)?;
        let needed = u64::from(self.shape.num_splits) * partial_bytes(&self.layout);
        if needed > self.partials.size {
            self.encoder.forget(&self.partials);
            self.partials = self.gpu.allocate("attention splits", self.gpu.grown(needed))?;
        }
        Ok(())
    }

    fn embedding(&mut self, table: &DeviceMatrix, scale: f32, output: &mut Buffer) -> Result<(), DeviceError> {
        output.written();
        let num_tokens = self.num_rows(Rows::Step);
        let ids = &self.inputs.token_ids;
        kernels::embedding(&mut self.encoder, &self.plan, table, ids, &output.values, num_tokens, scale)
    }

    fn rms_norm(
        &mut self,
        input: &Buffer,
        weight: &GpuBuffer,
        eps: f32,
        output: &mut Buffer,
        write: Write,
        rows: Rows,
    ) -> Result<(), DeviceError> {
        output.written();
        let accumulate = write == Write::Accumulate;
        let norm = Norm { width: input.width as u32, epsilon: eps, num_rows: self.num_rows(rows), accumulate };
        let rounded = if accumulate { None } else { output.rounded_with() };
        kernels::rms_norm(&mut self.encoder, &self.plan, norm, &input.values, weight, &output.values, rounded)
    }

    fn linear(
        &mut self,
        input: &Buffer,
        matrix: &DeviceMatrix,
        output: &mut Buffer,
        write: Write,
        rows: Rows,
    ) -> Result<(), DeviceError> {
        output.written();
        let num_rows = self.num_rows(rows);
        let shape = |rows: u32| self.plan.matmul_shape(rows as usize);
        let accumulate = write == Write::Accumulate;
        let encoder = &mut self.encoder;
        match &input.rounded {
            Some(rounded) if matrix.has_codes() => {
                if !rounded.fresh.replace(true) {
                    let num_blocks = num_rows * matrix.num_blocks();
                    let (codes, scales) = (&rounded.codes, &rounded.block_scales);
                    kernels::quantize_activations(encoder, &self.plan, &input.values, codes, scales, num_blocks)?;
                }
                let (codes, scales) = (&rounded.codes, &rounded.block_scales);
                kernels::matmul_int8(
                    encoder,
                    shape(num_rows),
                    matrix,
                    codes,
                    scales,
                    &output.values,
                    num_rows,
                    accumulate,
                )
            }
            _ => {
                let (input, output) = (&input.values, &output.values);
                let mut plain = |end: u32| match self.plan.tiled_rows.filter(|least| end >= *least) {
                    Some(_) => {
                        kernels::matmul_tiled(encoder, Arithmetic::F32, matrix, input, output, 0, end, accumulate)
                    }
                    None => kernels::matmul(encoder, shape(end), matrix, input, output, end, accumulate),
                };
                // Rows of decodes come first. A prompt's have their arithmetic, whatever is beside them.
                let (Some(arithmetic), Rows::Step) = (self.plan.prefill, rows) else { return plain(num_rows) };
                let num_decodes = self.input.num_decodes as u32;
                if num_decodes > 0 {
                    plain(num_decodes)?;
                }
                if num_decodes < num_rows {
                    kernels::matmul_tiled(
                        encoder,
                        arithmetic,
                        matrix,
                        input,
                        output,
                        num_decodes,
                        num_rows,
                        accumulate,
                    )?;
                }
                Ok(())
            }
        }
    }

    fn add_bias(&mut self, values: &mut Buffer, bias: &GpuBuffer) -> Result<(), DeviceError> {
        values.written();
        let (width, num_rows) = (values.width as u32, self.num_rows(Rows::Step));
        kernels::add_bias(&mut self.encoder, &self.plan, bias, &values.values, width, num_rows)
    }

    fn rotate_and_cache(
        &mut self,
        layer: usize,
        attention: &Attention,
        qkv: &Buffer,
        norms: Option<(&GpuBuffer, f32)>,
        query: &mut Buffer,
    ) -> Result<(), DeviceError> {
        query.written();
        let num_pairs = attention.rotary.map_or(0, |table| self.rotaries[table].num_pairs() as u32);
        let turn = Turn {
            rotations: &self.inputs.rotations[attention.rotary.unwrap_or(0)],
            num_pairs,
            pair_stride: if self.pair_order == PairOrder::Neighbours { 1 } else { num_pairs },
            norms,
        };
        let cache = &self.cache[layer];
        kernels::rotate_and_cache(
            &mut self.encoder,
            &self.plan,
            turn,
            &qkv.values,
            &self.inputs.slot_mapping,
            &query.values,
            &cache.key,
            &cache.value,
            &self.layout,
            self.input.num_rows() as u32,
        )
    }

    fn paged_attention(
        &mut self,
        layer: usize,
        attention: &Attention,
        query: &Buffer,
        output: &mut Buffer,
    ) -> Result<(), DeviceError> {
        output.written();
        let cache = &self.cache[layer];
        let (inputs, shape) = (&self.inputs, &self.shape);
        // Where prompts are computed beside, all rows are rounded together afterwards.
        let rounds = shape.num_tiles == 0 && self.layout.head_dim.is_multiple_of(32);
        let rounded = if rounds { output.rounded_with() } else { None };
        if self.input.num_decodes > 0 {
            kernels::paged_attention_decode(
                &mut self.encoder,
                &self.plan,
                &query.values,
                &cache.key,
                &cache.value,
                &inputs.block_tables,
                &inputs.context_lens,
                &inputs.splits,
                &self.partials,
                &self.layout,
                attention,
                shape.block_table_stride,
                shape.num_splits,
                shape.decode_context,
            )?;
            kernels::paged_attention_reduce(
                &mut self.encoder,
                &self.plan,
                &self.partials,
                &inputs.split_starts,
                &output.values,
                rounded,
                &self.layout,
                self.input.num_decodes as u32,
            )?;
        }
        if shape.num_tiles > 0 {
            kernels::paged_attention_prefill(
                &mut self.encoder,
                &self.plan,
                &query.values,
                &cache.key,
                &cache.value,
                &inputs.block_tables,
                &inputs.chunks,
                &inputs.tiles,
                &output.values,
                &self.layout,
                attention,
                shape.block_table_stride,
                shape.num_tiles,
                shape.prefill_pairs,
            )?;
        }
        Ok(())
    }

    fn act_and_mul(
        &mut self,
        gate_up: &Buffer,
        activation: Activation,
        output: &mut Buffer,
    ) -> Result<(), DeviceError> {
        output.written();
        let (width, num_rows, rounded) = (output.width as u32, self.num_rows(Rows::Step), output.rounded_with());
        let (gate_up, output) = (&gate_up.values, &output.values);
        kernels::act_and_mul(&mut self.encoder, &self.plan, activation, gate_up, output, rounded, width, num_rows)
    }

    fn soft_cap(&mut self, logits: &mut Buffer, cap: f32) -> Result<(), DeviceError> {
        logits.written();
        let count = self.num_rows(Rows::Logits) * logits.width as u32;
        kernels::soft_cap(&mut self.encoder, &self.plan, &logits.values, cap, count)
    }

    fn gather_rows(&mut self, input: &Buffer, output: &mut Buffer) -> Result<(), DeviceError> {
        output.written();
        let (width, num_rows) = (input.width as u32, self.num_rows(Rows::Logits));
        let rows = &self.inputs.logits_rows;
        kernels::gather_rows(&mut self.encoder, &self.plan, &input.values, rows, &output.values, width, num_rows)
    }

    fn select(&mut self, logits: &Buffer) -> Result<Vec<Selected>, DeviceError> {
        self.select_rows(logits)
    }

    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError> {
        self.gpu.check()?;
        if !stores.is_empty() {
            self.record_stores(stores)?;
        }
        self.record_loads(loads)
    }

    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        self.read_blocks()
    }

    fn numerics(&self) -> String {
        // Adapters and their drivers' compilers differ in what they make of one shader, and so do our own revisions.
        let info = &self.gpu.info;
        let hash = blake3::hash(format!("{}\n{}\n{KERNELS_REVISION}", info.adapter, info.driver).as_bytes()).to_hex();
        format!("gpu-{}{}-{}", self.plan.arithmetic(), self.layout.numerics(), &hash[..6])
    }

    fn start_rehearsal(&mut self) -> bool {
        self.encoder.start_rehearsal();
        true
    }

    fn finish_rehearsal(&mut self) -> Result<(), DeviceError> {
        self.encoder.finish_rehearsal()
    }

    fn copy_bytes(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if self.copied.as_ref().is_none_or(|[from, _]| from.size != bytes as u64) {
            let buffer = || self.gpu.allocate("a copy", bytes as u64);
            self.copied = Some([buffer()?, buffer()?]);
        }
        if let Some([from, to]) = &self.copied {
            self.encoder.copy(from, to, bytes as u64);
        }
        self.encoder.submit()?;
        self.gpu.wait()
    }

    fn start_profile(&mut self) -> bool {
        self.encoder.start_profile()
    }

    fn finish_profile(&mut self) -> KernelTimes {
        self.encoder.finish_profile()
    }

    fn num_dispatches(&self) -> u64 {
        self.encoder.num_dispatches()
    }

    fn memory_bytes(&self) -> u64 {
        self.gpu.allocated_bytes()
    }
}
