//! From a parsed request to the engine's: limits that the server sets, the seed that it draws, one sequence an answer.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use protocol::Handover;
use protocol::handover::{Progress, USED_HEADER, Used};
use protocol::openai::{FieldError, SamplingFields, Usage};
use serde::Serialize;
use serde_json::Value;

use super::answer::{self, Answer, Head};
use super::error::ApiError;
use super::prompt::Prepared;
use super::trace::record_usage;
use super::{Server, relayed};
use crate::engine_loop::Generation;
use crate::sampling_params::SamplingParams;
use crate::sequence::EngineRequest;

/// What an endpoint asks for beside the shared fields.
pub(super) struct Wanted {
    pub(super) num_answers: usize,
    pub(super) logprobs: Option<usize>,
    pub(super) prompt_logprobs: Option<usize>,
    /// `None` is what is left of the context.
    pub(super) default_max_tokens: Option<usize>,
    /// By answer, how far other engines came with it.
    pub(super) resume: Vec<Progress>,
    /// Since the client asked.
    pub(super) elapsed: Duration,
}

/// What a router says beside the request, where one asks.
pub(super) fn of_router(body: &Value, is_router: bool) -> Result<Option<Handover>, FieldError> {
    is_router.then(|| relayed::of_body(body)).transpose()
}

/// What an answer used, for a router.
pub(super) fn used(usage: &Usage) -> Used {
    Used {
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.prompt_tokens_details.cached_tokens,
        completion_tokens: usage.completion_tokens,
    }
}

/// A whole answer; what it used is told to a router in a header.
pub(super) fn whole(answer: impl Serialize, used: Used, is_router: bool) -> Response {
    let mut response = Json(answer).into_response();
    if let Some(value) = is_router.then(|| HeaderValue::try_from(used.encode()).ok()).flatten() {
        response.headers_mut().insert(HeaderName::from_static(USED_HEADER), value);
    }
    response
}

/// Puts what a router decided into a request's fields.
pub(super) fn apply(handover: Option<&Handover>, fields: &mut SamplingFields) {
    let Some(handover) = handover else { return };
    fields.seed = fields.seed.or(handover.seed);
    if let Some(cache_salt) = &handover.cache_salt {
        fields.cache_salt.clone_from(cache_salt);
    }
}

impl Server {
    /// Hands a request's answers to the engine.
    pub(super) fn generate(
        &self,
        prompt: &Prepared,
        fields: &SamplingFields,
        wanted: &Wanted,
    ) -> Result<Vec<Generation>, ApiError> {
        let (prompt, chunks) = (prompt.token_ids.clone(), Arc::clone(&prompt.chunks));
        let is_chat = wanted.default_max_tokens.is_none();
        let max_model_len = self.engine.max_model_len();
        if fields.max_tokens.is_none() && prompt.len() >= max_model_len {
            let message = format!(
                "the prompt has {} tokens, this model's maximum context length is {max_model_len} with the answer",
                prompt.len()
            );
            return Err(ApiError::too_long(message, if is_chat { "messages" } else { "prompt" }));
        }
        self.check_logprobs(if is_chat { "top_logprobs" } else { "logprobs" }, wanted.logprobs)?;
        self.check_logprobs("prompt_logprobs", wanted.prompt_logprobs)?;
        if fields.prompt_logprobs.is_some() && fields.stream {
            return Err(FieldError::new("prompt_logprobs", "cannot be streamed").into());
        }
        let params = self.sampling_params(fields, prompt.len(), wanted)?;
        check_num_logprobs(prompt.len(), &params, wanted.num_answers)?;
        let asked = fields.timeout_s.map(Duration::from_secs_f64);
        check_resume(fields, wanted)?;
        let timeout = [asked, self.config.max_request_time].into_iter().flatten().min();
        // The time that other engines took is over.
        let timeout = timeout.map(|timeout| timeout.saturating_sub(wanted.elapsed));
        let (priority, cache_salt) = (fields.priority, fields.cache_salt.clone());
        let request = EngineRequest { prompt, params, priority, cache_salt, timeout, generated: Vec::new(), chunks };
        let generations = self.engine.generate_all(&request, wanted.num_answers, |choice, request| {
            let params = &mut request.params;
            params.choice = choice as u64;
            // Those of the first answer's prompt are those of all.
            params.prompt_logprobs = params.prompt_logprobs.filter(|_| choice == 0 || fields.stream);
            if let Some(progress) = wanted.resume.get(choice) {
                request.generated.clone_from(&progress.token_ids);
                if progress.finished {
                    // It ends where it ended.
                    request.params.max_tokens = progress.token_ids.len().max(1);
                }
            }
        })?;
        self.engine.metrics().asked(wanted.num_answers);
        Ok(generations)
    }

    fn check_logprobs(&self, param: &str, wanted: Option<usize>) -> Result<(), ApiError> {
        let most = self.config.max_logprobs;
        match wanted {
            Some(wanted) if wanted > most => {
                let message = format!("asks for {wanted}, this server gives at most {most} (--max-logprobs)");
                Err(FieldError::new(param, message).into())
            }
            _ => Ok(()),
        }
    }

    fn sampling_params(
        &self,
        fields: &SamplingFields,
        prompt_len: usize,
        wanted: &Wanted,
    ) -> Result<SamplingParams, ApiError> {
        let left = self.engine.max_model_len().saturating_sub(prompt_len).max(1);
        // Whoever names no length gets no refusal for what the longest answer would hold.
        let a_token = wanted.num_answers.saturating_mul(wanted.logprobs.map_or(0, |top| top + 1)).max(1);
        let default_max_tokens =
            wanted.default_max_tokens.unwrap_or(left).min(left).min(MAX_NUM_LOGPROBS / 2 / a_token);
        let seed = match fields.seed {
            Some(seed) => seed,
            None => draw_seed()?,
        };
        let defaults = self.engine.sampling_defaults();
        Ok(SamplingParams {
            temperature: fields.temperature.unwrap_or(defaults.temperature),
            top_k: fields.top_k.or(defaults.top_k).filter(|k| *k < usize::MAX),
            top_p: fields.top_p.unwrap_or(defaults.top_p),
            min_p: fields.min_p.unwrap_or(defaults.min_p),
            repetition_penalty: fields.repetition_penalty.unwrap_or(defaults.repetition_penalty),
            presence_penalty: fields.presence_penalty,
            frequency_penalty: fields.frequency_penalty,
            logit_bias: fields.logit_bias.clone(),
            seed,
            choice: 0,
            max_tokens: fields.max_tokens.unwrap_or(default_max_tokens),
            min_tokens: fields.min_tokens,
            stop: fields.stop.clone(),
            include_stop: fields.include_stop,
            stop_token_ids: fields.stop_token_ids.clone(),
            ignore_eos: fields.ignore_eos,
            logprobs: wanted.logprobs,
            prompt_logprobs: wanted.prompt_logprobs,
        })
    }

    /// The head of an answer to a request for `model`: a router's, where it gave one.
    pub(super) fn head(&self, prefix: &str, model: String, handover: Option<&Handover>) -> Head {
        match handover.filter(|handover| !handover.id.is_empty()) {
            Some(handover) => Head { id: handover.id.clone(), created: handover.created, model },
            None => Head { id: answer::new_id(prefix), created: answer::unix_time_s(), model },
        }
    }

    /// What the request calls the model.
    pub(super) fn called(&self, model: Option<String>) -> String {
        model.unwrap_or_else(|| self.model_name().to_owned())
    }

    /// A whole request's tokens.
    pub(super) fn usage(&self, prompt_tokens: usize, answers: &[Answer]) -> Usage {
        let generated = answers.iter().map(|answer| answer.num_generated).sum();
        // Later answers find the prompt that the first one computed; what the request as a whole was spared is the least.
        let cached = answers.iter().map(|answer| answer.num_cached_tokens).min().unwrap_or(0);
        record_usage(&tracing::Span::current(), prompt_tokens, generated);
        Usage::new(prompt_tokens, cached, generated)
    }
}

/// Refuses to go on with what cannot have been begun.
fn check_resume(fields: &SamplingFields, wanted: &Wanted) -> Result<(), ApiError> {
    let resume = &wanted.resume;
    let wrong = |message: String| Err(FieldError::new("pagoda.resume", message).into());
    if resume.is_empty() {
        return Ok(());
    }
    if !fields.stream || resume.len() != wanted.num_answers {
        return wrong(format!("has {} answers of a stream of {}", resume.len(), wanted.num_answers));
    }
    match resume.iter().position(|progress| progress.token_ids.is_empty() && progress.text_bytes > 0) {
        Some(index) => wrong(format!("answer {index} has text without tokens")),
        None => Ok(()),
    }
}

/// Most log probabilities that one request may have in its answers: each is some hundred bytes on its way out.
const MAX_NUM_LOGPROBS: usize = 4 << 20;

/// Refuses a request whose answer would not fit into memory.
fn check_num_logprobs(prompt_len: usize, params: &SamplingParams, num_answers: usize) -> Result<(), ApiError> {
    let of = |tokens: usize, wanted: Option<usize>| wanted.map_or(0, |top| tokens.saturating_mul(top + 1));
    let answer = of(params.max_tokens, params.logprobs).saturating_mul(num_answers);
    let all = answer.saturating_add(of(prompt_len, params.prompt_logprobs).saturating_mul(num_answers));
    if all <= MAX_NUM_LOGPROBS {
        return Ok(());
    }
    let param = if answer >= all - answer { "logprobs" } else { "prompt_logprobs" };
    let message = format!(
        "asks for up to {all} log probabilities in all, at most {MAX_NUM_LOGPROBS} are given; lower it, n or max_tokens"
    );
    Err(FieldError::new(param, message).into())
}

fn draw_seed() -> Result<u64, ApiError> {
    getrandom::u64()
        .map_err(|error| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, format!("no system randomness: {error}")))
}
