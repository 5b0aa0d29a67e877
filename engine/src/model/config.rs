//! The shape of a model, read from GGUF metadata. Used by the model definition, the ops and the KV cache layout.

use crate::gguf::{GgufError, GgufFile, Value};

/// Architecture parameters of the llama family.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
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
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Values of a head that are rotated, from its front.
    pub rotary_dim: usize,
    /// Positions are divided by this (linear scaling).
    pub rope_scale: f64,
    /// Longest sequence that the model was made for.
    pub context_length: usize,
}

/// Head widths that the attention kernels are rendered for: whole vec4<u32> of f16, and what registers hold.
const MAX_HEAD_DIM: usize = 256;

impl ModelConfig {
    /// Reads the metadata of a file of architecture `llama`.
    ///
    /// # Errors
    /// When the architecture is another, or a key is missing or makes no sense; the error names the key.
    pub fn from_gguf(file: &GgufFile) -> Result<Self, GgufError> {
        let architecture = file.require("general.architecture", "a string", Value::as_str)?;
        if architecture != "llama" {
            let reason = format!("is `{architecture}`, supported is `llama`");
            return Err(file.key_error("general.architecture", reason));
        }
        let size = |key: &str| positive(file, key);
        let hidden_size = size("llama.embedding_length")?;
        let num_heads = size("llama.attention.head_count")?;
        let num_kv_heads = optional_size(file, "llama.attention.head_count_kv")?.unwrap_or(num_heads);
        let head_dim = optional_size(file, "llama.attention.key_length")?.unwrap_or(hidden_size / num_heads);
        let rotary_dim = optional_size(file, "llama.rope.dimension_count")?.unwrap_or(head_dim);
        let config = Self {
            vocab_size: file.require("tokenizer.ggml.tokens", "a list of strings", Value::as_strings)?.len(),
            hidden_size,
            num_layers: size("llama.block_count")?,
            num_heads,
            num_kv_heads,
            head_dim,
            intermediate_size: size("llama.feed_forward_length")?,
            rms_norm_eps: file.require("llama.attention.layer_norm_rms_epsilon", "a number", Value::as_f64)? as f32,
            rope_theta: file.optional("llama.rope.freq_base", "a number", Value::as_f64)?.unwrap_or(10_000.0),
            rotary_dim,
            rope_scale: rope_scale(file)?,
            context_length: size("llama.context_length")?,
        };
        config.check(file)?;
        Ok(config)
    }

    fn check(&self, file: &GgufFile) -> Result<(), GgufError> {
        let refuse = |key: &str, reason: String| Err(file.key_error(key, reason));
        if self.vocab_size == 0 {
            return refuse("tokenizer.ggml.tokens", "is empty".into());
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let reason = format!("is {}, which does not divide the {} heads", self.num_kv_heads, self.num_heads);
            return refuse("llama.attention.head_count_kv", reason);
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(8) || self.head_dim > MAX_HEAD_DIM {
            let reason = format!("gives heads of {} values: not a multiple of 8 up to {MAX_HEAD_DIM}", self.head_dim);
            return refuse("llama.attention.head_count", reason);
        }
        if self.rotary_dim == 0 || !self.rotary_dim.is_multiple_of(2) || self.rotary_dim > self.head_dim {
            let reason = format!("is {}, heads have {} values", self.rotary_dim, self.head_dim);
            return refuse("llama.rope.dimension_count", reason);
        }
        if let Some(length) = optional_size(file, "llama.attention.value_length")?
            && length != self.head_dim
        {
            let reason = format!("is {length}, keys have {} values", self.head_dim);
            return refuse("llama.attention.value_length", reason);
        }
        if !(self.rope_theta > 0.0 && self.rope_scale > 0.0 && self.rms_norm_eps >= 0.0) {
            return refuse(
                "llama.rope.freq_base",
                format!("and its scaling must be positive, are {}", self.rope_theta),
            );
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

    /// Bytes of K and V of one token in all layers, f16.
    pub fn kv_bytes_per_token(&self) -> u64 {
        (self.num_layers * 2 * self.kv_size() * 2) as u64
    }
}

fn rope_scale(file: &GgufFile) -> Result<f64, GgufError> {
    let key = "llama.rope.scaling.type";
    match file.optional(key, "a string", Value::as_str)? {
        None | Some("none") => Ok(1.0),
        Some("linear") => file.require("llama.rope.scaling.factor", "a number", Value::as_f64),
        Some(other) => Err(file.key_error(key, format!("is `{other}`, supported are `none` and `linear`"))),
    }
}

const LARGEST_SIZE: u64 = 1 << 24;

fn positive(file: &GgufFile, key: &str) -> Result<usize, GgufError> {
    let value = file.require(key, "an integer", Value::as_u64)?;
    if value == 0 || value > LARGEST_SIZE {
        return Err(file.key_error(key, format!("is {value}, should be 1 to {LARGEST_SIZE}")));
    }
    Ok(value as usize)
}

fn optional_size(file: &GgufFile, key: &str) -> Result<Option<usize>, GgufError> {
    if file.get(key).is_none() { Ok(None) } else { positive(file, key).map(Some) }
}
