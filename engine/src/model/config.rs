//! What a model is: its shape, and what its architecture makes of each layer. Used by the model definition, the ops and the KV
//! cache layout.
//!
//! [`ModelConfig::of`] reads a file's metadata through the architecture's own file, which says what is peculiar to it. Invariant:
//! every number was checked, so that nothing behind divides by zero or allocates on a forged one's say.

use super::keys::Keys;
use super::rotary_config::RotaryConfig;
use super::{gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3, smollm3};
use crate::model_file::{ModelFile, ModelFileError, Value};

/// The feed-forward layer's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x / (1 + e^−x)
    Silu,
    /// The tanh form of the Gaussian error linear unit.
    Gelu,
}

/// Which values of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairOrder {
    /// Neighbours: GGUF's files of the llama family.
    Neighbours,
    /// One of each half: everybody else's.
    Halves,
}

/// What is peculiar to one layer's attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// Which of the rotary tables; `None` rotates nothing.
    pub rotary: Option<usize>,
    /// Tokens that a query sees, itself included; `None` sees all before it.
    pub window: Option<usize>,
}

/// A model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// GGUF's name of the architecture.
    pub architecture: &'static str,
    /// Tokens of the vocabulary: rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// ε of the norms.
    pub rms_norm_eps: f32,
    /// Longest sequence that the model was made for.
    pub context_length: usize,
    /// The rotary tables that layers choose from.
    pub rotaries: Vec<RotaryConfig>,
    /// Which values are rotated together.
    pub pair_order: PairOrder,
    /// Layer by layer.
    pub layers: Vec<LayerConfig>,
    /// Scores are multiplied by this.
    pub attention_scale: f32,
    /// Scores s become cap · tanh(s / cap).
    pub attention_soft_cap: Option<f32>,
    /// The same of logits.
    pub final_soft_cap: Option<f32>,
    /// The feed-forward layer's activation.
    pub activation: Activation,
    /// Embeddings are multiplied by this.
    pub embedding_scale: f32,
    /// Added to the weights of norms as they are stored.
    pub norm_offset: f32,
    /// Whether queries and keys are normalised, head by head.
    pub has_head_norms: bool,
    /// Whether what a layer adds to the residual stream is normalised before.
    pub has_post_norms: bool,
}

/// Head widths that the attention kernels are rendered for: whole vec4<u32> of f16, and what registers hold.
const MAX_HEAD_DIM: usize = 256;
/// More than any model has.
const MAX_LAYERS: usize = 1024;

impl ModelConfig {
    /// Reads a file's metadata.
    ///
    /// # Errors
    /// When the architecture is not supported, or a key is missing or makes no sense; the error names the key.
    pub fn of(file: &ModelFile) -> Result<Self, ModelFileError> {
        let architecture = file.require("general.architecture", "a string", Value::as_str)?;
        let read = match architecture {
            "llama" => llama::config,
            "mistral" => mistral::config,
            "qwen2" => qwen2::config,
            "qwen3" => qwen3::config,
            "gemma2" => gemma2::config,
            "gemma3" => gemma3::config,
            "phi3" => phi3::config,
            "smollm3" => smollm3::config,
            other => {
                let known = "llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3, smollm3";
                let reason = format!("is `{other}`; supported are {known}");
                return Err(file.key_error("general.architecture", reason));
            }
        };
        let keys = Keys::new(file, architecture);
        let config = read(&keys)?;
        config.check(&keys)?;
        Ok(config)
    }

    /// What all architectures have in common, as a plain decoder of the llama family has it.
    ///
    /// # Errors
    /// When a key is missing or makes no sense.
    pub(super) fn plain(keys: &Keys<'_>, architecture: &'static str) -> Result<Self, ModelFileError> {
        let hidden_size = keys.size("embedding_length")?;
        let num_heads = keys.size("attention.head_count")?;
        let num_kv_heads = keys.optional_size("attention.head_count_kv")?.unwrap_or(num_heads);
        let head_dim = keys.optional_size("attention.key_length")?.unwrap_or(hidden_size / num_heads);
        let num_layers = keys.size("block_count")?;
        if num_layers > MAX_LAYERS {
            return Err(keys.error("block_count", format!("is {num_layers}, should be 1 to {MAX_LAYERS}")));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > MAX_HEAD_DIM {
            let reason = format!("gives heads of {head_dim} values: not a multiple of 8 up to {MAX_HEAD_DIM}");
            return Err(keys.error("attention.head_count", reason));
        }
        let scale = match keys.optional_number("attention.scale")? {
            Some(scale) => scale,
            None => keys.optional_number("attention.query_scalar")?.unwrap_or(head_dim as f64).powf(-0.5),
        };
        Ok(Self {
            architecture,
            vocab_size: keys.vocab_size()?,
            hidden_size,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size: keys.size("feed_forward_length")?,
            rms_norm_eps: keys.number("attention.layer_norm_rms_epsilon")? as f32,
            context_length: keys.size("context_length")?,
            rotaries: vec![RotaryConfig::of(keys, head_dim)?],
            pair_order: PairOrder::Halves,
            layers: vec![LayerConfig { rotary: Some(0), window: None }; num_layers],
            attention_scale: scale as f32,
            attention_soft_cap: None,
            final_soft_cap: None,
            activation: Activation::Silu,
            embedding_scale: 1.0,
            norm_offset: 0.0,
            has_head_norms: false,
            has_post_norms: false,
        })
    }

    /// Gives layers their window: those that a list names, or all from one on, where the file says so.
    ///
    /// # Errors
    /// When the file's list has another length than there are layers.
    pub(super) fn slide(&mut self, keys: &Keys<'_>) -> Result<(), ModelFileError> {
        let Some(window) = keys.window()? else { return Ok(()) };
        let slides = match keys.by_layer("attention.sliding_window_pattern", self.num_layers)? {
            Some(slides) => slides,
            None => match keys.optional_number("attention.max_window_layers")? {
                Some(first) => (0..self.num_layers).map(|layer| layer as f64 >= first).collect(),
                None => return Ok(()),
            },
        };
        let layers = self.layers.iter_mut().zip(slides);
        layers.filter(|(_, slides)| *slides).for_each(|(layer, _)| layer.window = Some(window));
        Ok(())
    }

    fn check(&self, keys: &Keys<'_>) -> Result<(), ModelFileError> {
        let refuse = |key: &str, reason: String| Err(keys.error(key, reason));
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let reason = format!("is {}, which does not divide the {} heads", self.num_kv_heads, self.num_heads);
            return refuse("attention.head_count_kv", reason);
        }
        for rotary in &self.rotaries {
            rotary.check(self.head_dim).or_else(|(key, reason)| refuse(key, reason))?;
        }
        if let Some(length) = keys.optional_size("attention.value_length")?
            && length != self.head_dim
        {
            return refuse("attention.value_length", format!("is {length}, keys have {} values", self.head_dim));
        }
        if !self.rms_norm_eps.is_finite() || self.rms_norm_eps < 0.0 {
            return refuse("attention.layer_norm_rms_epsilon", format!("is {}", self.rms_norm_eps));
        }
        if !(self.attention_scale.is_finite() && self.attention_scale > 0.0) {
            return refuse("attention.scale", format!("is {}", self.attention_scale));
        }
        Ok(())
    }

    /// Width of all query heads.
    pub fn query_size(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key (or value) heads.
    pub fn kv_size(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// Weights of all matrices, the embedding once.
    pub fn num_weights(&self) -> u64 {
        let [hidden, inner] = [self.hidden_size, self.intermediate_size].map(|size| size as u64);
        let heads = 2 * (self.query_size() + self.kv_size()) as u64;
        let layer = hidden.saturating_mul(heads).saturating_add(3 * hidden * inner);
        (self.num_layers as u64).saturating_mul(layer).saturating_add(self.vocab_size as u64 * hidden)
    }
}
