//! One request's tokens on their way through the engine.
//!
//! Owned by the scheduler from arrival to finish; knows no text and no channel.

use crate::kv::BlockTable;
use crate::sampling_params::SamplingParams;

/// Identifies a request within one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or a stop text.
    Stop,
    /// `max_tokens` or the model's length.
    Length,
}

impl FinishReason {
    /// OpenAI's word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// A request in the engine.
#[derive(Debug)]
pub struct Sequence {
    /// Its request.
    pub id: RequestId,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the cache.
    pub num_computed_tokens: usize,
    /// Its blocks, once running.
    pub block_table: BlockTable,
    /// How tokens are chosen.
    pub params: SamplingParams,
}

impl Sequence {
    /// A request that has not started.
    pub fn new(id: RequestId, prompt: Vec<u32>, params: SamplingParams) -> Self {
        let prompt_len = prompt.len();
        Self { id, tokens: prompt, prompt_len, num_computed_tokens: 0, block_table: BlockTable::default(), params }
    }

    /// Most tokens that it can come to.
    pub fn max_len(&self) -> usize {
        self.prompt_len + self.params.max_tokens
    }

    /// Tokens generated so far.
    pub fn num_generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Whether the whole prompt has been computed, so that it takes one token a step.
    pub fn is_decoding(&self) -> bool {
        self.num_computed_tokens >= self.prompt_len
    }

    /// Tokens waiting to be computed.
    pub fn num_pending_tokens(&self) -> usize {
        self.tokens.len() - self.num_computed_tokens
    }
}
