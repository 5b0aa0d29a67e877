//! Engine events as server-sent events: one `data:` line a chunk, `[DONE]` at the end.
//!
//! Used by chat and text completions, which differ in what a chunk looks like. A failure in mid-stream is an error event
//! and the end. Dropping the stream (the client went away) drops the generations, which cancels them.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{self, Stream};
use protocol::handover::{Progress, USAGE_TOLD, Used};
use serde::Serialize;

use super::answer::{Account, Events, Token, merged};
use super::conversation::Conversation;
use super::error::ApiError;
use super::relayed::{self, Relayed};
use super::trace::record_usage;
use crate::batch::TokenLogprob;
use crate::engine_loop::Generation;
use crate::event::{EngineEvent, RequestError};

/// Proxies drop a connection that is silent for long; a long prefill is.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How an endpoint writes its chunks.
pub(super) trait Chunks: Send + 'static {
    /// One chunk's JSON.
    type Chunk: Serialize;

    /// Before any token of an answer.
    fn first(&self, index: usize) -> Option<Self::Chunk>;
    /// The prompt, where it is echoed.
    fn prompt(&mut self, index: usize, logprobs: &[(u32, TokenLogprob)]) -> Option<Self::Chunk>;
    /// Whether a token without text is told of at once.
    fn wants_every_token(&self) -> bool;
    /// New text and the tokens that made it; with a reason, the end of an answer.
    fn tokens(
        &mut self,
        index: usize,
        text: String,
        tokens: &[Token],
        finish_reason: Option<&'static str>,
    ) -> Self::Chunk;
    /// Passes over tokens that another stream has told of.
    fn skip(&mut self, _index: usize, _token_ids: &[u32]) {}
    /// After the end of all, where asked for.
    fn usage(&self, num_cached: usize, num_generated: usize) -> Option<Self::Chunk>;
}

struct Streaming<C> {
    events: Events,
    chunks: C,
    ready: VecDeque<Event>,
    num_left: usize,
    num_cached: Option<usize>,
    account: Account,
    ended: bool,
    /// Tokens that other engines generated.
    num_replayed: usize,
    /// Of a stream to a router.
    relayed: Option<Relayed>,
    /// The one answer so far, where it is to be announced.
    answer: Option<(Conversation, String, Vec<u32>)>,
    /// Open until the stream has ended.
    span: tracing::Span,
}

/// A streamed response.
pub(super) fn respond<C: Chunks>(
    generations: Vec<Generation>,
    chunks: C,
    account: Account,
    relayed: Option<Relayed>,
    conversation: Option<Conversation>,
) -> Response {
    let num_left = generations.len();
    let answer = conversation.map(|conversation| (conversation, String::new(), Vec::new()));
    let mut state = Streaming {
        events: merged(generations),
        chunks,
        ready: VecDeque::new(),
        num_left,
        num_cached: None,
        account,
        ended: false,
        num_replayed: 0,
        relayed,
        answer,
        span: tracing::Span::current(),
    };
    for index in 0..num_left {
        if let Some(chunk) = state.chunks.first(index).filter(|_| !state.has_begun(index)) {
            state.send(index, &chunk, 0, false);
        }
    }
    let sse = Sse::new(to_sse(state)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = sse.into_response();
    // nginx buffers a response unless told not to.
    response.headers_mut().insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

fn to_sse<C: Chunks>(state: Streaming<C>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(state, |mut state| async move {
        loop {
            if let Some(event) = state.ready.pop_front() {
                return Some((Ok(event), state));
            }
            if state.ended {
                return None;
            }
            tokio::select! {
                event = state.events.next() => state.take(event),
                () = drained(&mut state.relayed) => state.hand_off(),
            }
        }
    })
}

/// Waits until a stream is to be continued elsewhere: for ever where there is no elsewhere.
async fn drained(relayed: &mut Option<Relayed>) {
    match relayed {
        Some(relayed) => relayed.drained().await,
        None => std::future::pending().await,
    }
}

impl<C: Chunks> Streaming<C> {
    /// How far an answer was when this stream began; `None` where nobody could have begun it.
    fn before(&self, index: usize) -> Option<&Progress> {
        self.relayed.as_ref().map(|relayed| relayed.before(index))
    }

    fn has_begun(&self, index: usize) -> bool {
        self.before(index).is_some_and(|before| before.begun)
    }

    /// Puts an event on its way that delivers so many bytes of an answer's text.
    fn send(&mut self, index: usize, chunk: &C::Chunk, text_bytes: usize, finished: bool) {
        let event = match &mut self.relayed {
            Some(relayed) => relayed.event(index, text_bytes, finished),
            None => Event::default(),
        };
        self.ready.push_back(with_data(event, chunk));
    }

    fn take(&mut self, event: Option<(usize, EngineEvent)>) {
        let Some((index, event)) = event else {
            return self.fail(RequestError::EngineFailed("its thread has ended".into()));
        };
        let is_over = self.before(index).is_some_and(|before| before.finished);
        match event {
            // An answer that has ended elsewhere is looked at for its usage only.
            EngineEvent::Prompt { .. } | EngineEvent::Token { .. } if is_over => {}
            EngineEvent::Resumed { text, num_generated } => self.resume(index, &text, num_generated),
            EngineEvent::Prompt { num_cached_tokens, logprobs } => {
                self.num_cached = Some(self.num_cached.map_or(num_cached_tokens, |least| least.min(num_cached_tokens)));
                let chunk = self.chunks.prompt(index, &logprobs);
                if let Some(chunk) = chunk.filter(|_| !self.has_begun(index)) {
                    self.send(index, &chunk, 0, false);
                }
            }
            EngineEvent::Token { text, token_id, logprob } => {
                self.account.generated += 1;
                if let Some((_, answer, token_ids)) = &mut self.answer {
                    answer.push_str(&text);
                    token_ids.push(token_id);
                }
                if let Some(relayed) = &mut self.relayed {
                    relayed.note_token(index, token_id);
                }
                if !text.is_empty() || self.chunks.wants_every_token() {
                    let text_bytes = text.len();
                    let chunk = self.chunks.tokens(index, text, &[(token_id, logprob)], None);
                    self.send(index, &chunk, text_bytes, false);
                }
            }
            EngineEvent::Finished { reason, text, .. } => {
                if !is_over {
                    if let Some((_, answer, _)) = &mut self.answer {
                        answer.push_str(&text);
                    }
                    let text_bytes = text.len();
                    let chunk = self.chunks.tokens(index, text, &[], Some(reason.as_str()));
                    self.send(index, &chunk, text_bytes, true);
                }
                self.num_left -= 1;
                if self.num_left == 0 {
                    self.end();
                }
            }
            EngineEvent::Failed(error) => self.fail(error),
        }
    }

    /// Goes on where another engine's stream was cut: what of the text was not delivered is.
    fn resume(&mut self, index: usize, text: &str, num_generated: usize) {
        self.num_replayed += num_generated;
        // Once a stream: it is not looked at again.
        let Progress { token_ids, text_bytes, finished, .. } = self.before(index).cloned().unwrap_or_default();
        self.chunks.skip(index, &token_ids);
        if let Some((_, answer, all)) = &mut self.answer {
            answer.push_str(text);
            all.extend(token_ids);
        }
        if finished {
            return;
        }
        match text.get(text_bytes..) {
            None => self.fail(RequestError::EngineFailed(format!(
                "{text_bytes} bytes were delivered of an answer that has {} so far",
                text.len()
            ))),
            Some("") => {}
            Some(rest) => {
                let chunk = self.chunks.tokens(index, rest.to_owned(), &[], None);
                self.send(index, &chunk, rest.len(), false);
            }
        }
    }

    /// Leaves the rest to another engine. What was generated and not delivered is generated there again.
    fn hand_off(&mut self) {
        self.ended = true;
        self.ready.push_back(relayed::hand_off());
    }

    fn end(&mut self) {
        self.ended = true;
        // What another engine generated is in the answer's usage, and was counted there.
        let (cached, generated) = (self.num_cached.unwrap_or(0), self.account.generated + self.num_replayed);
        record_usage(&self.span, self.account.prompt_tokens, generated);
        let told = match &self.relayed {
            Some(relayed) => {
                let prompt_tokens = self.account.prompt_tokens;
                let used = Used { prompt_tokens, cached_tokens: cached, completion_tokens: generated };
                self.ready.push_back(Event::default().comment(used.comment()));
                relayed.usage_told()
            }
            None => false,
        };
        if let Some(chunk) = self.chunks.usage(cached, generated).filter(|_| !told) {
            let event = match &self.relayed {
                Some(_) => Event::default().comment(USAGE_TOLD),
                None => Event::default(),
            };
            self.ready.push_back(with_data(event, &chunk));
        }
        if let Some((conversation, text, token_ids)) = self.answer.take() {
            conversation.answered(text, token_ids);
        }
        self.ready.push_back(Event::default().data("[DONE]"));
    }

    fn fail(&mut self, error: RequestError) {
        self.ended = true;
        self.ready.push_back(data(&ApiError::from(error).body_json()));
    }
}

fn data(chunk: &impl Serialize) -> Event {
    with_data(Event::default(), chunk)
}

fn with_data(event: Event, chunk: &impl Serialize) -> Event {
    let failed = |error: axum::Error| Event::default().data(format!("{{\"error\":{{\"message\":\"{error}\"}}}}"));
    event.json_data(chunk).unwrap_or_else(failed)
}
