//! The llama family over the ops trait: weights by their GGUF names, and the forward pass as a list of ops.
//!
//! Built once by the model runner, run once a step. It knows no device, no sequence and no block: rows are tokens, and
//! the ops hold the step's positions and block tables.

use std::collections::BTreeSet;

use super::{ModelConfig, ROPE_FACTORS};
use crate::error::LoadError;
use crate::gguf::GgufFile;
use crate::ops::{DeviceError, Ops, Rows, Write};

/// One transformer block's weights.
struct Layer<O: Ops> {
    attn_norm: O::Vector,
    attn_q: O::Matrix,
    attn_k: O::Matrix,
    attn_v: O::Matrix,
    attn_output: O::Matrix,
    ffn_norm: O::Vector,
    ffn_gate: O::Matrix,
    ffn_up: O::Matrix,
    ffn_down: O::Matrix,
}

/// Activations, allocated once at start: `[max rows, width]` each.
struct Activations<O: Ops> {
    hidden: O::Buffer,
    normed: O::Buffer,
    query: O::Buffer,
    key: O::Buffer,
    value: O::Buffer,
    attended: O::Buffer,
    gate: O::Buffer,
    up: O::Buffer,
    last_hidden: O::Buffer,
    logits: O::Buffer,
}

/// A loaded model.
pub struct Llama<O: Ops> {
    config: ModelConfig,
    token_embd: O::Matrix,
    layers: Vec<Layer<O>>,
    output_norm: O::Vector,
    /// `None` where the embedding is tied.
    output: Option<O::Matrix>,
    activations: Activations<O>,
}

impl<O: Ops> Llama<O> {
    /// Loads all weights onto the device, layer by layer; `progress` hears (tensors loaded, tensors in all).
    ///
    /// # Errors
    /// When a tensor is missing, misshapen or of an unsupported type, or the device refuses it.
    pub fn load(
        ops: &mut O,
        file: &GgufFile,
        config: ModelConfig,
        max_rows: usize,
        max_logits_rows: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        let total = config.num_layers * 9 + 2;
        let mut loader = Loader { ops, file, loaded: BTreeSet::new(), total, progress };
        let hidden = config.hidden_size;
        let token_embd = loader.matrix("token_embd.weight", config.vocab_size, hidden)?;
        let mut layers = Vec::with_capacity(config.num_layers);
        for index in 0..config.num_layers {
            layers.push(loader.layer(index, &config)?);
        }
        let output_norm = loader.vector("output_norm.weight", hidden)?;
        let output = if file.has_tensor("output.weight") {
            Some(loader.matrix("output.weight", config.vocab_size, hidden)?)
        } else {
            None
        };
        loader.refuse_unknown_tensors()?;
        let activations = Activations {
            hidden: ops.buffer(max_rows, hidden)?,
            normed: ops.buffer(max_rows, hidden)?,
            query: ops.buffer(max_rows, config.query_size())?,
            key: ops.buffer(max_rows, config.kv_size())?,
            value: ops.buffer(max_rows, config.kv_size())?,
            attended: ops.buffer(max_rows, config.query_size())?,
            gate: ops.buffer(max_rows, config.intermediate_size)?,
            up: ops.buffer(max_rows, config.intermediate_size)?,
            last_hidden: ops.buffer(max_logits_rows, hidden)?,
            logits: ops.buffer(max_logits_rows, config.vocab_size)?,
        };
        Ok(Self { config, token_embd, layers, output_norm, output, activations })
    }

    /// Records one step's forward pass: after it, [`Self::logits`] holds a row for each of the step's logits rows.
    ///
    /// # Errors
    /// When the device fails.
    pub fn forward(&mut self, ops: &mut O) -> Result<(), DeviceError> {
        let eps = self.config.rms_norm_eps;
        let x = &mut self.activations;
        ops.embedding(&self.token_embd, &mut x.hidden)?;
        for (index, layer) in self.layers.iter().enumerate() {
            ops.rms_norm(&x.hidden, &layer.attn_norm, eps, &mut x.normed, Rows::Step)?;
            ops.linear(&x.normed, &layer.attn_q, &mut x.query, Write::Store, Rows::Step)?;
            ops.linear(&x.normed, &layer.attn_k, &mut x.key, Write::Store, Rows::Step)?;
            ops.linear(&x.normed, &layer.attn_v, &mut x.value, Write::Store, Rows::Step)?;
            ops.rotary_embedding(&mut x.query, self.config.num_heads)?;
            ops.rotary_embedding(&mut x.key, self.config.num_kv_heads)?;
            ops.reshape_and_cache(index, &x.key, &x.value)?;
            ops.paged_attention(index, &x.query, &mut x.attended)?;
            ops.linear(&x.attended, &layer.attn_output, &mut x.hidden, Write::Accumulate, Rows::Step)?;
            ops.rms_norm(&x.hidden, &layer.ffn_norm, eps, &mut x.normed, Rows::Step)?;
            ops.linear(&x.normed, &layer.ffn_gate, &mut x.gate, Write::Store, Rows::Step)?;
            ops.linear(&x.normed, &layer.ffn_up, &mut x.up, Write::Store, Rows::Step)?;
            ops.silu_and_mul(&mut x.gate, &x.up)?;
            ops.linear(&x.gate, &layer.ffn_down, &mut x.hidden, Write::Accumulate, Rows::Step)?;
        }
        ops.gather_rows(&x.hidden, &mut x.last_hidden)?;
        ops.rms_norm(&x.last_hidden, &self.output_norm, eps, &mut x.normed, Rows::Logits)?;
        let output = self.output.as_ref().unwrap_or(&self.token_embd);
        ops.linear(&x.normed, output, &mut x.logits, Write::Store, Rows::Logits)
    }

    /// The step's logits, `[logits rows, vocab_size]`.
    pub fn logits(&self) -> &O::Buffer {
        &self.activations.logits
    }
}

/// Brings tensors to the device and counts them.
struct Loader<'a, O: Ops> {
    ops: &'a mut O,
    file: &'a GgufFile,
    loaded: BTreeSet<String>,
    total: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

impl<O: Ops> Loader<'_, O> {
    fn matrix(&mut self, name: &str, rows: usize, columns: usize) -> Result<O::Matrix, LoadError> {
        let tensor = self.file.tensor(name, rows, columns)?;
        let matrix = self.ops.matrix(&tensor).map_err(|source| LoadError::Tensor { name: name.to_owned(), source })?;
        self.count(name);
        Ok(matrix)
    }

    fn vector(&mut self, name: &str, columns: usize) -> Result<O::Vector, LoadError> {
        let tensor = self.file.tensor(name, 1, columns)?;
        let vector = self.ops.vector(&tensor).map_err(|source| LoadError::Tensor { name: name.to_owned(), source })?;
        self.count(name);
        Ok(vector)
    }

    fn count(&mut self, name: &str) {
        self.loaded.insert(name.to_owned());
        (self.progress)(self.loaded.len().min(self.total), self.total);
    }

    /// A tensor that nothing reads (a bias, say) would be left out of the model silently.
    fn refuse_unknown_tensors(&self) -> Result<(), LoadError> {
        let known = |name: &str| self.loaded.contains(name) || name == ROPE_FACTORS;
        match self.file.tensor_names().find(|name| !known(name)) {
            Some(name) => {
                Err(self.file.tensor_error(name, "is no part of the llama architecture as we know it".into()).into())
            }
            None => Ok(()),
        }
    }

    fn layer(&mut self, index: usize, config: &ModelConfig) -> Result<Layer<O>, LoadError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (query, kv) = (config.query_size(), config.kv_size());
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        Ok(Layer {
            attn_norm: self.vector(&name("attn_norm"), hidden)?,
            attn_q: self.matrix(&name("attn_q"), query, hidden)?,
            attn_k: self.matrix(&name("attn_k"), kv, hidden)?,
            attn_v: self.matrix(&name("attn_v"), kv, hidden)?,
            attn_output: self.matrix(&name("attn_output"), hidden, query)?,
            ffn_norm: self.vector(&name("ffn_norm"), hidden)?,
            ffn_gate: self.matrix(&name("ffn_gate"), inner, hidden)?,
            ffn_up: self.matrix(&name("ffn_up"), inner, hidden)?,
            ffn_down: self.matrix(&name("ffn_down"), hidden, inner)?,
        })
    }
}
