//! SentencePiece's BPE as a GGUF file describes it: pieces with scores, spaces written U+2581, unknown letters as bytes. Called
//! when a model is opened.
//!
//! SentencePiece joins the two neighbours whose union has the best score, the leftmost first. That is BPE with a merge for
//! every way of cutting a piece in two pieces, ranked by the score of the whole.

use std::collections::HashMap;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence};

use super::bpe::add_whole_tokens;
use super::vocabulary::{
    TYPE_BYTE, TYPE_CONTROL, TYPE_UNKNOWN, TYPE_USER_DEFINED, Vocabulary, eos_token_ids, piece, token_id, token_types,
};
use crate::error::LoadError;
use crate::model_file::{ModelFile, Value};

/// The tokeniser of a file whose `tokenizer.ggml.model` is `llama`.
///
/// # Errors
/// When a part of it is missing or makes no sense.
pub(super) fn read(file: &ModelFile) -> Result<Vocabulary, LoadError> {
    let fail = |reason: String| LoadError::Tokenizer { path: file.path().to_owned(), reason };
    let tokens = file.require("tokenizer.ggml.tokens", "a list of strings", Value::as_strings)?;
    let scores = file.require("tokenizer.ggml.scores", "a list of numbers", Value::as_floats)?;
    if scores.len() != tokens.len() {
        return Err(fail(format!("{} scores for {} tokens", scores.len(), tokens.len())));
    }
    let types = token_types(file, tokens.len())?;
    let flag = |key: &str, default: bool| -> Result<bool, LoadError> {
        Ok(file.optional(key, "a boolean", Value::as_bool)?.unwrap_or(default))
    };
    let add_space = flag("tokenizer.ggml.add_space_prefix", true)?;
    let inner = build(tokens, scores, types, add_space).map_err(fail)?;
    let bytes = tokens.iter().enumerate().map(|(id, token)| match types.get(id) {
        Some(&(TYPE_CONTROL | TYPE_USER_DEFINED)) => token.as_bytes().to_vec(),
        kind => piece(token, kind == Some(&TYPE_BYTE)),
    });
    Ok(Vocabulary {
        inner,
        bytes: bytes.collect(),
        control: (0..tokens.len()).map(|id| types.get(id) == Some(&TYPE_CONTROL)).collect(),
        bos_token_id: token_id(file, "tokenizer.ggml.bos_token_id", tokens.len())?,
        add_bos: Some(flag("tokenizer.ggml.add_bos_token", true)?),
        eos_token_ids: eos_token_ids(file, tokens)?,
    })
}

/// Pieces are words or runs of spaces; every way of cutting one is looked at.
const MAX_PIECE_BYTES: usize = 1024;

fn build(tokens: &[String], scores: &[f64], types: &[i64], add_space: bool) -> Result<tokenizers::Tokenizer, String> {
    let ids: HashMap<&str, u32> = tokens.iter().map(String::as_str).zip(0..).collect();
    if ids.len() != tokens.len() {
        return Err(format!("{} of {} tokens are duplicates", tokens.len() - ids.len(), tokens.len()));
    }
    if let Some(id) = tokens.iter().position(|token| token.len() > MAX_PIECE_BYTES) {
        return Err(format!("token {id} has {} bytes: at most {MAX_PIECE_BYTES} are read", tokens[id].len()));
    }
    let unknown = types.iter().position(|&kind| kind == TYPE_UNKNOWN).map(|id| tokens[id].clone());
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    let mut bpe = BPE::builder().vocab_and_merges(vocab, merges(tokens, scores, types, &ids));
    bpe = bpe.byte_fallback(types.contains(&TYPE_BYTE)).fuse_unk(true);
    if let Some(unknown) = unknown {
        bpe = bpe.unk_token(unknown);
    }
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(|error| error.to_string())?);
    let spaces = Replace::new(" ", "\u{2581}").map_err(|error| error.to_string())?;
    let steps = match add_space {
        true => vec![Prepend::new("\u{2581}".to_owned()).into(), spaces.into()],
        false => vec![spaces.into()],
    };
    inner.with_normalizer(Some(Sequence::new(steps)));
    add_whole_tokens(&mut inner, tokens, types);
    Ok(inner)
}

/// Every way of cutting a piece in two, the best piece's first; of one piece's, the pair that is first in the vocabulary.
fn merges(tokens: &[String], scores: &[f64], types: &[i64], ids: &HashMap<&str, u32>) -> Merges {
    let is_piece = |id: usize| types.get(id).is_none_or(|&kind| kind == 1);
    let mut cuts: Vec<(usize, u32, u32)> = Vec::new();
    for (id, token) in tokens.iter().enumerate().filter(|(id, _)| is_piece(*id)) {
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if let (Some(&left), Some(&right)) = (ids.get(left), ids.get(right))
                && is_piece(left as usize)
                && is_piece(right as usize)
            {
                cuts.push((id, left, right));
            }
        }
    }
    cuts.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
    let text = |id: u32| tokens[id as usize].clone();
    cuts.into_iter().map(|(_, left, right)| (text(left), text(right))).collect()
}
