//! Runs a model's forward pass on its device, one step at a time.
//!
//! Built and called on the engine thread. The trait hides which device and architecture are below.

use std::sync::Arc;

use crate::batch::{ModelInput, Selected, Selection};
use crate::config::{DEFAULT_KV_CACHE_BYTES, EngineConfig, MAX_DEFAULT_KV_CACHE_BYTES};
use crate::device::{self, Selected as Device};
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
        let (rows, logits_rows) = (config.max_num_batched_tokens.max(2), config.max_num_seqs);
        let model = Llama::load(&mut ops, file, model_config, rows, logits_rows, progress)?;
        let mut runner = Self { ops, model };
        runner.warm_up()?;
        Ok(runner)
    }

    /// Runs a prefill and a decode on a scratch block, so that kernels are compiled, and a broken one is found, before
    /// the engine says it is ready. The block's contents are overwritten by whoever gets it.
    fn warm_up(&mut self) -> Result<(), DeviceError> {
        let mut prefill = ModelInput::default();
        prefill.push(&[0, 0], 0, &[0], BLOCK_SIZE, Some(Selection::Argmax));
        self.run(&prefill)?;
        let mut decode = ModelInput { num_decodes: 1, ..Default::default() };
        decode.push(&[0], 2, &[0], BLOCK_SIZE, Some(Selection::Argmax));
        self.run(&decode)?;
        Ok(())
    }
}

impl<O: Ops> StepRunner for ModelRunner<O> {
    fn run(&mut self, input: &ModelInput) -> Result<Vec<Selected>, DeviceError> {
        self.ops.begin(input)?;
        self.model.forward(&mut self.ops)?;
        self.ops.select(self.model.logits())
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
    /// Sizes the KV pool, and cuts the longest sequence to it where it was not asked for.
    ///
    /// # Errors
    /// When what was asked for does not fit.
    pub fn choose(model: ModelConfig, config: &EngineConfig) -> Result<Self, LoadError> {
        if config.max_num_seqs == 0 || config.max_num_batched_tokens == 0 {
            return Err(LoadError::Setting("--max-num-seqs and --max-num-batched-tokens must be at least 1".into()));
        }
        if config.max_num_seqs > config.max_num_batched_tokens {
            let (seqs, tokens) = (config.max_num_seqs, config.max_num_batched_tokens);
            return Err(LoadError::Setting(format!(
                "--max-num-batched-tokens {tokens} is less than --max-num-seqs {seqs}: each running sequence needs a token a step"
            )));
        }
        let wanted_len = config.max_model_len.unwrap_or(model.context_length);
        if wanted_len == 0 || wanted_len > model.context_length {
            let limit = model.context_length;
            return Err(LoadError::Setting(format!(
                "--max-model-len {wanted_len}: the model was made for 1 to {limit}"
            )));
        }
        let block_bytes = model.kv_bytes_per_token().saturating_mul(BLOCK_SIZE as u64);
        let one_sequence = block_bytes.saturating_mul(wanted_len.div_ceil(BLOCK_SIZE) as u64);
        let default_bytes = DEFAULT_KV_CACHE_BYTES.max(one_sequence.min(MAX_DEFAULT_KV_CACHE_BYTES));
        let bytes = config.kv_cache_bytes.unwrap_or(default_bytes);
        let num_blocks = usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX);
        if num_blocks == 0 {
            return Err(LoadError::Setting(format!(
                "--kv-cache-memory {bytes}: one block of {BLOCK_SIZE} tokens needs {block_bytes} bytes"
            )));
        }
        let capacity = num_blocks * BLOCK_SIZE;
        if wanted_len > capacity && config.max_model_len.is_some() {
            return Err(LoadError::Setting(format!(
                "--max-model-len {wanted_len}: the KV cache of {bytes} bytes holds {capacity} tokens"
            )));
        }
        let max_model_len = wanted_len.min(capacity);
        let layout = KvLayout::new(&model, num_blocks);
        tracing::info!(max_model_len, kv_tokens = capacity, kv_bytes = layout.total_bytes(), "KV cache sized");
        Ok(Self { model, layout, max_model_len })
    }
}

/// What was loaded and where.
pub struct Loaded {
    /// Runs steps.
    pub runner: Box<dyn StepRunner>,
    /// The device's name and adapter.
    pub device: String,
}

/// Opens the device and loads the model onto it; `progress` hears (tensors loaded, tensors in all).
///
/// # Errors
/// When the device does not exist or refuses, or the file cannot be used.
pub fn load(
    file: &GgufFile,
    sizes: &Sizes,
    config: &EngineConfig,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Loaded, LoadError> {
    match device::select(&config.device)? {
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
) -> Result<ModelRunner<CpuOps>, LoadError> {
    let ops = CpuOps::new(sizes.layout.clone(), rotary(file, &sizes.model)?)?;
    ModelRunner::load(ops, file, sizes, config, progress)
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
