//! Runs a model's forward pass on its device, one step at a time.
//!
//! Built and called on the engine thread. The trait hides which device and architecture are below.

use std::sync::Arc;
use std::time::Duration;

use crate::batch::{Adjustment, Choice, Draw, ModelInput, Selected, Selection};
use crate::config::{DEFAULT_KV_CACHE_BYTES, EngineConfig, MAX_DEFAULT_KV_CACHE_BYTES};
use crate::device::{self, DeviceMemory, Selected as Device};
use crate::error::LoadError;
use crate::gguf::GgufFile;
use crate::kernels::{Gpu, Plan};
use crate::kv::{BLOCK_SIZE, KvLayout};
use crate::model::{Llama, ModelConfig, ROPE_FACTORS};
use crate::ops::cpu::CpuOps;
use crate::ops::rotary::Rotary;
use crate::ops::wgpu::{StepLimits, WgpuOps};
use crate::ops::{DeviceError, Ops};

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

    /// Whether a simulated device refuses requests.
    fn refuses(&self) -> bool {
        false
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

    fn refuses(&self) -> bool {
        (**self).refuses()
    }

    fn num_dispatches(&self) -> u64 {
        (**self).num_dispatches()
    }

    fn memory_bytes(&self) -> u64 {
        (**self).memory_bytes()
    }
}

/// Rows of a step whose logits are computed: one for each sequence, and some for log probabilities of prompts.
pub fn max_logits_rows(config: &EngineConfig) -> usize {
    config.max_num_seqs + 16
}

/// A model over one device's ops.
pub struct ModelRunner<O: Ops> {
    ops: O,
    model: Llama<O>,
}

impl<O: Ops> ModelRunner<O> {
    fn load(
        mut ops: O,
        file: &GgufFile,
        sizes: &Sizes,
        config: &EngineConfig,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        let model_config = sizes.model.clone();
        // The warm-up's chunk has two tokens.
        let (rows, logits_rows) = (config.max_num_batched_tokens.max(2), max_logits_rows(config));
        let model = Llama::load(&mut ops, file, model_config, rows, logits_rows, progress)?;
        let mut runner = Self { ops, model };
        runner.warm_up()?;
        Ok(runner)
    }

    /// Runs a prefill and a decode on a scratch block, so that kernels are compiled, and a broken one is found, before
    /// the engine says it is ready. The block's contents are overwritten by whoever gets it.
    fn warm_up(&mut self) -> Result<(), DeviceError> {
        let mut prefill = ModelInput::default();
        prefill.push(&[0, 0], 0, &[0], BLOCK_SIZE);
        prefill.select_last(Choice::Greedy);
        self.run(&prefill)?;
        let mut decode = ModelInput { num_decodes: 1, ..Default::default() };
        decode.push(&[0], 2, &[0], BLOCK_SIZE);
        decode.selections.push(every_choice());
        self.run(&decode)?;
        Ok(())
    }
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

    fn memory_bytes(&self) -> u64 {
        self.0.memory_bytes()
    }
}

/// Sizes that follow from the model and the settings.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// The model's shape.
    pub model: ModelConfig,
    /// The KV cache.
    pub layout: KvLayout,
    /// Longest sequence.
    pub max_model_len: usize,
}

impl Sizes {
    /// Sizes the KV pool from what the device has, and cuts the longest sequence to it where it was not asked for.
    ///
    /// # Errors
    /// When what was asked for does not fit.
    pub fn choose(model: ModelConfig, config: &EngineConfig, memory: &DeviceMemory) -> Result<Self, LoadError> {
        let wanted_len = config.max_model_len.unwrap_or(model.context_length);
        if wanted_len == 0 || wanted_len > model.context_length {
            let limit = model.context_length;
            return Err(LoadError::Setting(format!(
                "--max-model-len {wanted_len}: the model was made for 1 to {limit}"
            )));
        }
        let block_bytes = model.kv_bytes_per_token().saturating_mul(BLOCK_SIZE as u64);
        let one_sequence = block_bytes.saturating_mul(wanted_len.div_ceil(BLOCK_SIZE) as u64);
        let bytes = match config.kv_cache_bytes {
            Some(bytes) => bytes,
            None => pool_bytes(&model, config, memory, one_sequence)?,
        };
        let num_blocks = usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX).min(u32::MAX as usize / BLOCK_SIZE);
        if num_blocks == 0 {
            return Err(LoadError::Setting(format!(
                "--kv-cache-memory {bytes}: one block of {BLOCK_SIZE} tokens needs {block_bytes} bytes"
            )));
        }
        let num_blocks = bound_by_binding(&model, num_blocks, memory)?;
        let capacity = num_blocks * BLOCK_SIZE;
        if wanted_len > capacity && config.max_model_len.is_some() {
            return Err(LoadError::Setting(format!(
                "--max-model-len {wanted_len}: the KV cache of {bytes} bytes holds {capacity} tokens"
            )));
        }
        let max_model_len = wanted_len.min(capacity);
        let layout = KvLayout::new(&model, num_blocks);
        if max_model_len < wanted_len {
            tracing::warn!(max_model_len, model = wanted_len, "the longest sequence is cut to the KV cache");
        }
        let kv_bytes = layout.total_bytes();
        tracing::info!(max_model_len, kv_blocks = num_blocks, kv_tokens = capacity, kv_bytes, "KV cache sized");
        Ok(Self { model, layout, max_model_len })
    }
}

/// Checks the bounds of a step.
///
/// # Errors
/// When no sequence could run within them.
pub fn check_step(config: &EngineConfig) -> Result<(), LoadError> {
    if config.max_num_seqs == 0 || config.max_num_batched_tokens == 0 {
        return Err(LoadError::Setting("--max-num-seqs and --max-num-batched-tokens must be at least 1".into()));
    }
    if config.max_num_seqs > config.max_num_batched_tokens {
        let (seqs, tokens) = (config.max_num_seqs, config.max_num_batched_tokens);
        return Err(LoadError::Setting(format!(
            "--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: each running sequence needs a token a step"
        )));
    }
    Ok(())
}

/// Bytes of the KV cache where none were asked for: the part of the device's memory that weights and activations leave. On
/// memory that is shared with the system, or of unknown size, a moderate default unless a part was asked for.
fn pool_bytes(
    model: &ModelConfig,
    config: &EngineConfig,
    memory: &DeviceMemory,
    one_sequence: u64,
) -> Result<u64, LoadError> {
    let moderate = DEFAULT_KV_CACHE_BYTES.max(one_sequence.min(MAX_DEFAULT_KV_CACHE_BYTES));
    let part = match config.gpu_memory_utilization {
        Some(part) if !(part > 0.0 && part <= 1.0) => {
            return Err(LoadError::Setting(format!("--gpu-memory-utilization {part}: must be above 0, at most 1")));
        }
        Some(part) => part,
        None if memory.is_own => 0.9,
        None => return Ok(moderate),
    };
    let Some(total) = memory.total_bytes else {
        return match config.gpu_memory_utilization {
            Some(part) => Err(LoadError::Setting(format!(
                "--gpu-memory-utilization {part}: this device does not tell how much memory it has; give --kv-cache-memory"
            ))),
            None => Ok(moderate),
        };
    };
    let step = step_bytes(model, config);
    let used = memory.weights_bytes.saturating_add(step);
    let budget = (total as f64 * part) as u64;
    match budget.checked_sub(used) {
        Some(left) => Ok(left),
        None => Err(LoadError::Setting(format!(
            "{part} of the device's {total} bytes are less than weights ({}) and activations ({step}) need; raise --gpu-memory-utilization or lower --max-num-batched-tokens",
            memory.weights_bytes
        ))),
    }
}

/// Bytes of activations, logits and scores, and a margin for the driver.
fn step_bytes(model: &ModelConfig, config: &EngineConfig) -> u64 {
    const MARGIN: u64 = 128 << 20;
    let row = 2 * model.hidden_size + 2 * model.query_size() + 2 * model.kv_size() + 2 * model.intermediate_size;
    let logits_row = model.hidden_size + 2 * model.vocab_size;
    // Int8 roundings add three eighths.
    let values = row * config.max_num_batched_tokens * 11 / 8 + logits_row * max_logits_rows(config);
    MARGIN + 4 * values as u64
}

/// Blocks that keep a layer's K (or V) buffer within what a kernel can bind.
fn bound_by_binding(model: &ModelConfig, num_blocks: usize, memory: &DeviceMemory) -> Result<usize, LoadError> {
    let Some(limit) = memory.max_binding_bytes else { return Ok(num_blocks) };
    let block_bytes = (KvLayout::new(model, 1).block_values() * 2) as u64;
    let bound = usize::try_from(limit / block_bytes).unwrap_or(usize::MAX);
    if bound == 0 {
        return Err(LoadError::Setting(format!(
            "a KV block of {block_bytes} bytes is over the binding limit of {limit}"
        )));
    }
    if bound < num_blocks {
        tracing::warn!(
            num_blocks = bound,
            wanted = num_blocks,
            binding_bytes = limit,
            "KV cache cut to the binding limit"
        );
    }
    Ok(num_blocks.min(bound))
}

/// What was loaded and where.
pub struct Loaded {
    /// Runs steps.
    pub runner: Box<dyn StepRunner>,
    /// The device's name and adapter.
    pub device: String,
}

/// Loads the model onto an opened device; `progress` hears (tensors loaded, tensors in all).
///
/// # Errors
/// When the device refuses, or the file cannot be used.
pub fn load(
    opened: Device,
    file: &GgufFile,
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
    file: &GgufFile,
    sizes: &Sizes,
    config: &EngineConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CpuRunner, LoadError> {
    let ops = CpuOps::new(sizes.layout.clone(), rotary(file, &sizes.model)?)?;
    ModelRunner::load(ops, file, sizes, config, progress).map(CpuRunner)
}

/// A model on an opened GPU.
///
/// # Errors
/// When the device refuses memory or a kernel, or the file cannot be used.
pub fn wgpu_runner(
    gpu: Arc<Gpu>,
    file: &GgufFile,
    sizes: &Sizes,
    config: &EngineConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<ModelRunner<WgpuOps>, LoadError> {
    let mut plan = Plan::choose(gpu.info.software);
    if let Some(activations) = config.activations {
        plan.activations = activations;
    }
    let limits = StepLimits {
        max_rows: config.max_num_batched_tokens.max(2),
        max_sequences: config.max_num_seqs,
        max_logits_rows: max_logits_rows(config),
        max_model_len: sizes.max_model_len,
    };
    let ops = WgpuOps::new(gpu, plan, sizes.layout.clone(), rotary(file, &sizes.model)?, limits)?;
    ModelRunner::load(ops, file, sizes, config, progress)
}

fn rotary(file: &GgufFile, model: &ModelConfig) -> Result<Rotary, LoadError> {
    let factors = if file.has_tensor(ROPE_FACTORS) {
        Some(file.tensor(ROPE_FACTORS, 1, model.rotary_dim / 2)?.to_f32())
    } else {
        None
    };
    Ok(Rotary::new(model.rope_theta, model.rotary_dim, model.rope_scale, factors.as_deref()))
}
