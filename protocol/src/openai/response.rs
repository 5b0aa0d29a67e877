//! Answers: whole, streamed, and the list of models.

use serde::Serialize;

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
}

impl Usage {
    /// Of a prompt and its answer.
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
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
}

/// One answer of a [`ChatCompletion`].
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatChoice {
    pub index: usize,
    pub message: ChatMessage,
    pub logprobs: Option<()>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// One answer of a [`ChatChunk`].
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct ChatChunkChoice {
    pub index: usize,
    pub delta: ChatDelta,
    pub logprobs: Option<()>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// One answer of a [`Completion`].
#[derive(Clone, Debug, Serialize)]
#[expect(missing_docs, reason = "OpenAI's field names say it")]
pub struct CompletionChoice {
    pub index: usize,
    pub text: String,
    pub logprobs: Option<()>,
    pub finish_reason: Option<&'static str>,
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
