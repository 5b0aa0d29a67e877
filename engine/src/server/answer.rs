//! What all answers share: ids, times, the events of a request's answers as one stream, and collecting them.

use std::pin::Pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use futures_util::stream::{self, Stream, StreamExt};

use super::Server;
use super::auth::Caller;
use super::conversation::Conversation;
use super::error::ApiError;
use crate::batch::TokenLogprob;
use crate::engine_loop::Generation;
use crate::event::{EngineEvent, RequestError};

/// Seconds since 1970, as OpenAI's `created`.
pub(super) fn unix_time_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

/// A new id: `prefix` and 128 random bits (or the clock's, where the system has no randomness).
pub(super) fn new_id(prefix: &str) -> String {
    let half = || getrandom::u64().unwrap_or_else(|_| unix_time_s());
    format!("{prefix}-{:016x}{:016x}", half(), half())
}

/// What every chunk and answer of one request begins with.
#[derive(Clone, Debug)]
pub(super) struct Head {
    pub(super) id: String,
    pub(super) created: u64,
    pub(super) model: String,
}

/// A token of an answer.
pub(super) type Token = (u32, Option<TokenLogprob>);

/// Events with the index of the answer that they belong to. Dropping it cancels all answers.
pub(super) type Events = Pin<Box<dyn Stream<Item = (usize, EngineEvent)> + Send>>;

/// The events of some answers, as they come.
pub(super) fn merged(generations: Vec<Generation>) -> Events {
    let events = generations.into_iter().enumerate().map(|(index, generation)| {
        Box::pin(stream::unfold(generation, move |mut generation| async move {
            generation.next().await.map(|event| ((index, event), generation))
        }))
    });
    Box::pin(stream::select_all(events))
}

/// A complete answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) finish_reason: &'static str,
    pub(super) num_generated: usize,
    pub(super) num_cached_tokens: usize,
    pub(super) tokens: Vec<Token>,
    pub(super) prompt_logprobs: Vec<(u32, TokenLogprob)>,
}

impl Answer {
    /// Mean log probability of its tokens: what `best_of` compares.
    fn mean_logprob(&self) -> f64 {
        let logprobs = self.tokens.iter().filter_map(|(_, logprob)| logprob.as_ref());
        logprobs.map(|logprob| f64::from(logprob.logprob)).sum::<f64>() / self.tokens.len().max(1) as f64
    }
}

/// A caller's use of tokens by one request, counted when the request is over, however it ends.
pub(super) struct Account {
    server: Arc<Server>,
    caller: Caller,
    pub(super) prompt_tokens: usize,
    pub(super) generated: usize,
}

impl Account {
    pub(super) fn open(server: &Arc<Server>, caller: Caller, prompt_tokens: usize) -> Self {
        Self { server: Arc::clone(server), caller, prompt_tokens, generated: 0 }
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.server.engine.metrics().used_by_key(self.caller.name(), self.prompt_tokens, self.generated);
    }
}

/// Waits for all answers of a request.
pub(super) async fn collect(generations: Vec<Generation>, mut account: Account) -> Result<Vec<Answer>, ApiError> {
    let mut answers = vec![Answer::default(); generations.len()];
    let mut num_left = answers.len();
    let mut events = merged(generations);
    while let Some((index, event)) = events.next().await {
        let answer = &mut answers[index];
        match event {
            // Whole answers are not continued: nothing of them has been delivered.
            EngineEvent::Resumed { .. } => {}
            EngineEvent::Prompt { num_cached_tokens, logprobs } => {
                answer.num_cached_tokens = num_cached_tokens;
                answer.prompt_logprobs = logprobs;
            }
            EngineEvent::Token { text, token_id, logprob } => {
                account.generated += 1;
                answer.text.push_str(&text);
                answer.tokens.push((token_id, logprob));
            }
            EngineEvent::Finished { reason, text, num_generated } => {
                answer.text.push_str(&text);
                answer.finish_reason = reason.as_str();
                answer.num_generated = num_generated;
                num_left -= 1;
            }
            EngineEvent::Failed(error) => return Err(error.into()),
        }
    }
    if num_left > 0 {
        return Err(RequestError::EngineFailed("its thread has ended".into()).into());
    }
    Ok(answers)
}

/// The `n` answers with the highest mean log probability a token, best first.
pub(super) fn best(mut answers: Vec<Answer>, n: usize) -> Vec<Answer> {
    if n < answers.len() {
        answers.sort_by(|a, b| b.mean_logprob().total_cmp(&a.mean_logprob()));
        answers.truncate(n);
    }
    answers
}

/// Announces a conversation with its one answer; of several none is the one that it goes on with.
pub(super) fn announce(conversation: Option<Conversation>, answers: &[Answer]) {
    if let (Some(conversation), [answer]) = (conversation, answers) {
        conversation.answered(answer.text.clone(), answer.tokens.iter().map(|(token_id, _)| *token_id).collect());
    }
}
