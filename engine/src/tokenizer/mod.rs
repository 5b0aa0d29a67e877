//! Text to token ids and back: a model's own tokeniser, or four bytes a token for a simulated device.
//!
//! Built once at start; `encode` is called by the HTTP edge, `append_bytes` by the detokeniser.

mod bpe;
mod bytes4;
mod hugging_face;
mod sentencepiece;
mod vocabulary;

use crate::error::LoadError;
use crate::model_file::{ModelFile, Value};
use vocabulary::Vocabulary;

/// A tokeniser.
pub struct Tokenizer {
    kind: Kind,
}

enum Kind {
    Own(Box<Vocabulary>),
    Bytes4,
}

/// A text that could not be tokenised.
#[derive(Debug, thiserror::Error)]
#[error("cannot tokenise: {0}")]
pub struct EncodeError(String);

impl Tokenizer {
    /// The tokeniser of a model file.
    ///
    /// # Errors
    /// When the file has none, or one of a kind that is not supported.
    pub fn of(file: &ModelFile) -> Result<Self, LoadError> {
        if let Some(json) = file.tokenizer_json() {
            return Ok(Self { kind: Kind::Own(Box::new(hugging_face::read(file, json)?)) });
        }
        let own = match file.require("tokenizer.ggml.model", "a string", Value::as_str)? {
            "gpt2" => bpe::read(file)?,
            "llama" => sentencepiece::read(file)?,
            other => {
                let reason = format!(
                    "model `{other}` is not supported (supported: `gpt2`, byte-level BPE, and `llama`, SentencePiece)"
                );
                return Err(LoadError::Tokenizer { path: file.path().to_owned(), reason });
            }
        };
        Ok(Self { kind: Kind::Own(Box::new(own)) })
    }

    /// Four bytes a token: every text, no vocabulary.
    pub fn bytes4() -> Self {
        Self { kind: Kind::Bytes4 }
    }

    /// Checks that a model's embedding has a row for every token.
    ///
    /// # Errors
    /// When it has fewer.
    pub fn check_vocabulary(&self, file: &ModelFile, num_rows: usize) -> Result<(), LoadError> {
        let num_tokens = self.vocab_size();
        if num_tokens <= num_rows {
            return Ok(());
        }
        let reason = format!("it has {num_tokens} tokens, the model's embedding {num_rows} rows");
        Err(LoadError::Tokenizer { path: file.path().to_owned(), reason })
    }

    /// Tokens of the vocabulary.
    pub fn vocab_size(&self) -> usize {
        match &self.kind {
            Kind::Own(own) => own.size(),
            Kind::Bytes4 => bytes4::VOCAB_SIZE,
        }
    }

    /// Tokens that end an answer.
    pub fn eos_token_ids(&self) -> &[u32] {
        match &self.kind {
            Kind::Own(own) => &own.eos_token_ids,
            Kind::Bytes4 => &[bytes4::EOS],
        }
    }

    /// The beginning-of-sequence token, if the file names one.
    pub fn bos_token_id(&self) -> Option<u32> {
        match &self.kind {
            Kind::Own(own) => own.bos_token_id,
            Kind::Bytes4 => None,
        }
    }

    /// Token ids of a text, control tokens in it recognised. With `add_special_tokens`, the beginning-of-sequence token
    /// comes first where the model wants it.
    ///
    /// # Errors
    /// When the tokeniser refuses the text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        match &self.kind {
            Kind::Own(own) => own.encode(text, add_special_tokens),
            Kind::Bytes4 => Ok(bytes4::encode(text)),
        }
    }

    /// Appends the exact bytes of a token; nothing for an id outside the vocabulary.
    pub fn append_bytes(&self, id: u32, bytes: &mut Vec<u8>) {
        match &self.kind {
            Kind::Own(own) => bytes.extend_from_slice(own.token_bytes(id)),
            Kind::Bytes4 => bytes.extend(bytes4::token_bytes(id)),
        }
    }

    /// The exact bytes of a token.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.append_bytes(id, &mut bytes);
        bytes
    }

    /// Bytes of the longest token.
    pub fn longest_token_bytes(&self) -> usize {
        match &self.kind {
            Kind::Own(own) => own.longest_token_bytes(),
            Kind::Bytes4 => 4,
        }
    }

    /// Whether the token is a control token, which is no part of an answer's text.
    pub fn is_control(&self, id: u32) -> bool {
        match &self.kind {
            Kind::Own(own) => own.is_control(id),
            Kind::Bytes4 => id == bytes4::EOS,
        }
    }

    /// The text of some tokens, control tokens included, invalid UTF-8 replaced.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        ids.iter().for_each(|&id| self.append_bytes(id, &mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
