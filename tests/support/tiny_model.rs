//! A tiny random llama: two layers, 260 tokens (the 256 bytes and four control tokens), some hundred kB; a wider one for storage
//! types of 256 values a block.

use super::gguf_writer::{Meta, Stored, gguf, random, store, write};
use engine::model_file::StorageType;
use std::path::PathBuf;
use tempfile::TempDir;

const HIDDEN: usize = 64;
/// Of models in types of 256 values a block.
const WIDE: usize = 256;
pub const LAYERS: usize = 2;
pub const VOCAB: usize = 260;
pub const CONTEXT: u32 = 512;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// What a test may want different.
pub struct Tiny {
    pub storage: StorageType,
    /// Width of the hidden state: four heads.
    pub hidden: usize,
    /// Puts a NaN into this tensor.
    pub nan_in: Option<&'static str>,
    /// Makes the first scale of this tensor a NaN.
    pub broken_scale_in: Option<&'static str>,
    /// The pre-tokeniser.
    pub pre: &'static str,
    /// Whether the file says that texts begin with a token.
    pub add_bos: Option<bool>,
    pub architecture: &'static str,
    /// Leaves this tensor out.
    pub without: Option<&'static str>,
    /// Adds a vector of this name, which no model reads.
    pub extra: Option<&'static str>,
    /// Gives this integer key another value.
    pub number: Option<(&'static str, u32)>,
    /// Another chat template.
    pub template: Option<&'static str>,
    /// Gives this tensor another GGML type number.
    pub type_of: Option<(&'static str, u32)>,
}

impl Default for Tiny {
    fn default() -> Self {
        Self {
            storage: StorageType::Q4_1,
            hidden: HIDDEN,
            nan_in: None,
            broken_scale_in: None,
            pre: "gpt-2",
            add_bos: Some(false),
            architecture: "llama",
            without: None,
            type_of: None,
            extra: None,
            number: None,
            template: None,
        }
    }
}

impl Tiny {
    /// With weights of this type, as wide as its blocks want.
    pub fn of(storage: StorageType) -> Self {
        let hidden = if storage.row_bytes(HIDDEN).is_some() { HIDDEN } else { WIDE };
        Self { storage, hidden, ..Self::default() }
    }

    /// With heads of 64 values, which a cache of bytes takes.
    pub fn wide() -> Self {
        Self { hidden: WIDE, ..Self::default() }
    }

    /// Width of the feed-forward part.
    fn inner(&self) -> usize {
        if self.hidden == HIDDEN { 96 } else { self.hidden }
    }

    /// Writes the file; it lives as long as the directory.
    pub fn write(&self) -> (TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tiny.gguf");
        write(&path, &self.bytes());
        (directory, path)
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut tensors = self.tensors();
        tensors.retain(|tensor| Some(tensor.name.as_str()) != self.without);
        for tensor in &mut tensors {
            if Some(tensor.name.as_str()) == self.nan_in {
                tensor.bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
            }
            if Some(tensor.name.as_str()) == self.broken_scale_in {
                tensor.bytes[..2].copy_from_slice(&half::f16::NAN.to_le_bytes());
            }
            if let Some((name, type_id)) = self.type_of
                && tensor.name == name
            {
                tensor.type_id = type_id;
            }
        }
        if let Some(name) = self.extra {
            tensors.push(store(name, StorageType::F32, 1, self.hidden, &vec![0.0; self.hidden]));
        }
        let mut metadata = self.metadata();
        metadata.extend(self.add_bos.map(|adds| ("tokenizer.ggml.add_bos_token", Meta::Bool(adds))));
        if let Some((key, value)) = self.number {
            metadata.retain(|(name, _)| *name != key);
            metadata.push((key, Meta::U32(value)));
        }
        gguf(&metadata, &tensors)
    }

    /// The same model in two parts.
    pub fn split(&self) -> (Vec<u8>, Vec<u8>) {
        let mut tensors = self.tensors();
        let second = tensors.split_off(tensors.len() / 2);
        let mut metadata = self.metadata();
        metadata.extend([("split.count", Meta::U32(2)), ("split.no", Meta::U32(0))]);
        let numbers = [("split.count", Meta::U32(2)), ("split.no", Meta::U32(1))];
        (gguf(&metadata, &tensors), gguf(&numbers, &second))
    }

    fn metadata(&self) -> Vec<(&'static str, Meta)> {
        vec![
            ("general.architecture", Meta::Str(self.architecture)),
            ("llama.block_count", Meta::U32(LAYERS as u32)),
            ("llama.context_length", Meta::U32(CONTEXT)),
            ("llama.embedding_length", Meta::U32(self.hidden as u32)),
            ("llama.feed_forward_length", Meta::U32(self.inner() as u32)),
            ("llama.attention.head_count", Meta::U32(HEADS as u32)),
            ("llama.attention.head_count_kv", Meta::U32(KV_HEADS as u32)),
            ("llama.attention.layer_norm_rms_epsilon", Meta::F32(1e-5)),
            ("llama.rope.freq_base", Meta::F32(10_000.0)),
            ("tokenizer.ggml.model", Meta::Str("gpt2")),
            ("tokenizer.ggml.pre", Meta::Str(self.pre)),
            ("tokenizer.ggml.tokens", Meta::Strings(tokens())),
            ("tokenizer.ggml.token_type", Meta::I32s((0..VOCAB).map(|id| if id < 256 { 1 } else { 3 }).collect())),
            ("tokenizer.ggml.merges", Meta::Strings(Vec::new())),
            ("tokenizer.ggml.bos_token_id", Meta::U32(256)),
            ("tokenizer.ggml.eos_token_id", Meta::U32(257)),
            (
                "tokenizer.chat_template",
                Meta::Str(self.template.unwrap_or(
                    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
                )),
            ),
        ]
    }

    fn tensors(&self) -> Vec<Stored> {
        let (hidden, inner, head_dim) = (self.hidden, self.inner(), self.hidden / HEADS);
        // Sums over more values are no larger for it.
        let narrowing = (HIDDEN as f32 / hidden as f32).sqrt();
        let mut seed = 100;
        let mut matrix = |name: String, rows: usize, columns: usize, gain: f32| {
            seed += 1;
            let values: Vec<f32> = random(rows * columns, seed).iter().map(|x| x * gain * narrowing).collect();
            store(&name, self.storage, rows, columns, &values)
        };
        let norm = |name: String| store(&name, StorageType::F32, 1, hidden, &vec![1.0; hidden]);
        let (query, kv) = (HEADS * head_dim, KV_HEADS * head_dim);
        let mut all = vec![matrix("token_embd.weight".into(), VOCAB, hidden, 1.0), norm("output_norm.weight".into())];
        for layer in 0..LAYERS {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            all.extend([
                norm(name("attn_norm")),
                matrix(name("attn_q"), query, hidden, 0.5),
                matrix(name("attn_k"), kv, hidden, 0.5),
                matrix(name("attn_v"), kv, hidden, 0.3),
                matrix(name("attn_output"), hidden, query, 0.3),
                norm(name("ffn_norm")),
                matrix(name("ffn_gate"), inner, hidden, 0.3),
                matrix(name("ffn_up"), inner, hidden, 0.3),
                matrix(name("ffn_down"), hidden, inner, 0.3),
            ]);
        }
        all.push(matrix("output.weight".into(), VOCAB, hidden, 0.5));
        all
    }
}

/// The byte alphabet of GPT-2, then the control tokens.
fn tokens() -> Vec<String> {
    let mut next = 256u32;
    let mut tokens: Vec<String> = (0..=255u8)
        .map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap().to_string()
        })
        .collect();
    tokens.extend(["<|bos|>", "<|eos|>", "<|a|>", "<|b|>"].map(str::to_owned));
    tokens
}
