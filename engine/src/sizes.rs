//! Sizes that follow from the model, the settings and the device's memory: above all, how many KV blocks there are.
//!
//! Chosen once at start, before anything is allocated. Pure: memory comes in as numbers.

use crate::config::{DEFAULT_KV_CACHE_BYTES, EngineConfig, MAX_DEFAULT_KV_CACHE_BYTES};
use crate::device::DeviceMemory;
use crate::error::LoadError;
use crate::kv::{BLOCK_SIZE, COPY_BYTES, KvCacheDtype, KvLayout, SCALED_VALUES};
use crate::model::ModelConfig;
use crate::ops::rotary::Rotary;

/// Rows of a step whose logits are computed: one for each sequence, and some for log probabilities of prompts.
pub fn max_logits_rows(config: &EngineConfig) -> usize {
    config.max_num_seqs + 16
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
        check_dtype(&model, config.kv_cache_dtype)?;
        let block_bytes = KvLayout::new(&model, config.kv_cache_dtype, 1).total_bytes();
        let one_sequence = block_bytes.saturating_mul(wanted_len.div_ceil(BLOCK_SIZE) as u64);
        let bytes = match config.kv_cache_bytes {
            Some(bytes) => bytes,
            None => pool_bytes(&model, config, memory, one_sequence)?,
        };
        let num_blocks = usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX).min(u32::MAX as usize / BLOCK_SIZE);
        if num_blocks == 0 {
            let what = config.kv_cache_bytes.map_or("what memory leaves for the KV cache", |_| "--kv-cache-memory");
            return Err(LoadError::Setting(format!(
                "{what} is {bytes} bytes: one block of {BLOCK_SIZE} tokens needs {block_bytes}"
            )));
        }
        let num_blocks = bound_by_binding(&model, config.kv_cache_dtype, num_blocks, memory)?;
        let capacity = num_blocks * BLOCK_SIZE;
        if wanted_len > capacity && config.max_model_len.is_some() {
            return Err(LoadError::Setting(format!(
                "--max-model-len {wanted_len}: the KV cache of {bytes} bytes holds {capacity} tokens"
            )));
        }
        let max_model_len = wanted_len.min(capacity);
        let layout = KvLayout::new(&model, config.kv_cache_dtype, num_blocks);
        if max_model_len < wanted_len {
            tracing::warn!(max_model_len, model = wanted_len, "the longest sequence is cut to the KV cache");
        }
        let kv_bytes = layout.total_bytes();
        tracing::info!(max_model_len, kv_blocks = num_blocks, kv_tokens = capacity, kv_bytes, "KV cache sized");
        Ok(Self { model, layout, max_model_len })
    }
}

impl Sizes {
    /// The model's rotary tables, for texts as long as are allowed here.
    pub fn rotaries(&self) -> Vec<Rotary> {
        self.model.rotaries.iter().map(|rotary| Rotary::new(rotary, self.max_model_len)).collect()
    }
}

/// Whether a model's heads can be stored so.
fn check_dtype(model: &ModelConfig, dtype: KvCacheDtype) -> Result<(), LoadError> {
    let head_dim = model.head_dim;
    if dtype == KvCacheDtype::Q8_0 && !head_dim.is_multiple_of(SCALED_VALUES) {
        return Err(LoadError::Setting(format!(
            "--kv-cache-dtype q8_0: the model's heads have {head_dim} values, blocks of {SCALED_VALUES} are needed; use f16"
        )));
    }
    Ok(())
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
/// memory that is shared with the system, or of unknown size, a moderate default that fits, unless a part was asked for.
fn pool_bytes(
    model: &ModelConfig,
    config: &EngineConfig,
    memory: &DeviceMemory,
    one_sequence: u64,
) -> Result<u64, LoadError> {
    let moderate = DEFAULT_KV_CACHE_BYTES.max(one_sequence.min(MAX_DEFAULT_KV_CACHE_BYTES));
    let step = step_bytes(model, config);
    let used = memory.weights_bytes.saturating_add(step);
    let part = match (config.gpu_memory_utilization, memory.total_bytes) {
        (Some(part), _) if !(part > 0.0 && part <= 1.0) => {
            return Err(LoadError::Setting(format!("--gpu-memory-utilization {part}: must be above 0, at most 1")));
        }
        (Some(part), None) => {
            return Err(LoadError::Setting(format!(
                "--gpu-memory-utilization {part}: this device does not tell how much memory it has; give --kv-cache-memory"
            )));
        }
        (Some(part), Some(_)) => part,
        (None, Some(_)) if memory.is_own => 0.9,
        // Weights on the CPU stay in their file's map, and may be more than memory.
        (None, Some(total)) if memory.max_binding_bytes.is_none() => return Ok(moderate.min(total / 2)),
        (None, Some(total)) => {
            let left = total.checked_sub(used).filter(|&left| left > 0);
            return left
                .map(|left| moderate.min(left).min(total / 2))
                .ok_or_else(|| not_fitting(model, config, memory, total));
        }
        (None, None) => match memory.probed_bytes {
            None => return Ok(moderate),
            Some(probed) => {
                let left = probed.checked_sub(used).filter(|&left| left > 0);
                return left.map(|left| moderate.min(left)).ok_or_else(|| not_fitting(model, config, memory, probed));
            }
        },
    };
    let have = (memory.total_bytes.unwrap_or(0) as f64 * part) as u64;
    have.checked_sub(used).filter(|&left| left > 0).ok_or_else(|| not_fitting(model, config, memory, have))
}

/// What to try for on a device that does not tell how much memory it has; `None` where the cache's size was asked for.
pub fn wanted_bytes(model: &ModelConfig, config: &EngineConfig, weights_bytes: u64) -> Option<u64> {
    let step_and_weights = step_bytes(model, config).saturating_add(weights_bytes);
    config.kv_cache_bytes.is_none().then(|| step_and_weights.saturating_add(MAX_DEFAULT_KV_CACHE_BYTES))
}

/// What there is of a model that does not fit, what it needs, and what would fit.
fn not_fitting(model: &ModelConfig, config: &EngineConfig, memory: &DeviceMemory, have: u64) -> LoadError {
    let gib = |bytes: u64| format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64);
    let (weights, step) = (memory.weights_bytes, step_bytes(model, config));
    let tokens = config.max_model_len.unwrap_or(model.context_length);
    let blocks = tokens.div_ceil(BLOCK_SIZE);
    let kv = KvLayout::new(model, config.kv_cache_dtype, 1).total_bytes().saturating_mul(blocks as u64);
    let mut advice = Vec::new();
    // 32 weights in 18 bytes.
    let smallest = model.num_weights() / 32 * 18;
    if smallest.saturating_add(step) < have && smallest < weights {
        advice.push(format!("a file at Q4_0 ({})", gib(smallest)));
    }
    let per_row = step.saturating_sub(step_bytes(model, &EngineConfig { max_num_batched_tokens: 1, ..config.clone() }));
    if weights.saturating_add(step - per_row) < have {
        advice.push("a smaller --max-num-batched-tokens or --max-num-seqs, with a shorter --max-model-len".to_owned());
    }
    if let Some(part) = config.gpu_memory_utilization.filter(|part| *part < 0.95) {
        advice.push(format!("more than {part} of the device by --gpu-memory-utilization"));
    }
    advice.push("--device cpu, which reads weights from their file".to_owned());
    LoadError::Setting(format!(
        "the model does not fit: weights {}, activations {}, KV of {tokens} tokens {}; the device has {} for it. What may fit: {}",
        gib(weights),
        gib(step),
        gib(kv),
        gib(have),
        advice.join("; ")
    ))
}

/// Bytes of activations, logits and scores, of the buffers that blocks are copied through, and a margin for the driver.
fn step_bytes(model: &ModelConfig, config: &EngineConfig) -> u64 {
    const MARGIN: u64 = 128 << 20;
    let branch = if model.has_post_norms { model.hidden_size } else { 0 };
    let row =
        2 * model.hidden_size + branch + 3 * model.query_size() + 2 * model.kv_size() + 3 * model.intermediate_size;
    let logits_row = model.hidden_size + 2 * model.vocab_size;
    // Int8 roundings add three eighths.
    let values = row * config.max_num_batched_tokens * 11 / 8 + logits_row * max_logits_rows(config);
    MARGIN + 2 * COPY_BYTES + 4 * values as u64
}

/// Blocks that keep a layer's K (or V) buffer within what a kernel can bind.
fn bound_by_binding(
    model: &ModelConfig,
    dtype: KvCacheDtype,
    num_blocks: usize,
    memory: &DeviceMemory,
) -> Result<usize, LoadError> {
    let Some(limit) = memory.max_binding_bytes else { return Ok(num_blocks) };
    let block_bytes = KvLayout::new(model, dtype, 1).layer_bytes();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Activation, LayerConfig, PairOrder, RotaryConfig};
    use std::path::PathBuf;

    /// An 8B model's shape: a block is 2 MiB.
    fn model() -> ModelConfig {
        ModelConfig {
            architecture: "llama",
            vocab_size: 128_256,
            hidden_size: 4096,
            num_layers: 32,
            num_heads: 32,
            num_kv_heads: 8,
            head_dim: 128,
            intermediate_size: 14_336,
            rms_norm_eps: 1e-5,
            context_length: 131_072,
            rotaries: vec![RotaryConfig::plain(500_000.0, 128)],
            pair_order: PairOrder::Neighbours,
            layers: vec![LayerConfig { rotary: Some(0), window: None }; 32],
            attention_scale: 128f32.powf(-0.5),
            attention_soft_cap: None,
            final_soft_cap: None,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            norm_offset: 0.0,
            has_head_norms: false,
            has_post_norms: false,
        }
    }

    fn choose(memory: DeviceMemory, change: impl Fn(&mut EngineConfig)) -> Result<(usize, usize), String> {
        let mut config = EngineConfig::new(PathBuf::new(), "x");
        change(&mut config);
        let sizes = Sizes::choose(model(), &config, &memory).map_err(|error| error.to_string())?;
        Ok((sizes.layout.num_blocks, sizes.max_model_len))
    }

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_pool_is_what_weights_and_activations_leave_of_a_gpu() {
        let gpu = DeviceMemory {
            total_bytes: Some(24 * GIB),
            is_own: true,
            max_binding_bytes: Some(4 * GIB),
            weights_bytes: 16 * GIB,
            ..Default::default()
        };
        let (blocks, len) = choose(gpu, |_| {}).unwrap();
        // 21.6 GiB less 16 for the weights and a quarter for the step are some 2,700 blocks of 2 MiB.
        assert!((2600..2800).contains(&blocks) && len == blocks * 16, "{blocks} {len}");
        let (most, _) = choose(gpu, |config| config.gpu_memory_utilization = Some(1.0)).unwrap();
        assert!(most > blocks + 1000, "{most}");
        let error = choose(gpu, |config| config.gpu_memory_utilization = Some(0.5)).unwrap_err();
        assert!(error.contains("weights 16.00 GiB") && error.contains("has 12.00 GiB"), "{error}");
        assert!(error.contains("Q4_0 (3.9") && error.contains("--device cpu"), "{error}");
        assert!(
            error.contains("KV of 131072 tokens 16.00 GiB") && error.contains("--gpu-memory-utilization"),
            "{error}"
        );
        let error = choose(gpu, |config| config.gpu_memory_utilization = Some(1.5)).unwrap_err();
        assert!(error.contains("above 0, at most 1"), "{error}");
    }

    #[test]
    fn a_layer_s_buffers_stay_within_the_binding_limit() {
        let memory = DeviceMemory { max_binding_bytes: Some(128 << 20), ..Default::default() };
        let (blocks, _) = choose(memory, |config| config.kv_cache_bytes = Some(64 * GIB)).unwrap();
        assert_eq!(blocks, 4096, "of 32 KiB each");
    }

    #[test]
    fn a_model_that_does_not_fit_is_known_before_anything_is_uploaded() {
        let shared = DeviceMemory {
            total_bytes: Some(8 * GIB),
            max_binding_bytes: Some(2 * GIB),
            weights_bytes: 16 * GIB,
            ..Default::default()
        };
        let error = choose(shared, |_| {}).unwrap_err();
        assert!(error.contains("does not fit") && error.contains("has 8.00 GiB"), "{error}");
        let probed = DeviceMemory { total_bytes: None, probed_bytes: Some(4 * GIB), ..shared };
        assert!(choose(probed, |_| {}).unwrap_err().contains("has 4.00 GiB"));
        // On the CPU weights stay in their file.
        assert!(choose(DeviceMemory { max_binding_bytes: None, ..shared }, |_| {}).is_ok());
    }

    #[test]
    fn shared_and_unknown_memory_get_a_moderate_pool_that_fits() {
        let blocks = |total_bytes, probed_bytes| {
            let memory = DeviceMemory { total_bytes, probed_bytes, weights_bytes: GIB, ..Default::default() };
            choose(memory, |_| {}).unwrap().0
        };
        assert_eq!(blocks(Some(64 * GIB), None), 1024, "2 GiB, since one longest sequence needs 16");
        assert_eq!(blocks(Some(GIB), None), 256, "half of what is free");
        assert_eq!(blocks(None, None), 1024);
        assert!(blocks(None, Some(2 * GIB)) < 512, "what a probe found is not exceeded");
        let memory = DeviceMemory::default();
        let error = choose(memory, |config| config.gpu_memory_utilization = Some(0.5)).unwrap_err();
        assert!(error.contains("does not tell how much memory"), "{error}");
    }
}
