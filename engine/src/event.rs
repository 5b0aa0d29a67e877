//! What happens to a request, from its refusal at the door to its last token.
//!
//! Made by the engine's steps and its loop, read by the HTTP edge and the terminal.

use crate::batch::TokenLogprob;
use crate::sequence::FinishReason;

/// What a request's reader receives.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// The tokens that another engine generated have been replayed: before all else, where there are any.
    Resumed {
        /// Their text, as far as it is certain.
        text: String,
        /// How many there are.
        num_generated: usize,
    },
    /// The prompt has been computed: the first event.
    Prompt {
        /// Tokens that were found in the cache.
        num_cached_tokens: usize,
        /// Each token but the first, where their log probabilities were asked for.
        logprobs: Vec<(u32, TokenLogprob)>,
    },
    /// A token and the text that became certain with it.
    Token {
        /// New text, perhaps empty.
        text: String,
        /// The token.
        token_id: u32,
        /// How likely it was, where that was asked for.
        logprob: Option<TokenLogprob>,
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

/// Why a request is refused or fails.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
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
    /// More answers than the engine holds when it is empty.
    #[error("{wanted} answers are asked for, this server holds at most {limit}, running and waiting")]
    TooManyAnswers {
        /// Answers of the request.
        wanted: usize,
        /// `--max-queue` and `--max-num-seqs` together.
        limit: usize,
    },
    /// Prompt and `max_tokens` are more than the whole KV cache.
    #[error(
        "the prompt has {prompt} tokens and max_tokens asks for {max_tokens}, the KV cache holds {capacity} tokens in all"
    )]
    NeverFits {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate.
        max_tokens: usize,
        /// Tokens that the cache holds.
        capacity: usize,
    },
    /// An id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size}")]
    UnknownToken {
        /// Where it stands.
        param: &'static str,
        /// The id.
        id: u32,
        /// Tokens there are.
        vocab_size: usize,
    },
    /// Too many wait.
    #[error(
        "{in_engine} requests are running or waiting, {wanted} more would pass the limit of {limit}; try again later"
    )]
    QueueFull {
        /// Answers in the engine.
        in_engine: usize,
        /// Answers that this request asks for.
        wanted: usize,
        /// `--max-queue` and `--max-num-seqs` together.
        limit: usize,
    },
    /// It took longer than it may.
    #[error("the request was not finished within {seconds} s")]
    DeadlineExceeded {
        /// Its `timeout`, or the server's maximum.
        seconds: f64,
    },
    /// The engine refuses requests: a fault that a simulated device was told to have.
    #[error("the engine refuses requests")]
    Refused,
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
