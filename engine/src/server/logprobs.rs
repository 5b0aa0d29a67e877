//! Log probabilities in the three shapes that OpenAI's and vLLM's API have for them.

use protocol::openai::{ChatLogprobs, ChatTokenLogprob, CompletionLogprobs};
use serde_json::{Map, Value, json};

use super::answer::Token;
use crate::batch::TokenLogprob;
use crate::tokenizer::Tokenizer;

/// Lowest value in an answer: JSON has no infinity.
const LEAST: f32 = -9999.0;

fn finite(logprob: f32) -> f32 {
    logprob.max(LEAST)
}

/// The number as a whole-precision f32 is written: the same wherever it stands.
fn number(logprob: f32) -> Value {
    let logprob = finite(logprob);
    json!(logprob.to_string().parse::<f64>().unwrap_or_else(|_| f64::from(logprob)))
}

/// A token's text; OpenAI's way to write one that is no whole character, so that two such have two names.
fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    let bytes = tokenizer.token_bytes(id);
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let hex = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
            format!("bytes:{}", hex.collect::<String>())
        }
    }
}

/// Of a chat answer.
pub(super) fn chat(tokenizer: &Tokenizer, tokens: &[Token]) -> ChatLogprobs {
    let entry = |id: u32, logprob: f32, top_logprobs| {
        let bytes = tokenizer.token_bytes(id);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        ChatTokenLogprob { token, logprob: finite(logprob), bytes, top_logprobs }
    };
    let content = tokens.iter().filter_map(|(id, logprob)| {
        let logprob = logprob.as_ref()?;
        let top = logprob.top.iter().map(|&(id, logprob)| entry(id, logprob, None)).collect();
        Some(entry(*id, logprob.logprob, Some(top)))
    });
    ChatLogprobs { content: content.collect() }
}

/// Builds the lists of a text completion, whose offsets run on from chunk to chunk.
pub(super) struct CompletionWriter {
    /// Characters of the tokens so far.
    offset: usize,
}

impl CompletionWriter {
    pub(super) fn new() -> Self {
        Self { offset: 0 }
    }

    /// Passes over a token that another stream has told of.
    pub(super) fn skip(&mut self, tokenizer: &Tokenizer, id: u32) {
        self.offset += tokenizer.decode(&[id]).chars().count();
    }

    /// Appends a token; the first of a prompt has no log probability.
    pub(super) fn push(
        &mut self,
        lists: &mut CompletionLogprobs,
        tokenizer: &Tokenizer,
        id: u32,
        logprob: Option<&TokenLogprob>,
    ) {
        lists.text_offset.push(self.offset);
        self.skip(tokenizer, id);
        lists.token_logprobs.push(logprob.map(|logprob| finite(logprob.logprob)));
        lists.top_logprobs.push(logprob.map(|logprob| top_and_own(tokenizer, id, logprob)));
        lists.tokens.push(token_text(tokenizer, id));
    }
}

fn top_and_own(tokenizer: &Tokenizer, id: u32, logprob: &TokenLogprob) -> Map<String, Value> {
    let own = (id, logprob.logprob);
    let all = logprob.top.iter().copied().chain((!logprob.top.iter().any(|(top, _)| *top == id)).then_some(own));
    all.map(|(id, logprob)| (token_text(tokenizer, id), number(logprob))).collect()
}

/// vLLM's `prompt_logprobs`: nothing for the first token, then an object by token id.
pub(super) fn prompt(tokenizer: &Tokenizer, logprobs: &[(u32, TokenLogprob)]) -> Value {
    let entry = |id: u32, logprob: f32, rank: u32| {
        let value = json!({ "logprob": number(logprob), "rank": rank, "decoded_token": token_text(tokenizer, id) });
        (id.to_string(), value)
    };
    let token = |(id, logprob): &(u32, TokenLogprob)| {
        let mut object: Map<String, Value> =
            (1..).zip(&logprob.top).map(|(rank, &(id, logprob))| entry(id, logprob, rank)).collect();
        object.extend([entry(*id, logprob.logprob, logprob.rank)]);
        Value::Object(object)
    };
    std::iter::once(Value::Null).chain(logprobs.iter().map(token)).collect()
}
