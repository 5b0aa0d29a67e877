//! One answer's tokens on their way through the engine, and the names of their blocks.
//!
//! Owned by the scheduler from arrival to finish; knows no text and no channel.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use protocol::{BlockHash, Salt};

use crate::announcer::{Announcement, PromptChunk};
use crate::kv::{BlockName, BlockTable, Staged};
use crate::sampling_params::SamplingParams;

/// Identifies one answer within one engine.
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

/// What a request asks of the engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineRequest {
    /// Prompt tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// Lower runs first.
    pub priority: i32,
    /// KV blocks are shared only between requests of one salt.
    pub cache_salt: String,
    /// It fails if it is not finished within this time of its arrival.
    pub timeout: Option<Duration>,
    /// Tokens that another engine generated before this one goes on.
    pub generated: Vec<u32>,
    /// Where the chunks of the prompt's chain end.
    pub chunks: Arc<[PromptChunk]>,
}

/// How often a token has been seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCount {
    /// Whether the prompt has it.
    pub in_prompt: bool,
    /// Times in the answer.
    pub generated: u32,
}

/// An answer in the engine.
#[derive(Debug)]
pub struct Sequence {
    /// Its request.
    pub id: RequestId,
    /// Lower runs first.
    pub priority: i32,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt_len: usize,
    /// Tokens whose keys and values are in the cache.
    pub num_computed_tokens: usize,
    /// Tokens that were there when it started or resumed: they are computed in prefill.
    pub prefill_len: usize,
    /// Prompt tokens that were found in the cache when it first started.
    pub num_cached_tokens: Option<usize>,
    /// Prompt tokens whose log probabilities have been handed out.
    pub num_prompt_logprobs: usize,
    /// Its blocks, while running.
    pub block_table: BlockTable,
    /// Where its blocks are that the pool lacks.
    pub staged: Staged,
    /// How tokens are chosen.
    pub params: SamplingParams,
    /// Tokens seen, where penalties need them.
    pub counts: HashMap<u32, TokenCount>,
    chunks: Arc<[PromptChunk]>,
    /// How many of them have been told.
    num_told_chunks: usize,
    block_size: usize,
    root: BlockHash,
    block_hashes: Vec<BlockHash>,
}

impl Sequence {
    /// An answer that has not started.
    pub fn new(id: RequestId, request: EngineRequest, block_size: usize) -> Self {
        let EngineRequest { prompt, params, priority, cache_salt, timeout: _, generated, chunks } = request;
        let root = BlockHash::root(&Salt { adapter: None, cache_salt });
        let mut counts: HashMap<u32, TokenCount> = HashMap::new();
        if params.has_penalties() {
            counts.extend(prompt.iter().map(|&token| (token, TokenCount { in_prompt: true, generated: 0 })));
        }
        let mut sequence = Self {
            id,
            priority,
            prompt_len: prompt.len(),
            num_computed_tokens: 0,
            prefill_len: prompt.len(),
            num_cached_tokens: None,
            num_prompt_logprobs: 0,
            block_table: BlockTable::default(),
            staged: Staged::default(),
            params,
            counts,
            block_size,
            root,
            block_hashes: root.chain(&prompt, block_size),
            tokens: prompt,
            chunks,
            num_told_chunks: 0,
        };
        generated.into_iter().for_each(|token| sequence.push(token));
        sequence.prefill_len = sequence.tokens.len();
        sequence
    }

    /// The next of its chunks whose block is among its first `num_named`, and was not told before.
    pub fn next_held_chunk(&mut self, num_named: usize) -> Option<Announcement> {
        let chunk = *self.chunks.get(self.num_told_chunks)?;
        let index = chunk.block_index(self.block_size);
        let block = *self.block_hashes.get(index).filter(|_| index < num_named)?;
        self.num_told_chunks += 1;
        Some(Announcement { chunk, block })
    }

    /// It lost its blocks: what was told of them is void when they get others' contents.
    pub fn tell_chunks_again(&mut self) {
        self.num_told_chunks = 0;
    }

    /// Where the chunks of its prompt's chain end.
    pub fn chunks(&self) -> &[PromptChunk] {
        &self.chunks
    }

    /// Appends a generated token.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        if self.params.has_penalties() {
            self.counts.entry(token).or_default().generated += 1;
        }
        if self.tokens.len().is_multiple_of(self.block_size) {
            let parent = self.block_hashes.last().unwrap_or(&self.root);
            let hash = parent.child(&self.tokens[self.tokens.len() - self.block_size..]);
            self.block_hashes.push(hash);
        }
    }

    /// Names of its full blocks, in order.
    pub fn block_hashes(&self) -> &[BlockHash] {
        &self.block_hashes
    }

    /// The name of its full block of this index, and what it is the name of.
    pub fn block_name(&self, index: usize) -> Option<BlockName> {
        let hash = *self.block_hashes.get(index)?;
        let parent = index.checked_sub(1).map_or(self.root, |before| self.block_hashes[before]);
        let token_ids = self.tokens[index * self.block_size..(index + 1) * self.block_size].into();
        Some(BlockName { hash, parent, token_ids })
    }

    /// The blocks that it may take from the cache: never all of its tokens, so that there is one to compute logits from,
    /// and none where it wants the log probabilities of its prompt.
    pub fn cacheable_hashes(&self) -> &[BlockHash] {
        if self.wants_prompt_logprobs() {
            return &[];
        }
        &self.block_hashes[..(self.tokens.len() - 1) / self.block_size]
    }

    /// Whether log probabilities of prompt tokens are still to be computed.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.params.prompt_logprobs.is_some() && self.num_prompt_logprobs + 1 < self.prompt_len
    }

    /// Most tokens that it can come to.
    pub fn max_len(&self) -> usize {
        self.prompt_len + self.params.max_tokens
    }

    /// Tokens generated so far.
    pub fn num_generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Gives up what is staged for it: those blocks are computed, and were not found in a cache.
    pub fn drop_staged(&mut self) {
        if !self.staged.is_empty() {
            self.staged = Staged::Here(0, VecDeque::new());
            let num_found = self.block_table.block_ids().len() * self.block_size;
            self.num_cached_tokens = self.num_cached_tokens.map(|num_cached| num_cached.min(num_found));
        }
    }

    /// Whether its prefill is over, so that it takes one token a step.
    pub fn is_decoding(&self) -> bool {
        self.num_computed_tokens >= self.prefill_len
    }

    /// Tokens waiting to be computed.
    pub fn num_pending_tokens(&self) -> usize {
        self.tokens.len() - self.num_computed_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_grow_with_the_answer_and_never_cover_the_last_token() {
        let request = EngineRequest { prompt: (0..32).collect(), ..Default::default() };
        let mut sequence = Sequence::new(RequestId(0), request, 16);
        assert_eq!((sequence.block_hashes().len(), sequence.cacheable_hashes().len()), (2, 1));
        (32..48).for_each(|token| sequence.push(token));
        let whole: Vec<u32> = (0..48).collect();
        assert_eq!(sequence.block_hashes(), BlockHash::root(&Salt::default()).chain(&whole, 16));
        assert_eq!(sequence.cacheable_hashes().len(), 2);
    }
}
