//! Settings of one engine, as the command line gives them.

use std::path::PathBuf;

use crate::kernels::Activations;
use crate::kv::KvCacheDtype;
use crate::model_file::Quantize;

/// What an engine is started with.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// GGUF file.
    pub model: PathBuf,
    /// `auto`, `cpu`, `vulkan:0`, ...
    pub device: String,
    /// Longest sequence; `None` is the model's, cut to the KV pool.
    pub max_model_len: Option<usize>,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens of a step.
    pub max_num_batched_tokens: usize,
    /// Bytes of the KV cache; `None` is what memory leaves or, where that is not known or shared with the system,
    /// [`DEFAULT_KV_CACHE_BYTES`], or what one longest sequence needs if that is more, up to
    /// [`MAX_DEFAULT_KV_CACHE_BYTES`].
    pub kv_cache_bytes: Option<u64>,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Milliseconds that a step should take at most while streams run: bounds the prompt tokens beside them.
    pub max_step_ms: f64,
    /// Whether prompts may start with KV blocks that are there already.
    pub enable_prefix_caching: bool,
    /// Part of the device's memory to use; `None` is 0.9 of a hardware GPU's, where it tells how much it has.
    pub gpu_memory_utilization: Option<f64>,
    /// What metrics call the model.
    pub served_model_name: String,
    /// Whether requests take the model's own recommendation for how tokens are chosen.
    pub generation_config: bool,
    /// Directory for hashes of model files.
    pub fingerprint_cache: Option<PathBuf>,
    /// Directory for what drivers make of kernels, where their backend has a cache of it.
    pub pipeline_cache: Option<PathBuf>,
    /// What floating-point weights are rounded to when they are loaded.
    pub quantize: Option<Quantize>,
    /// How keys and values are stored.
    pub kv_cache_dtype: KvCacheDtype,
    /// Activations of matrix products on a GPU; `None` is the plan's choice.
    pub activations: Option<Activations>,
}

/// Size of the KV cache where none is asked for and memory is not known.
pub const DEFAULT_KV_CACHE_BYTES: u64 = 512 << 20;
/// What one longest sequence may raise it to; beyond, the longest sequence is cut to the cache instead.
pub const MAX_DEFAULT_KV_CACHE_BYTES: u64 = 2 << 30;

impl EngineConfig {
    /// Defaults for a model on a device.
    pub fn new(model: PathBuf, device: &str) -> Self {
        Self {
            model,
            device: device.to_owned(),
            max_model_len: None,
            max_num_seqs: 64,
            max_num_batched_tokens: 512,
            kv_cache_bytes: None,
            max_queue: 1024,
            max_step_ms: 100.0,
            enable_prefix_caching: true,
            gpu_memory_utilization: None,
            served_model_name: "model".to_owned(),
            generation_config: true,
            fingerprint_cache: None,
            pipeline_cache: None,
            quantize: None,
            kv_cache_dtype: KvCacheDtype::default(),
            activations: None,
        }
    }
}
