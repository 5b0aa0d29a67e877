//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use protocol::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChatRequest, Usage,
};

use super::answer::{Account, Head, Token};
use super::auth::Caller;
use super::error::ApiError;
use super::request::Wanted;
use super::stream::{self, Chunks};
use super::{Server, Shared, answer, logprobs};
use crate::batch::TokenLogprob;

/// Answers a conversation, whole or streamed.
pub(super) async fn chat_completions(
    State(server): Shared,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Response, ApiError> {
    let request = server.parsed(body, ChatRequest::parse).await?;
    server.check_model(request.model.as_deref())?;
    let prompt = server.chat_prompt(request.messages, true).await?;
    let sampling = &request.sampling;
    let wanted = Wanted {
        num_answers: sampling.n,
        logprobs: request.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        default_max_tokens: None,
    };
    let prompt_tokens = prompt.len();
    let generations = server.generate(prompt, sampling, &wanted)?;
    let head = server.head("chatcmpl", request.model);
    if sampling.stream {
        let include_usage = sampling.include_usage;
        let has_logprobs = request.logprobs.is_some();
        let chunks = ChatChunks { server: Arc::clone(&server), head, prompt_tokens, include_usage, has_logprobs };
        return Ok(stream::respond(generations, chunks, Account::open(&server, caller, prompt_tokens)));
    }
    let answers = answer::collect(generations, Account::open(&server, caller, prompt_tokens)).await?;
    let usage = server.usage(prompt_tokens, &answers);
    let first_logprobs = answers.first().filter(|_| sampling.prompt_logprobs.is_some());
    let prompt_logprobs = first_logprobs.map(|first| logprobs::prompt(&server.tokenizer, &first.prompt_logprobs));
    let choice = |(index, answer): (usize, answer::Answer)| ChatChoice {
        index,
        logprobs: request.logprobs.map(|_| logprobs::chat(&server.tokenizer, &answer.tokens)),
        message: ChatMessage { role: "assistant", content: answer.text },
        finish_reason: answer.finish_reason,
    };
    let choices = answers.into_iter().enumerate().map(choice).collect();
    let Head { id, created, model } = head;
    let object = "chat.completion";
    Ok(Json(ChatCompletion { id, object, created, model, choices, usage, prompt_logprobs }).into_response())
}

struct ChatChunks {
    server: Arc<Server>,
    head: Head,
    prompt_tokens: usize,
    include_usage: bool,
    has_logprobs: bool,
}

impl ChatChunks {
    fn chunk(&self, choices: Vec<ChatChunkChoice>, usage: Option<Usage>) -> ChatChunk {
        let Head { id, created, model } = self.head.clone();
        let usage = self.include_usage.then_some(usage);
        ChatChunk { id, object: "chat.completion.chunk", created, model, choices, usage }
    }
}

impl Chunks for ChatChunks {
    type Chunk = ChatChunk;

    fn first(&self, index: usize) -> Option<ChatChunk> {
        let delta = ChatDelta { role: Some("assistant"), content: Some(String::new()) };
        Some(self.chunk(vec![ChatChunkChoice { index, delta, logprobs: None, finish_reason: None }], None))
    }

    fn prompt(&mut self, _index: usize, _logprobs: &[(u32, TokenLogprob)]) -> Option<ChatChunk> {
        None
    }

    fn wants_every_token(&self) -> bool {
        self.has_logprobs
    }

    fn tokens(
        &mut self,
        index: usize,
        text: String,
        tokens: &[Token],
        finish_reason: Option<&'static str>,
    ) -> ChatChunk {
        let has_content = finish_reason.is_none() || !text.is_empty();
        let delta = ChatDelta { role: None, content: has_content.then_some(text) };
        let wanted = self.has_logprobs && !tokens.is_empty();
        let logprobs = wanted.then(|| logprobs::chat(&self.server.tokenizer, tokens));
        self.chunk(vec![ChatChunkChoice { index, delta, logprobs, finish_reason }], None)
    }

    fn usage(&self, num_cached: usize, num_generated: usize) -> Option<ChatChunk> {
        let usage = Usage::new(self.prompt_tokens, num_cached, num_generated);
        self.include_usage.then(|| self.chunk(Vec::new(), Some(usage)))
    }
}
