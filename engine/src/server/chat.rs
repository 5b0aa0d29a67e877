//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use protocol::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta, ChatMessage, ChatRequest, Usage,
};

use serde_json::Value;

use super::answer::{Account, Head, Token};
use super::auth::Caller;
use super::conversation::{ChainName, Conversation};
use super::error::ApiError;
use super::relayed::OfRouter;
use super::request::{self, Wanted};
use super::stream::{self, Chunks};
use super::{Server, Shared, answer, logprobs};
use crate::batch::TokenLogprob;

/// Answers a conversation, whole or streamed.
pub(super) async fn chat_completions(
    State(server): Shared,
    Extension(caller): Extension<Caller>,
    of_router: Option<Extension<OfRouter>>,
    body: Body,
) -> Result<Response, ApiError> {
    let parse = |body: &Value| Ok((ChatRequest::parse(body)?, request::of_router(body, of_router.is_some())?));
    let (mut request, handover) = server.parsed(body, parse).await?;
    server.check_model(request.model.as_deref())?;
    request::apply(handover.as_ref(), &mut request.sampling);
    let sampling = &request.sampling;
    let model = server.called(request.model);
    let name = ChainName { model: model.clone(), cache_salt: sampling.cache_salt.clone() };
    let prompt = server.chat_prompt(request.messages, true, Some(name.clone())).await?;
    let wanted = Wanted {
        num_answers: sampling.n,
        logprobs: request.logprobs,
        prompt_logprobs: sampling.prompt_logprobs,
        default_max_tokens: None,
        resume: handover.as_ref().map(|handover| handover.resume.clone()).unwrap_or_default(),
        elapsed: Duration::from_millis(handover.as_ref().map_or(0, |handover| handover.elapsed_ms)),
    };
    let prompt_tokens = prompt.token_ids.len();
    let generations = server.generate(&prompt, sampling, &wanted)?;
    let head = server.head("chatcmpl", model, handover.as_ref());
    let one = wanted.num_answers == 1;
    let conversation = one.then(|| Conversation::keep(&server, prompt.content, name, &prompt.token_ids)).flatten();
    if sampling.stream {
        let include_usage = sampling.include_usage;
        let has_logprobs = request.logprobs.is_some();
        let chunks = ChatChunks { server: Arc::clone(&server), head, prompt_tokens, include_usage, has_logprobs };
        let relayed = handover.map(|handover| server.relayed(&wanted, handover.usage_told));
        let account = Account::open(&server, caller, prompt_tokens);
        return Ok(stream::respond(generations, chunks, account, relayed, conversation));
    }
    let answers = answer::collect(generations, Account::open(&server, caller, prompt_tokens)).await?;
    answer::announce(conversation, &answers);
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
    let used = request::used(&usage);
    let whole = ChatCompletion { id, object, created, model, choices, usage, prompt_logprobs };
    Ok(request::whole(whole, used, of_router.is_some()))
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
