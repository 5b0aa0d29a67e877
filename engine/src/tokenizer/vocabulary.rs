//! A model's own tokeniser, whatever kind it is of: the `tokenizers` crate encodes, a table of bytes by token decodes, since
//! tokens are exact pieces of UTF-8.
//!
//! Made by `bpe`, `sentencepiece` or `hugging_face`, used through [`super::Tokenizer`].

use std::collections::HashMap;

use super::EncodeError;
use crate::model_file::{ModelFile, ModelFileError, Value};

/// GGUF's token types that matter.
pub(super) const TYPE_UNKNOWN: i64 = 2;
/// Matched in the text as a whole, and no part of an answer's.
pub(super) const TYPE_CONTROL: i64 = 3;
/// Matched in the text as a whole.
pub(super) const TYPE_USER_DEFINED: i64 = 4;
/// One byte, written `<0xNN>`.
pub(super) const TYPE_BYTE: i64 = 6;

/// Text to token ids and token ids to bytes.
pub(super) struct Vocabulary {
    pub(super) inner: tokenizers::Tokenizer,
    pub(super) bytes: TokenBytes,
    /// By token.
    pub(super) control: Vec<bool>,
    pub(super) bos_token_id: Option<u32>,
    /// Whether texts begin with it; `None` where the crate's own post-processor knows.
    pub(super) add_bos: Option<bool>,
    pub(super) eos_token_ids: Vec<u32>,
}

/// The bytes of every token, and of the longest how many: the latter is asked for at each request.
pub(super) struct TokenBytes {
    by_token: Vec<Vec<u8>>,
    longest: usize,
}

impl FromIterator<Vec<u8>> for TokenBytes {
    fn from_iter<I: IntoIterator<Item = Vec<u8>>>(tokens: I) -> Self {
        let by_token: Vec<Vec<u8>> = tokens.into_iter().collect();
        let longest = by_token.iter().map(Vec::len).max().unwrap_or(1);
        Self { by_token, longest }
    }
}

impl Vocabulary {
    pub(super) fn size(&self) -> usize {
        self.bytes.by_token.len()
    }

    /// Token ids of a text, control tokens in it recognised. With `add_special_tokens`, what a text begins with comes first.
    pub(super) fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        let adds_itself = add_special_tokens && self.add_bos.is_none();
        let encoding = self.inner.encode_fast(text, adds_itself).map_err(|error| EncodeError(error.to_string()))?;
        let mut ids = encoding.get_ids().to_vec();
        let adds = add_special_tokens && self.add_bos == Some(true);
        // A template that wrote it wrote it once.
        if let Some(bos) = self.bos_token_id.filter(|bos| adds && ids.first() != Some(bos)) {
            ids.insert(0, bos);
        }
        if adds_itself && ids.len() > 1 && self.bos_token_id == Some(ids[0]) && ids[0] == ids[1] {
            ids.remove(0);
        }
        Ok(ids)
    }

    pub(super) fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.by_token.get(id as usize).map_or(&[], Vec::as_slice)
    }

    pub(super) fn longest_token_bytes(&self) -> usize {
        self.bytes.longest
    }

    pub(super) fn is_control(&self, id: u32) -> bool {
        self.control.get(id as usize).copied().unwrap_or(false)
    }
}

/// Ends of turn that chat models use under fixed names.
pub(super) const ENDS_OF_TURN: [&str; 6] =
    ["<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>"];

/// A token's number of a GGUF file; one past the vocabulary is refused.
pub(super) fn token_id(file: &ModelFile, key: &str, vocab_size: usize) -> Result<Option<u32>, ModelFileError> {
    match file.optional(key, "an integer", Value::as_u64)? {
        Some(id) if id >= vocab_size as u64 => {
            Err(file.key_error(key, format!("is {id}, the vocabulary has {vocab_size} tokens")))
        }
        id => Ok(id.map(|id| id as u32)),
    }
}

/// The end tokens that a GGUF file names, and the ends of turn under fixed names.
pub(super) fn eos_token_ids(file: &ModelFile, tokens: &[String]) -> Result<Vec<u32>, ModelFileError> {
    let mut ids = Vec::new();
    for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        ids.extend(token_id(file, key, tokens.len())?);
    }
    let named = (0..).zip(tokens).filter(|(_, token)| ENDS_OF_TURN.contains(&token.as_str())).map(|(id, _)| id);
    ids.extend(named);
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// The types of a GGUF file's tokens; empty where it tells none.
pub(super) fn token_types(file: &ModelFile, num_tokens: usize) -> Result<&[i64], ModelFileError> {
    let key = "tokenizer.ggml.token_type";
    let types = file.optional(key, "a list of integers", Value::as_integers)?.unwrap_or(&[]);
    if !types.is_empty() && types.len() != num_tokens {
        return Err(file.key_error(key, format!("has {} types for {num_tokens} tokens", types.len())));
    }
    Ok(types)
}

/// GPT-2's table: printable bytes stand for themselves, the others for code points from U+0100 on.
pub(super) fn byte_alphabet() -> HashMap<char, u8> {
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
pub(super) fn byte_level(token: &str, alphabet: &HashMap<char, u8>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(token.len());
    for letter in token.chars() {
        match alphabet.get(&letter) {
            Some(byte) => bytes.push(*byte),
            None => bytes.extend(letter.to_string().as_bytes()),
        }
    }
    bytes
}

/// Bytes of a SentencePiece token: U+2581 is a space, `<0xNN>` a byte.
pub(super) fn piece(token: &str, is_byte: bool) -> Vec<u8> {
    let hex = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|_| is_byte);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet_is_a_bijection() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet.len(), 256);
        assert_eq!((alphabet[&'Ġ'], alphabet[&'Ċ'], alphabet[&'a']), (b' ', b'\n', b'a'));
        assert_eq!(byte_level("ĠhÃ©", &alphabet), " hé".as_bytes());
    }

    #[test]
    fn pieces_are_spaces_and_bytes() {
        assert_eq!(piece("\u{2581}the\u{2581}", false), b" the ");
        assert_eq!((piece("<0x0A>", true), piece("<0x0A>", false)), (vec![b'\n'], b"<0x0A>".to_vec()));
    }
}
