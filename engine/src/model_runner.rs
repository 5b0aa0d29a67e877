//! Runs a model's forward pass on its device, one step at a time.
//!
//! Built and called on the engine thread. The trait hides which device and architecture are below.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use protocol::NumericsClass;

use crate::batch::{Adjustment, Choice, Draw, ModelInput, Selected, Selection};
use crate::config::EngineConfig;
use crate::device::{self, Selected as Device};
use crate::error::LoadError;
use crate::kernels::{Activations, Gpu, KernelTimes, Plan};
use crate::kv::{BLOCK_SIZE, BlockId, Load, PayloadShape};
use crate::model::{Decoder, ModelConfig};
use crate::model_file::ModelFile;
use crate::ops::ceiling::{self, Ceiling};
use crate::ops::cpu::CpuOps;
use crate::ops::wgpu::{StepLimits, WgpuOps};
use crate::ops::{DeviceError, Ops};
use crate::sizes::{self, Sizes, max_logits_rows};
use crate::tokenizer::Tokenizer;

/// A device with a model on it.
pub trait StepRunner {
    /// Computes one step and answers its selections, in order.
    ///
    /// # Errors
    /// When the device fails; it is then of no more use.
    fn run(&mut self, input: &ModelInput) -> Result<Vec<Selected>, DeviceError>;

    /// How long a simulated device would take; `None` for a real one, which takes its time in `run`.
    fn latency(&mut self, _input: &ModelInput) -> Option<Duration> {
        None
    }

    /// Copies KV blocks out of the pool, then others into it, before the next step computes.
    ///
    /// # Errors
    /// When the device fails.
    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError>;

    /// The canonical payloads of the blocks that were copied out last, in their order.
    ///
    /// # Errors
    /// When the device fails.
    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError>;

    /// What a block's canonical payload is made of.
    fn payload(&self) -> PayloadShape;

    /// What computes here: blocks of one class hold the same bits.
    fn numerics(&self) -> NumericsClass;

    /// How long a simulated device would take for the copies since this was last asked.
    fn copy_latency(&mut self) -> Option<Duration> {
        None
    }

    /// Whether a simulated device refuses requests.
    fn refuses(&self) -> bool {
        false
    }

    /// What the device gives at most, measured; `None` for a simulated one.
    ///
    /// # Errors
    /// When the device fails; it is then of no more use.
    fn ceiling(&mut self) -> Result<Option<Ceiling>, DeviceError> {
        Ok(None)
    }

    /// Begins to time every kernel; whether the device can.
    fn start_profile(&mut self) -> bool {
        false
    }

    /// The times of all kernels since a profile began.
    fn finish_profile(&mut self) -> KernelTimes {
        KernelTimes::new()
    }

    /// Kernels dispatched since the start.
    fn num_dispatches(&self) -> u64 {
        0
    }

    /// Device memory allocated, bytes.
    fn memory_bytes(&self) -> u64 {
        0
    }
}

impl<R: StepRunner + ?Sized> StepRunner for Box<R> {
    fn run(&mut self, input: &ModelInput) -> Result<Vec<Selected>, DeviceError> {
        (**self).run(input)
    }

    fn latency(&mut self, input: &ModelInput) -> Option<Duration> {
        (**self).latency(input)
    }

    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError> {
        (**self).copy_blocks(stores, loads)
    }

    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        (**self).copied_out()
    }

    fn payload(&self) -> PayloadShape {
        (**self).payload()
    }

    fn numerics(&self) -> NumericsClass {
        (**self).numerics()
    }

    fn copy_latency(&mut self) -> Option<Duration> {
        (**self).copy_latency()
    }

    fn refuses(&self) -> bool {
        (**self).refuses()
    }

    fn ceiling(&mut self) -> Result<Option<Ceiling>, DeviceError> {
        (**self).ceiling()
    }

    fn start_profile(&mut self) -> bool {
        (**self).start_profile()
    }

    fn finish_profile(&mut self) -> KernelTimes {
        (**self).finish_profile()
    }

    fn num_dispatches(&self) -> u64 {
        (**self).num_dispatches()
    }

    fn memory_bytes(&self) -> u64 {
        (**self).memory_bytes()
    }
}

/// A model over one device's ops.
pub struct ModelRunner<O: Ops> {
    ops: O,
    model: Decoder<O>,
    payload: PayloadShape,
}

impl<O: Ops> ModelRunner<O> {
    fn load(
        mut ops: O,
        file: &ModelFile,
        sizes: &Sizes,
        config: &EngineConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        let model_config = sizes.model.clone();
        // The warm-up's chunk has two tokens.
        let rows = (config.max_num_batched_tokens.max(2), max_logits_rows(config));
        let model = Decoder::load(&mut ops, file, model_config, config.quantize, rows, progress)?;
        let mut runner = Self { ops, model, payload: sizes.layout.payload_shape() };
        runner.warm_up(rows.0, config.max_num_seqs)?;
        Ok(runner)
    }

    /// Rehearses steps of every kind, so that their kernels are compiled together, and runs a prefill and a decode on a
    /// scratch block in earnest, so that a broken kernel is found before the engine says it is ready. The block's contents
    /// are overwritten by whoever gets it.
    fn warm_up(&mut self, max_rows: usize, max_sequences: usize) -> Result<(), DeviceError> {
        let prefill = step(0, 2);
        let mut decode = step(1, 0);
        decode.selections = vec![every_choice()];
        if self.ops.start_rehearsal() {
            // Long enough for any kernel of prompts, sequences side by side, and both in one step: what the settings allow.
            let many = [step(0, MANY_ROWS), step(2, 0), step(1, 1), step(2, 2), step(MANY_ROWS, 0)];
            let allowed = |input: &&ModelInput| input.num_rows() <= max_rows && input.sequences.len() <= max_sequences;
            for input in [&prefill, &decode].into_iter().chain(many.iter().filter(allowed)) {
                self.ops.begin(input)?;
                self.model.forward(&mut self.ops)?;
                // What is selected from logits that nobody computed is nothing.
                drop(self.ops.select(self.model.logits()));
            }
            let load = Load { block_id: 0, payload: vec![0; self.payload.bytes].into() };
            self.ops.copy_blocks(&[0], &[load])?;
            drop(self.ops.copied_out());
            self.ops.finish_rehearsal()?;
        }
        self.run(&prefill)?;
        self.run(&decode)?;
        Ok(())
    }
}

/// Rows of a rehearsed prompt, and sequences of a rehearsed step: kernels of many rows begin below.
const MANY_ROWS: usize = 64;

/// A step of so many sequences that decode and one whose prompt has so many tokens, all on the first block.
fn step(num_decodes: usize, prompt_len: usize) -> ModelInput {
    let mut input = ModelInput { num_decodes, ..Default::default() };
    for _ in 0..num_decodes {
        input.push(&[0], 2, &[0], BLOCK_SIZE);
        input.select_last(Choice::Greedy);
    }
    if prompt_len > 0 {
        input.push(&vec![0; prompt_len], 0, &vec![0; prompt_len.div_ceil(BLOCK_SIZE)], BLOCK_SIZE);
        input.select_last(Choice::Greedy);
    }
    input
}

/// A selection that runs every kernel of the choice.
fn every_choice() -> Selection {
    let draw = Draw { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };
    let adjustment = Adjustment { token: 0, bias: 0.0, repetition: 1.0, subtract: 0.0 };
    Selection { adjustments: vec![adjustment], num_logprobs: Some(1), ..Selection::plain(0, Choice::Random(draw)) }
}

impl<O: Ops> StepRunner for ModelRunner<O> {
    fn run(&mut self, input: &ModelInput) -> Result<Vec<Selected>, DeviceError> {
        self.ops.begin(input)?;
        self.model.forward(&mut self.ops)?;
        self.ops.select(self.model.logits())
    }

    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError> {
        self.ops.copy_blocks(stores, loads)
    }

    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        self.ops.copied_out()
    }

    fn payload(&self) -> PayloadShape {
        self.payload
    }

    fn numerics(&self) -> NumericsClass {
        NumericsClass::new(&self.ops.numerics())
    }

    fn ceiling(&mut self) -> Result<Option<Ceiling>, DeviceError> {
        ceiling::measure(&mut self.ops).map(Some)
    }

    fn start_profile(&mut self) -> bool {
        self.ops.start_profile()
    }

    fn finish_profile(&mut self) -> KernelTimes {
        self.ops.finish_profile()
    }

    fn num_dispatches(&self) -> u64 {
        self.ops.num_dispatches()
    }

    fn memory_bytes(&self) -> u64 {
        self.ops.memory_bytes()
    }
}

/// A model on the CPU. A step runs as a whole on one of rayon's threads: entered from outside, each of its hundreds of
/// products would wake a thread and be waited for by another.
pub struct CpuRunner(ModelRunner<CpuOps>);

impl StepRunner for CpuRunner {
    fn run(&mut self, input: &ModelInput) -> Result<Vec<Selected>, DeviceError> {
        rayon::scope(|_| self.0.run(input))
    }

    fn copy_blocks(&mut self, stores: &[BlockId], loads: &[Load]) -> Result<(), DeviceError> {
        self.0.copy_blocks(stores, loads)
    }

    fn copied_out(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        self.0.copied_out()
    }

    fn payload(&self) -> PayloadShape {
        self.0.payload()
    }

    fn numerics(&self) -> NumericsClass {
        self.0.numerics()
    }

    fn ceiling(&mut self) -> Result<Option<Ceiling>, DeviceError> {
        rayon::scope(|_| self.0.ceiling())
    }

    fn memory_bytes(&self) -> u64 {
        self.0.memory_bytes()
    }
}

/// What was loaded and where.
pub struct Loaded {
    /// Runs steps.
    pub runner: Box<dyn StepRunner>,
    /// The device's name and adapter.
    pub device: String,
}

/// Opens the device that the settings name and sizes what goes onto it: all that can be refused before anything is uploaded.
///
/// # Errors
/// When the device does not exist, the settings make no sense, or the model does not fit or is not one.
pub fn prepare(file: &ModelFile, tokenizer: &Tokenizer, config: &EngineConfig) -> Result<(Device, Sizes), LoadError> {
    sizes::check_step(config)?;
    let opened = device::select(&config.device)?;
    let model = ModelConfig::of(file)?;
    tokenizer.check_vocabulary(file, model.vocab_size)?;
    let weights_bytes = file.tensor_bytes();
    let memory = opened.memory(weights_bytes, sizes::wanted_bytes(&model, config, weights_bytes));
    let sizes = Sizes::choose(model, config, &memory)?;
    Ok((opened, sizes))
}

/// Loads the model onto an opened device; `progress` hears (tensors loaded, tensors in all).
///
/// # Errors
/// When the device refuses, or the file cannot be used.
pub fn load(
    opened: Device,
    file: &ModelFile,
    sizes: &Sizes,
    config: &EngineConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Loaded, LoadError> {
    match opened {
        Device::Cpu => {
            let runner = cpu_runner(file, sizes, config, progress)?;
            Ok(Loaded { runner: Box::new(runner), device: device::CPU.to_owned() })
        }
        Device::Gpu(open) => {
            let device = format!("{} ({})", open.info.name, open.info.adapter);
            let gpu = Arc::new(Gpu::new(*open)?);
            let runner = wgpu_runner(gpu, file, sizes, config, progress)?;
            Ok(Loaded { runner: Box::new(runner), device })
        }
    }
}

/// A model on the CPU.
///
/// # Errors
/// When the file cannot be used.
pub fn cpu_runner(
    file: &ModelFile,
    sizes: &Sizes,
    config: &EngineConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CpuRunner, LoadError> {
    let ops = CpuOps::new(sizes.layout.clone(), sizes.rotaries(), sizes.model.pair_order)?;
    ModelRunner::load(ops, file, sizes, config, progress).map(CpuRunner)
}

/// A model on an opened GPU.
///
/// # Errors
/// When the device refuses memory or a kernel, or the file cannot be used.
pub fn wgpu_runner(
    gpu: Arc<Gpu>,
    file: &ModelFile,
    sizes: &Sizes,
    config: &EngineConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<ModelRunner<WgpuOps>, LoadError> {
    let mut plan = Plan::choose(gpu.info.traits);
    if let Some(activations) = config.activations {
        if activations == Activations::F16 && !gpu.info.traits.f16 {
            let reason = format!("--activations f16: {} does not compute in half precision", gpu.info.adapter);
            return Err(LoadError::Setting(reason));
        }
        plan = plan.with_activations(activations, gpu.info.traits);
    }
    let limits = StepLimits {
        max_rows: config.max_num_batched_tokens.max(2),
        max_sequences: config.max_num_seqs,
        max_logits_rows: max_logits_rows(config),
        max_model_len: sizes.max_model_len,
    };
    let ops = WgpuOps::new(
        gpu,
        plan,
        sizes.layout.clone(),
        sizes.rotaries(),
        sizes.model.pair_order,
        limits,
        config.pipeline_cache.as_deref(),
    )?;
    ModelRunner::load(ops, file, sizes, config, progress)
}
