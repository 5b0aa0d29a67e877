//! The tokeniser that a GGUF file describes: byte-level BPE with the pre-tokeniser that the file names.
//!
//! Encoding is the `tokenizers` crate's; decoding is a table of bytes by token, since byte-level tokens are exact pieces of
//! UTF-8.

use std::collections::HashMap;
use std::path::PathBuf;

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, PreTokenizerWrapper};

use super::EncodeError;
use crate::error::LoadError;
use crate::gguf::{GgufError, GgufFile, Value};

/// GGUF's token types that matter: both are matched in the text as a whole.
const TYPE_CONTROL: i64 = 3;
const TYPE_USER_DEFINED: i64 = 4;

/// Text to token ids and token ids to bytes.
pub(super) struct Bpe {
    inner: tokenizers::Tokenizer,
    bytes: Vec<Vec<u8>>,
    longest_token_bytes: usize,
    control: Vec<bool>,
    bos_token_id: Option<u32>,
    add_bos: bool,
    eos_token_ids: Vec<u32>,
}

impl Bpe {
    pub(super) fn from_gguf(file: &GgufFile) -> Result<Self, LoadError> {
        let fail = |reason: String| LoadError::Tokenizer { path: PathBuf::from(file.path()), reason };
        let model = file.require("tokenizer.ggml.model", "a string", Value::as_str)?;
        if model != "gpt2" {
            return Err(fail(format!("model `{model}` is not supported (supported: `gpt2`, byte-level BPE)")));
        }
        let tokens = file.require("tokenizer.ggml.tokens", "a list of strings", Value::as_strings)?;
        let merges = file.require("tokenizer.ggml.merges", "a list of strings", Value::as_strings)?;
        let types = file.optional("tokenizer.ggml.token_type", "a list of integers", Value::as_integers)?;
        let types = types.unwrap_or(&[]);
        if !types.is_empty() && types.len() != tokens.len() {
            return Err(fail(format!("{} token types for {} tokens", types.len(), tokens.len())));
        }
        let pre = file.optional("tokenizer.ggml.pre", "a string", Value::as_str)?.unwrap_or("default");
        let inner = build(tokens, merges, types, pre).map_err(fail)?;
        let control: Vec<bool> = (0..tokens.len()).map(|id| types.get(id) == Some(&TYPE_CONTROL)).collect();
        let alphabet = byte_alphabet();
        let bytes: Vec<Vec<u8>> = tokens
            .iter()
            .enumerate()
            .map(|(id, token)| match types.get(id) {
                Some(&(TYPE_CONTROL | TYPE_USER_DEFINED)) => token.as_bytes().to_vec(),
                _ => token_bytes(token, &alphabet),
            })
            .collect();
        Ok(Self {
            inner,
            longest_token_bytes: bytes.iter().map(Vec::len).max().unwrap_or(1),
            bytes,
            control,
            bos_token_id: token_id(file, "tokenizer.ggml.bos_token_id", tokens.len())?,
            add_bos: file.optional("tokenizer.ggml.add_bos_token", "a boolean", Value::as_bool)?.unwrap_or(false),
            eos_token_ids: eos_token_ids(file, tokens)?,
        })
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.bytes.len()
    }

    pub(super) fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    pub(super) fn bos_token_id(&self) -> Option<u32> {
        self.bos_token_id
    }

    /// Token ids of a text, control tokens in it recognised. With `add_special_tokens`, the beginning-of-sequence token
    /// comes first where the file asks for it.
    pub(super) fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let encoding = self.inner.encode_fast(text, false).map_err(|error| EncodeError(error.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        if let Some(bos) =
            self.bos_token_id.filter(|bos| add_special_tokens && self.add_bos && ids.first() != Some(bos))
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    pub(super) fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }

    pub(super) fn longest_token_bytes(&self) -> usize {
        self.longest_token_bytes
    }

    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }
}

fn token_id(file: &GgufFile, key: &str, vocab_size: usize) -> Result<Option<u32>, GgufError> {
    match file.optional(key, "an integer", Value::as_u64)? {
        Some(id) if id >= vocab_size as u64 => {
            Err(file.key_error(key, format!("is {id}, the vocabulary has {vocab_size} tokens")))
        }
        id => Ok(id.map(|id| id as u32)),
    }
}

/// The end tokens that the file names, and the ends of turn that chat models use under fixed names.
fn eos_token_ids(file: &GgufFile, tokens: &[String]) -> Result<Vec<u32>, GgufError> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(token_id(file, key, tokens.len())?);
    }
    const ENDS_OF_TURN: [&str; 4] = ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>"];
    let named = (0..).zip(tokens).filter(|(_, token)| ENDS_OF_TURN.contains(&token.as_str())).map(|(id, _)| id);
    ids.extend(named);
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn build(tokens: &[String], merges: &[String], types: &[i64], pre: &str) -> Result<tokenizers::Tokenizer, String> {
    let vocab: HashMap<String, u32> = tokens.iter().cloned().zip(0..).collect();
    if vocab.len() != tokens.len() {
        return Err(format!("{} of {} tokens are duplicates", tokens.len() - vocab.len(), tokens.len()));
    }
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in merges {
        let (left, right) = merge.split_once(' ').ok_or_else(|| format!("merge `{merge}` is not two tokens"))?;
        pairs.push((left.to_owned(), right.to_owned()));
    }
    let ignore_merges = matches!(pre, "llama-bpe" | "llama3" | "llama-v3" | "tekken");
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), pairs)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| error.to_string())?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    inner.with_pre_tokenizer(Some(pre_tokenizer(pre)?));
    let special = |wanted: i64| {
        tokens
            .iter()
            .zip(types)
            .filter(move |(_, token_type)| **token_type == wanted)
            .map(move |(token, _)| AddedToken::from(token.clone(), wanted == TYPE_CONTROL).normalized(false))
            .collect::<Vec<_>>()
    };
    inner.add_special_tokens(&special(TYPE_CONTROL));
    inner.add_tokens(&special(TYPE_USER_DEFINED));
    Ok(inner)
}

/// The pre-tokenisers of GGUF's `tokenizer.ggml.pre`, by the regular expressions of the models that use them.
fn pre_tokenizer(pre: &str) -> Result<PreTokenizerWrapper, String> {
    let split = |pattern: &str| -> Result<PreTokenizerWrapper, String> {
        let pattern = SplitPattern::Regex(pattern.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|error| error.to_string())?;
        Ok(split.into())
    };
    let bytes = |use_regex: bool| -> PreTokenizerWrapper { ByteLevel::new(false, true, use_regex).into() };
    const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let steps = match pre {
        "default" | "gpt-2" | "gpt2" | "phi-2" | "mpt" | "olmo" | "jais" => vec![bytes(true)],
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" => {
            vec![Digits::new(true).into(), bytes(true)]
        }
        "llama-bpe" | "llama3" | "llama-v3" => vec![split(LLAMA3)?, bytes(false)],
        "qwen2" | "deepseek-r1-qwen" => vec![split(QWEN2)?, bytes(false)],
        other => return Err(format!("pre-tokeniser `{other}` is not supported")),
    };
    Ok(Sequence::new(steps).into())
}

/// GPT-2's table: printable bytes stand for themselves, the others for code points from U+0100 on.
fn byte_alphabet() -> HashMap<char, u8> {
    let mut next = 256u32;
    (0..=255u8)
        .filter_map(|byte| {
            let printable = matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
            let code = if printable {
                u32::from(byte)
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).map(|letter| (letter, byte))
        })
        .collect()
}

/// Bytes of a byte-level token; a letter outside the alphabet stands for its own UTF-8.
fn token_bytes(token: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for letter in token.chars() {
        match alphabet.get(&letter) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend(letter.to_string().as_bytes()),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet.len(), 256);
        assert_eq!((alphabet[&'Ġ'], alphabet[&'Ċ'], alphabet[&'a']), (b' ', b'\n', b'a'));
        assert_eq!(token_bytes("ĠhÃ©", &alphabet), " hé".as_bytes());
    }
}
