//! A tokeniser as Hugging Face writes it down: `tokenizer.json` beside the weights. Called when a directory is opened.
//!
//! Encoding is the `tokenizers` crate's own, post-processor included; what is added here is the bytes of each token, which
//! depend on whether the vocabulary is byte-level or SentencePiece's.

use serde_json::Value as Json;

use super::vocabulary::{ENDS_OF_TURN, Vocabulary, byte_alphabet, byte_level, piece};
use crate::error::LoadError;
use crate::model_file::{ModelFile, Value};

/// No vocabulary is larger.
const MAX_VOCAB: u32 = 1 << 24;

/// Reads a directory's tokeniser.
///
/// # Errors
/// When the file is none, or has more tokens than the model's embedding has rows.
pub(super) fn read(file: &ModelFile, json: &[u8]) -> Result<Vocabulary, LoadError> {
    let path = file.path().join("tokenizer.json");
    let fail = |reason: String| LoadError::Tokenizer { path: path.clone(), reason };
    let text: Json = serde_json::from_slice(json).map_err(|error| fail(error.to_string()))?;
    // The crate unwraps in places where a file is JSON and no tokeniser.
    let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json));
    let inner = parsed.map_err(|_| fail("is no tokeniser that can be read".into()))?;
    let mut inner = inner.map_err(|error| fail(error.to_string()))?;
    // How a training run cut and filled its texts is nothing to a prompt.
    inner.with_truncation(None).map_err(|error| fail(error.to_string()))?;
    inner.with_padding(None);
    let added = inner.get_added_tokens_decoder();
    let ids = inner.get_vocab(true).into_values().chain(added.keys().copied());
    let size = ids.max().map_or(0, |id| id.saturating_add(1));
    if size == 0 || size > MAX_VOCAB {
        return Err(fail(format!("has {size} tokens: 1 to {MAX_VOCAB} are read")));
    }
    let is_byte_level = ["pre_tokenizer", "decoder"].iter().any(|part| has_byte_level(&text[*part]));
    let alphabet = byte_alphabet();
    let bytes = |id: u32| -> Vec<u8> {
        match (added.get(&id), inner.id_to_token(id)) {
            (Some(token), _) => token.content.as_bytes().to_vec(),
            (None, None) => Vec::new(),
            (None, Some(token)) if is_byte_level => byte_level(&token, &alphabet),
            (None, Some(token)) => piece(&token, true),
        }
    };
    let named = |key: &str| file.get(key).and_then(Value::as_str).and_then(|token| inner.token_to_id(token));
    let mut eos_token_ids: Vec<u32> = named("tokenizer.eos_token").into_iter().collect();
    let listed = file.get("tokenizer.eos_token_ids").and_then(Value::as_integers).unwrap_or(&[]);
    eos_token_ids.extend(listed.iter().filter_map(|&id| u32::try_from(id).ok()).filter(|&id| id < size));
    eos_token_ids.extend(ENDS_OF_TURN.iter().filter_map(|token| inner.token_to_id(token)));
    eos_token_ids.sort_unstable();
    eos_token_ids.dedup();
    Ok(Vocabulary {
        bytes: (0..size).map(bytes).collect(),
        control: (0..size).map(|id| added.get(&id).is_some_and(|token| token.special)).collect(),
        bos_token_id: named("tokenizer.bos_token"),
        add_bos: None,
        eos_token_ids,
        inner,
    })
}

/// Whether a part of the tokeniser, or one of its parts, is byte-level.
fn has_byte_level(part: &Json) -> bool {
    match part {
        Json::Object(fields) => {
            fields.get("type").is_some_and(|kind| kind == "ByteLevel") || fields.values().any(has_byte_level)
        }
        Json::Array(parts) => parts.iter().any(has_byte_level),
        _ => false,
    }
}
