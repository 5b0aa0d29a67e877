//! `POST /v1/chat/completions`.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use protocol::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChatRequest, Usage,
};

use super::error::ApiError;
use super::stream::{self, Chunks};
use super::{Shared, answer};

/// Answers a conversation, whole or streamed.
pub(super) async fn chat_completions(State(server): Shared, body: Body) -> Result<Response, ApiError> {
    server.check_serving()?;
    let request = ChatRequest::parse(&server.json(body).await?)?;
    server.check_model(request.model.as_deref())?;
    let prompt = server.chat_prompt(request.messages, true).await?;
    let prompt_tokens = prompt.len();
    let params = server.sampling_params(&request.sampling, prompt_tokens, None)?;
    let generation = server.engine.generate(prompt, params)?;
    let chunks = ChatChunks {
        id: answer::new_id("chatcmpl"),
        created: answer::unix_time_s(),
        model: request.model.unwrap_or_else(|| server.model_name().to_owned()),
        prompt_tokens,
        include_usage: request.sampling.include_usage,
    };
    if request.sampling.stream {
        return Ok(stream::respond(generation, chunks));
    }
    let answer = answer::collect(generation).await?;
    let message = ChatMessage { role: "assistant", content: answer.text };
    let choice = ChatChoice { index: 0, message, logprobs: None, finish_reason: answer.finish_reason };
    let ChatChunks { id, created, model, .. } = chunks;
    let usage = Usage::new(prompt_tokens, answer.num_generated);
    let completion = ChatCompletion { id, object: "chat.completion", created, model, choices: vec![choice], usage };
    Ok(Json(completion).into_response())
}

struct ChatChunks {
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
    include_usage: bool,
}

impl ChatChunks {
    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
        let (id, created, model) = (self.id.clone(), self.created, self.model.clone());
        ChatChunk { id, object: "chat.completion.chunk", created, model, choices, usage }
    }

    fn delta(&self, delta: ChatDelta, finish_reason: Option<&'static str>) -> ChatChunk {
        self.chunk(vec![ChatChunkChoice { index: 0, delta, logprobs: None, finish_reason }], None)
    }
}

impl Chunks for ChatChunks {
    type Chunk = ChatChunk;

    fn first(&self) -> Option<ChatChunk> {
        Some(self.delta(ChatDelta { role: Some("assistant"), content: Some(String::new()) }, None))
    }

    fn text(&self, text: String) -> ChatChunk {
        self.delta(ChatDelta { role: None, content: Some(text) }, None)
    }

    fn last(&self, text: String, finish_reason: &'static str) -> ChatChunk {
        let content = (!text.is_empty()).then_some(text);
        self.delta(ChatDelta { role: None, content }, Some(finish_reason))
    }

    fn usage(&self, num_generated: usize) -> Option<ChatChunk> {
        self.include_usage.then(|| self.chunk(Vec::new(), Some(Usage::new(self.prompt_tokens, num_generated))))
    }
}
