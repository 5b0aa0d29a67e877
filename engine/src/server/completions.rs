//! `POST /v1/completions`.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use protocol::openai::{Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Prompt, Usage};

use serde_json::Value;

use super::answer::{Account, Answer, Head, Token};
use super::auth::Caller;
use super::conversation::{ChainName, Conversation};
use super::error::ApiError;
use super::logprobs::CompletionWriter;
use super::relayed::OfRouter;
use super::request::{self, Wanted};
use super::stream::{self, Chunks};
use super::{Server, Shared, answer, logprobs};
use crate::batch::TokenLogprob;

/// OpenAI's default of this endpoint.
const DEFAULT_MAX_TOKENS: usize = 16;

/// Continues a text or token ids, whole or streamed.
pub(super) async fn completions(
    State(server): Shared,
    Extension(caller): Extension<Caller>,
    of_router: Option<Extension<OfRouter>>,
    body: Body,
) -> Result<Response, ApiError> {
    let parse = |body: &Value| Ok((CompletionRequest::parse(body)?, request::of_router(body, of_router.is_some())?));
    let (mut request, handover) = server.parsed(body, parse).await?;
    server.check_model(request.model.as_deref())?;
    request::apply(handover.as_ref(), &mut request.sampling);
    let model = server.called(request.model);
    let name = ChainName { model: model.clone(), cache_salt: request.sampling.cache_salt.clone() };
    let text = match &request.prompt {
        Prompt::Text(text) if request.echo => Some(text.clone()),
        _ => None,
    };
    let prompt = server.completion_prompt(request.prompt, name.clone()).await?;
    let sampling = &request.sampling;
    // Which of more answers are best is told by their log probabilities.
    let compares = request.best_of > sampling.n;
    let wanted = Wanted {
        num_answers: request.best_of,
        logprobs: request.logprobs.or(compares.then_some(0)),
        prompt_logprobs: sampling.prompt_logprobs.max(request.logprobs.filter(|_| request.echo)),
        default_max_tokens: Some(DEFAULT_MAX_TOKENS),
        resume: handover.as_ref().map(|handover| handover.resume.clone()).unwrap_or_default(),
        elapsed: Duration::from_millis(handover.as_ref().map_or(0, |handover| handover.elapsed_ms)),
    };
    let prompt_tokens = prompt.token_ids.len();
    let first_token = prompt.token_ids.first().copied();
    let generations = server.generate(&prompt, sampling, &wanted)?;
    let writer = Writer {
        server: Arc::clone(&server),
        head: server.head("cmpl", model, handover.as_ref()),
        echo: first_token.filter(|_| request.echo).map(|first_token| Echo {
            text: text.unwrap_or_else(|| server.tokenizer.decode(&prompt.token_ids)),
            first_token,
        }),
        logprobs: request.logprobs.is_some(),
        prompt_logprobs: sampling.prompt_logprobs.is_some(),
        include_usage: sampling.include_usage,
        prompt_tokens,
        offsets: (0..request.best_of).map(|_| CompletionWriter::new()).collect(),
    };
    let one = wanted.num_answers == 1;
    let conversation = one.then(|| Conversation::keep(&server, prompt.content, name, &prompt.token_ids)).flatten();
    if sampling.stream {
        let relayed = handover.map(|handover| server.relayed(&wanted, handover.usage_told));
        let account = Account::open(&server, caller, prompt_tokens);
        return Ok(stream::respond(generations, writer, account, relayed, conversation));
    }
    let answers = answer::collect(generations, Account::open(&server, caller, prompt_tokens)).await?;
    answer::announce(conversation, &answers);
    let usage = server.usage(prompt_tokens, &answers);
    let mut answers = answers;
    let prompt_logprobs =
        answers.first_mut().map(|first| std::mem::take(&mut first.prompt_logprobs)).unwrap_or_default();
    let best = answer::best(answers, sampling.n);
    let used = request::used(&usage);
    Ok(request::whole(writer.whole(best, &prompt_logprobs, usage), used, of_router.is_some()))
}

/// A prompt that the answer begins with.
struct Echo {
    text: String,
    /// Has no log probability.
    first_token: u32,
}

struct Writer {
    server: Arc<Server>,
    head: Head,
    echo: Option<Echo>,
    logprobs: bool,
    prompt_logprobs: bool,
    include_usage: bool,
    prompt_tokens: usize,
    /// By answer.
    offsets: Vec<CompletionWriter>,
}

impl Writer {
    fn whole(mut self, answers: Vec<Answer>, prompt_logprobs: &[(u32, TokenLogprob)], usage: Usage) -> Completion {
        let mut choices = Vec::with_capacity(answers.len());
        for (index, answer) in answers.into_iter().enumerate() {
            let mut text = self.echo.as_ref().map_or_else(String::new, |echo| echo.text.clone());
            text.push_str(&answer.text);
            let mut lists = self.echoed(index, prompt_logprobs);
            self.append(&mut lists, index, &answer.tokens);
            choices.push(CompletionChoice {
                index,
                text,
                logprobs: lists,
                finish_reason: Some(answer.finish_reason),
                prompt_logprobs: self
                    .prompt_logprobs
                    .then(|| logprobs::prompt(&self.server.tokenizer, prompt_logprobs)),
            });
        }
        self.completion(choices, Some(Some(usage)))
    }

    fn completion(&self, choices: Vec<CompletionChoice>, usage: Option<Option<Usage>>) -> Completion {
        let Head { id, created, model } = self.head.clone();
        Completion { id, object: "text_completion", created, model, choices, usage }
    }

    /// The lists, with the prompt's tokens where it is echoed; `None` where no log probabilities are wanted.
    fn echoed(&mut self, index: usize, prompt: &[(u32, TokenLogprob)]) -> Option<CompletionLogprobs> {
        let mut lists = self.logprobs.then(CompletionLogprobs::default)?;
        if let Some(echo) = &self.echo {
            let (tokenizer, offsets) = (&self.server.tokenizer, &mut self.offsets[index]);
            offsets.push(&mut lists, tokenizer, echo.first_token, None);
            for (id, logprob) in prompt {
                offsets.push(&mut lists, tokenizer, *id, Some(logprob));
            }
        }
        Some(lists)
    }

    fn append(&mut self, lists: &mut Option<CompletionLogprobs>, index: usize, tokens: &[Token]) {
        let Some(lists) = lists else { return };
        for (id, logprob) in tokens {
            self.offsets[index].push(lists, &self.server.tokenizer, *id, logprob.as_ref());
        }
    }

    fn choice(
        &self,
        index: usize,
        text: String,
        logprobs: Option<CompletionLogprobs>,
        finish_reason: Option<&'static str>,
    ) -> Completion {
        let choice = CompletionChoice { index, text, logprobs, finish_reason, prompt_logprobs: None };
        self.completion(vec![choice], self.include_usage.then_some(None))
    }
}

impl Chunks for Writer {
    type Chunk = Completion;

    fn first(&self, _index: usize) -> Option<Completion> {
        None
    }

    fn prompt(&mut self, index: usize, logprobs: &[(u32, TokenLogprob)]) -> Option<Completion> {
        let text = self.echo.as_ref()?.text.clone();
        let lists = self.echoed(index, logprobs);
        Some(self.choice(index, text, lists, None))
    }

    fn wants_every_token(&self) -> bool {
        self.logprobs
    }

    fn tokens(
        &mut self,
        index: usize,
        text: String,
        tokens: &[Token],
        finish_reason: Option<&'static str>,
    ) -> Completion {
        let mut lists = self.logprobs.then(CompletionLogprobs::default).filter(|_| !tokens.is_empty());
        self.append(&mut lists, index, tokens);
        self.choice(index, text, lists, finish_reason)
    }

    fn skip(&mut self, index: usize, token_ids: &[u32]) {
        if self.logprobs {
            token_ids.iter().for_each(|&id| self.offsets[index].skip(&self.server.tokenizer, id));
        }
    }

    fn usage(&self, num_cached: usize, num_generated: usize) -> Option<Completion> {
        let usage = Usage::new(self.prompt_tokens, num_cached, num_generated);
        self.include_usage.then(|| self.completion(Vec::new(), Some(Some(usage))))
    }
}
