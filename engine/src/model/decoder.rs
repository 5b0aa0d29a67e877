//! The decoder that every supported architecture is, over the ops trait: weights by their GGUF names, and the forward pass as a
//! list of ops.
//!
//! Built once by the model runner, run once a step. It knows no device, no sequence and no block: rows are tokens, and
//! the ops hold the step's positions and block tables. What differs between architectures is a value of its configuration.

use super::config::ModelConfig;
use super::loader::Loader;
use crate::error::LoadError;
use crate::model_file::{ModelFile, Quantize};
use crate::ops::{Attention, DeviceError, Ops, Rows, Write};

/// One transformer block's weights.
struct Layer<O: Ops> {
    attention: Attention,
    attn_norm: O::Vector,
    attn_qkv: O::Matrix,
    attn_qkv_bias: Option<O::Vector>,
    /// Of query and key heads.
    head_norms: Option<O::Vector>,
    attn_output: Projection<O>,
    ffn_norm: O::Vector,
    ffn_gate_up: O::Matrix,
    ffn_gate_up_bias: Option<O::Vector>,
    ffn_down: Projection<O>,
}

/// What leads back to the residual stream.
struct Projection<O: Ops> {
    matrix: O::Matrix,
    bias: Option<O::Vector>,
    /// Normalises what is added.
    post_norm: Option<O::Vector>,
}

/// Activations, allocated once at start: `[max rows, width]` each.
struct Activations<O: Ops> {
    hidden: O::Buffer,
    normed: O::Buffer,
    /// Queries, keys and values side by side.
    qkv: O::Buffer,
    query: O::Buffer,
    attended: O::Buffer,
    gate_up: O::Buffer,
    activated: O::Buffer,
    /// What is normalised before it is added to the residual stream.
    branch: O::Buffer,
    last_hidden: O::Buffer,
    logits: O::Buffer,
}

/// A loaded model.
pub struct Decoder<O: Ops> {
    config: ModelConfig,
    token_embd: O::Matrix,
    layers: Vec<Layer<O>>,
    output_norm: O::Vector,
    /// `None` where the embedding is tied.
    output: Option<O::Matrix>,
    activations: Activations<O>,
}

impl<O: Ops> Decoder<O> {
    /// Loads all weights onto the device, layer by layer, floating-point matrices rounded where asked for; `progress` hears (tensors loaded, tensors in all).
    ///
    /// # Errors
    /// When a tensor is missing, misshapen or of an unsupported type, or the device refuses it.
    pub fn load(
        ops: &mut O,
        file: &ModelFile,
        config: ModelConfig,
        quantize: Option<Quantize>,
        (max_rows, max_logits_rows): (usize, usize),
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self, LoadError> {
        let mut loader = Loader::new(ops, file, config.norm_offset, quantize, progress);
        let hidden = config.hidden_size;
        let token_embd = loader.matrix(&[("token_embd.weight", config.vocab_size)], hidden)?;
        let mut layers = Vec::with_capacity(config.num_layers.min(file.tensor_names().count()));
        for index in 0..config.num_layers {
            layers.push(load_layer(&mut loader, index, &config)?);
        }
        let output_norm = loader.norm("output_norm.weight", hidden)?;
        let output = match file.has_tensor("output.weight") {
            true => Some(loader.matrix(&[("output.weight", config.vocab_size)], hidden)?),
            false => None,
        };
        loader.refuse_unknown_tensors(config.architecture)?;
        let branch = if config.has_post_norms { hidden } else { 0 };
        let activations = Activations {
            hidden: ops.buffer(max_rows, hidden)?,
            normed: ops.buffer(max_rows, hidden)?,
            qkv: ops.buffer(max_rows, config.query_size() + 2 * config.kv_size())?,
            query: ops.buffer(max_rows, config.query_size())?,
            attended: ops.buffer(max_rows, config.query_size())?,
            gate_up: ops.buffer(max_rows, 2 * config.intermediate_size)?,
            activated: ops.buffer(max_rows, config.intermediate_size)?,
            branch: ops.buffer(max_rows, branch)?,
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
        ops.embedding(&self.token_embd, self.config.embedding_scale, &mut x.hidden)?;
        for (index, layer) in self.layers.iter().enumerate() {
            ops.rms_norm(&x.hidden, &layer.attn_norm, eps, &mut x.normed, Write::Store, Rows::Step)?;
            ops.linear(&x.normed, &layer.attn_qkv, &mut x.qkv, Write::Store, Rows::Step)?;
            add_bias(ops, &mut x.qkv, layer.attn_qkv_bias.as_ref())?;
            let norms = layer.head_norms.as_ref().map(|norms| (norms, eps));
            ops.rotate_and_cache(index, &layer.attention, &x.qkv, norms, &mut x.query)?;
            ops.paged_attention(index, &layer.attention, &x.query, &mut x.attended)?;
            project(ops, &x.attended, &layer.attn_output, eps, &mut x.branch, &mut x.hidden)?;
            ops.rms_norm(&x.hidden, &layer.ffn_norm, eps, &mut x.normed, Write::Store, Rows::Step)?;
            ops.linear(&x.normed, &layer.ffn_gate_up, &mut x.gate_up, Write::Store, Rows::Step)?;
            add_bias(ops, &mut x.gate_up, layer.ffn_gate_up_bias.as_ref())?;
            ops.act_and_mul(&x.gate_up, self.config.activation, &mut x.activated)?;
            project(ops, &x.activated, &layer.ffn_down, eps, &mut x.branch, &mut x.hidden)?;
        }
        ops.gather_rows(&x.hidden, &mut x.last_hidden)?;
        ops.rms_norm(&x.last_hidden, &self.output_norm, eps, &mut x.normed, Write::Store, Rows::Logits)?;
        let output = self.output.as_ref().unwrap_or(&self.token_embd);
        ops.linear(&x.normed, output, &mut x.logits, Write::Store, Rows::Logits)?;
        match self.config.final_soft_cap {
            Some(cap) => ops.soft_cap(&mut x.logits, cap),
            None => Ok(()),
        }
    }

    /// The step's logits, `[logits rows, vocab_size]`.
    pub fn logits(&self) -> &O::Buffer {
        &self.activations.logits
    }
}

fn add_bias<O: Ops>(ops: &mut O, values: &mut O::Buffer, bias: Option<&O::Vector>) -> Result<(), DeviceError> {
    bias.map_or(Ok(()), |bias| ops.add_bias(values, bias))
}

/// hidden += projection of `input`, by way of `branch` where it is normalised before.
fn project<O: Ops>(
    ops: &mut O,
    input: &O::Buffer,
    projection: &Projection<O>,
    eps: f32,
    branch: &mut O::Buffer,
    hidden: &mut O::Buffer,
) -> Result<(), DeviceError> {
    let Projection { matrix, bias, post_norm } = projection;
    let Some(post_norm) = post_norm else {
        ops.linear(input, matrix, hidden, Write::Accumulate, Rows::Step)?;
        return add_bias(ops, hidden, bias.as_ref());
    };
    ops.linear(input, matrix, branch, Write::Store, Rows::Step)?;
    add_bias(ops, branch, bias.as_ref())?;
    ops.rms_norm(branch, post_norm, eps, hidden, Write::Accumulate, Rows::Step)
}

fn load_layer<O: Ops>(loader: &mut Loader<'_, O>, index: usize, config: &ModelConfig) -> Result<Layer<O>, LoadError> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (query, kv) = (config.query_size(), config.kv_size());
    let name = |part: &str| format!("blk.{index}.{part}");
    let weight = |part: &str| name(&format!("{part}.weight"));
    let bias = |part: &str| name(&format!("{part}.bias"));
    // Files have these side by side, or one by one.
    let is_fused = loader.file.has_tensor(&weight("attn_qkv"));
    let qkv: &[(&str, usize)] =
        if is_fused { &[("attn_qkv", query + 2 * kv)] } else { &[("attn_q", query), ("attn_k", kv), ("attn_v", kv)] };
    let is_fused = !loader.file.has_tensor(&weight("ffn_gate"));
    let gate_up: &[(&str, usize)] =
        if is_fused { &[("ffn_up", 2 * inner)] } else { &[("ffn_gate", inner), ("ffn_up", inner)] };
    let mut stacked = |parts: &[(&str, usize)]| -> Result<(O::Matrix, Option<O::Vector>), LoadError> {
        let of = |named: &[String]| -> Vec<(String, usize)> {
            named.iter().cloned().zip(parts.iter().map(|(_, rows)| *rows)).collect()
        };
        let weights = of(&parts.iter().map(|(part, _)| weight(part)).collect::<Vec<_>>());
        let biases = of(&parts.iter().map(|(part, _)| bias(part)).collect::<Vec<_>>());
        let matrix = loader.matrix(&borrowed(&weights), hidden)?;
        Ok((matrix, loader.biases(&borrowed(&biases))?))
    };
    let (attn_qkv, attn_qkv_bias) = stacked(qkv)?;
    let (ffn_gate_up, ffn_gate_up_bias) = stacked(gate_up)?;
    let mut projection = |part: &str, norm: &str, columns: usize| -> Result<Projection<O>, LoadError> {
        let matrix = loader.matrix(&[(&weight(part), hidden)], columns)?;
        let bias = loader.biases(&[(&bias(part), hidden)])?;
        let post_norm = config.has_post_norms.then(|| loader.norm(&weight(norm), hidden)).transpose()?;
        Ok(Projection { matrix, bias, post_norm })
    };
    let attn_output = projection("attn_output", "post_attention_norm", query)?;
    let ffn_down = projection("ffn_down", "post_ffw_norm", inner)?;
    let head_norms = match config.has_head_norms {
        true => Some(loader.head_norms(&weight("attn_q_norm"), &weight("attn_k_norm"), config.head_dim)?),
        false => None,
    };
    Ok(Layer {
        attention: Attention::of(config, index),
        attn_norm: loader.norm(&weight("attn_norm"), hidden)?,
        attn_qkv,
        attn_qkv_bias,
        head_norms,
        attn_output,
        ffn_norm: loader.norm(&weight("ffn_norm"), hidden)?,
        ffn_gate_up,
        ffn_gate_up_bias,
        ffn_down,
    })
}

fn borrowed(parts: &[(String, usize)]) -> Vec<(&str, usize)> {
    parts.iter().map(|(name, rows)| (name.as_str(), *rows)).collect()
}
