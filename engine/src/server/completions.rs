//! `POST /v1/completions`.

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use protocol::openai::{Completion, CompletionChoice, CompletionRequest, Usage};

use super::error::ApiError;
use super::stream::{self, Chunks};
use super::{Shared, answer};

/// OpenAI's default of this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Continues a text or token ids, whole or streamed.
pub(super) async fn completions(State(server): Shared, body: Body) -> Result<Response, ApiError> {
    server.check_serving()?;
    let request = CompletionRequest::parse(&server.json(body).await?)?;
    server.check_model(request.model.as_deref())?;
    let prompt = server.completion_prompt(request.prompt).await?;
    let prompt_tokens = prompt.len();
    let params = server.sampling_params(&request.sampling, prompt_tokens, Some(DEFAULT_MAX_TOKENS))?;
    let generation = server.engine.generate(prompt, params)?;
    let chunks = CompletionChunks {
        id: answer::new_id("cmpl"),
        created: answer::unix_time_s(),
        model: request.model.unwrap_or_else(|| server.model_name().to_owned()),
        prompt_tokens,
        include_usage: request.sampling.include_usage,
    };
    if request.sampling.stream {
        return Ok(stream::respond(generation, chunks));
    }
    let answer = answer::collect(generation).await?;
    let usage = Usage::new(prompt_tokens, answer.num_generated);
    Ok(Json(chunks.completion(Some((answer.text, Some(answer.finish_reason))), Some(usage))).into_response())
}

struct CompletionChunks {
    id: String,
    created: u64,
    model: String,
    prompt_tokens: usize,
    include_usage: bool,
}

impl CompletionChunks {
    fn completion(&self, choice: Option<(String, Option<&'static str>)>, usage: Option<Usage>) -> Completion {
        let choices = choice
            .into_iter()
            .map(|(text, finish_reason)| CompletionChoice { index: 0, text, logprobs: None, finish_reason })
            .collect();
        let (id, created, model) = (self.id.clone(), self.created, self.model.clone());
        Completion { id, object: "text_completion", created, model, choices, usage }
    }
}

impl Chunks for CompletionChunks {
    type Chunk = Completion;

    fn first(&self) -> Option<Completion> {
        None
    }

    fn text(&self, text: String) -> Completion {
        self.completion(Some((text, None)), None)
    }

    fn last(&self, text: String, finish_reason: &'static str) -> Completion {
        self.completion(Some((text, Some(finish_reason))), None)
    }

    fn usage(&self, num_generated: usize) -> Option<Completion> {
        self.include_usage.then(|| self.completion(None, Some(Usage::new(self.prompt_tokens, num_generated))))
    }
}
