//! Answers: whole, streamed, and the list of models.

use serde::Serialize;

use serde_json::{Map, Value};

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
}

/// Tokens of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Found in the KV cache.
    pub cached_tokens: usize,
}

impl Usage {
    /// Of a prompt, of which some tokens were cached, and its answers.
    pub fn new(prompt_tokens: usize, cached_tokens: usize, completion_tokens: usize) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        let prompt_tokens_details = PromptTokensDetails { cached_tokens };
        Self { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }
    }
}

/// A token of a chat answer and how likely it was.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatTokenLogprob {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<Vec<ChatTokenLogprob>>,
}

/// Log probabilities of a chat answer.
#[derive(Clone, Debug, Serialize)]
pub struct ChatLogprobs {
    /// Token by token.
    pub content: Vec<ChatTokenLogprob>,
}

/// Log probabilities of a text completion, a list a kind.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    pub text_offset: Vec<usize>,
}

/// A whole chat answer.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatCompletion {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Value>,
}

/// One answer of a [`ChatCompletion`].
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatChoice {
    pub index: usize,
    pub message: ChatMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: &'static str,
}

/// The assistant's message.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatMessage {
    pub role: &'static str,
    pub content: String,
}

/// A piece of a streamed chat answer.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatChunk {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChunkChoice>,
    /// `Some(None)` is null: of a chunk that is not the last, where the last has the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// One answer of a [`ChatChunk`].
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatChunkChoice {
    pub index: usize,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<&'static str>,
}

/// What a chunk adds.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
}

/// A text completion, whole or a chunk of one.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct Completion {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    /// `Some(None)` is null: of a chunk that is not the last, where the last has the usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
}

/// One answer of a [`Completion`].
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<Value>,
}

/// `GET /v1/models`
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<Model>,
}

/// One served model.
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct Model {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub owned_by: &'static str,
    pub max_model_len: usize,
}
