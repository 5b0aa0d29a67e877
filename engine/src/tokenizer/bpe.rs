//! Byte-level BPE as a GGUF file describes it, with the pre-tokeniser that the file names. Called when a model is opened.

use std::collections::HashMap;

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, PreTokenizerWrapper};

use super::vocabulary::{
    TYPE_CONTROL, TYPE_USER_DEFINED, Vocabulary, byte_alphabet, byte_level, eos_token_ids, token_id, token_types,
};
use crate::error::LoadError;
use crate::model_file::{ModelFile, Value};

/// What files call Llama 3's pre-tokeniser.
const LLAMA3_NAMES: [&str; 3] = ["llama-bpe", "llama3", "llama-v3"];

/// The tokeniser of a file whose `tokenizer.ggml.model` is `gpt2`.
///
/// # Errors
/// When a part of it is missing or makes no sense.
pub(super) fn read(file: &ModelFile) -> Result<Vocabulary, LoadError> {
    let fail = |reason: String| LoadError::Tokenizer { path: file.path().to_owned(), reason };
    let tokens = file.require("tokenizer.ggml.tokens", "a list of strings", Value::as_strings)?;
    let merges = file.require("tokenizer.ggml.merges", "a list of strings", Value::as_strings)?;
    let types = token_types(file, tokens.len())?;
    let pre = file.optional("tokenizer.ggml.pre", "a string", Value::as_str)?.unwrap_or("default");
    let inner = build(tokens, merges, types, pre).map_err(fail)?;
    // Llama 3's texts begin so, and older files of it do not say it.
    let begins = LLAMA3_NAMES.contains(&pre);
    let alphabet = byte_alphabet();
    let bytes = tokens.iter().enumerate().map(|(id, token)| match types.get(id) {
        Some(&(TYPE_CONTROL | TYPE_USER_DEFINED)) => token.as_bytes().to_vec(),
        _ => byte_level(token, &alphabet),
    });
    Ok(Vocabulary {
        inner,
        bytes: bytes.collect(),
        control: (0..tokens.len()).map(|id| types.get(id) == Some(&TYPE_CONTROL)).collect(),
        bos_token_id: token_id(file, "tokenizer.ggml.bos_token_id", tokens.len())?,
        add_bos: Some(file.optional("tokenizer.ggml.add_bos_token", "a boolean", Value::as_bool)?.unwrap_or(begins)),
        eos_token_ids: eos_token_ids(file, tokens)?,
    })
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
    let ignore_merges = LLAMA3_NAMES.contains(&pre) || pre == "tekken";
    let bpe = BPE::builder()
        .vocab_and_merges(vocab.into_iter().collect::<tokenizers::models::bpe::Vocab>(), pairs)
        .ignore_merges(ignore_merges)
        .build()
        .map_err(|error| error.to_string())?;
    let mut inner = tokenizers::Tokenizer::new(bpe);
    inner.with_pre_tokenizer(Some(pre_tokenizer(pre)?));
    add_whole_tokens(&mut inner, tokens, types);
    Ok(inner)
}

/// Tokens that are matched in a text as a whole.
pub(super) fn add_whole_tokens(inner: &mut tokenizers::Tokenizer, tokens: &[String], types: &[i64]) {
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
        name if LLAMA3_NAMES.contains(&name) => vec![split(LLAMA3)?, bytes(false)],
        "qwen2" | "deepseek-r1-qwen" => vec![split(QWEN2)?, bytes(false)],
        other => return Err(format!("pre-tokeniser `{other}` is not supported")),
    };
    Ok(Sequence::new(steps).into())
}
