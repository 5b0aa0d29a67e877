//! What happens to a request, from its refusal at the door to its last token.
//!
//! Made by the engine's steps and its loop, read by the HTTP edge and the terminal.

use crate::sequence::FinishReason;

/// What a request's reader receives.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// A token and the text that became certain with it.
    Token {
        /// New text, perhaps empty.
        text: String,
        /// The token.
        token_id: u32,
    },
    /// The last event of a complete answer.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Text that was held back.
        text: String,
        /// Tokens generated.
        num_generated: usize,
    },
    /// The last event of a failed one.
    Failed(RequestError),
}

impl EngineEvent {
    /// Whether nothing follows it.
    pub fn is_last(&self) -> bool {
        match self {
            Self::Token { .. } => false,
            Self::Finished { .. } | Self::Failed(_) => true,
        }
    }
}

/// Why a request is refused or fails.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// No token to start from.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Prompt alone, or with `max_tokens`, is over the longest sequence.
    #[error(
        "this model's maximum context length is {max_model_len} tokens, the prompt has {prompt} and max_tokens asks for {max_tokens}"
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        max_tokens: usize,
        /// The limit on both.
        max_model_len: usize,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Tokens there are.
        vocab_size: usize,
    },
    /// Too many wait.
    #[error("{in_engine} requests are running or waiting, the limit is {limit}; try again later")]
    QueueFull {
        /// Requests in the engine.
        in_engine: usize,
        /// `--max-queue` and `--max-num-seqs` together.
        limit: usize,
    },
    /// The model is not loaded yet.
    #[error("the model is still loading")]
    Loading,
    /// The logits hold a NaN.
    #[error("the model computed NaN for this request")]
    NotANumber,
    /// The device or the engine thread is gone.
    #[error("the engine failed: {0}")]
    EngineFailed(String),
}
