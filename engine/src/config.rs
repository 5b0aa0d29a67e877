//! Settings of one engine, as the command line gives them.

use std::path::PathBuf;

use crate::kernels::Activations;

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
    /// Bytes of the KV cache; `None` is [`DEFAULT_KV_CACHE_BYTES`], or what one longest sequence
    /// needs if that is more, up to [`MAX_DEFAULT_KV_CACHE_BYTES`].
    pub kv_cache_bytes: Option<u64>,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Activations of matrix products on a GPU; `None` is the plan's choice.
    pub activations: Option<Activations>,
}

/// Size of the KV cache where none is asked for.
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
            activations: None,
        }
    }
}
