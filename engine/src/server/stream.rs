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
use serde::Serialize;

use super::answer::{Account, Events, Token, merged};
use super::error::ApiError;
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
    /// Open until the stream has ended.
    span: tracing::Span,
}

/// A streamed response.
pub(super) fn respond<C: Chunks>(generations: Vec<Generation>, chunks: C, account: Account) -> Response {
    let num_left = generations.len();
    let ready = (0..num_left).filter_map(|index| chunks.first(index)).map(|chunk| data(&chunk)).collect();
    let events = merged(generations);
    let (num_cached, ended, span) = (None, false, tracing::Span::current());
    let state = Streaming { events, chunks, ready, num_left, num_cached, account, ended, span };
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
            let event = state.events.next().await;
            state.take(event);
        }
    })
}

impl<C: Chunks> Streaming<C> {
    fn take(&mut self, event: Option<(usize, EngineEvent)>) {
        let Some((index, event)) = event else {
            return self.fail(RequestError::EngineFailed("its thread has ended".into()));
        };
        match event {
            EngineEvent::Prompt { num_cached_tokens, logprobs } => {
                self.num_cached = Some(self.num_cached.map_or(num_cached_tokens, |least| least.min(num_cached_tokens)));
                self.ready.extend(self.chunks.prompt(index, &logprobs).map(|chunk| data(&chunk)));
            }
            EngineEvent::Token { text, token_id, logprob } => {
                self.account.generated += 1;
                if !text.is_empty() || self.chunks.wants_every_token() {
                    let chunk = self.chunks.tokens(index, text, &[(token_id, logprob)], None);
                    self.ready.push_back(data(&chunk));
                }
            }
            EngineEvent::Finished { reason, text, .. } => {
                self.ready.push_back(data(&self.chunks.tokens(index, text, &[], Some(reason.as_str()))));
                self.num_left -= 1;
                if self.num_left == 0 {
                    self.end();
                }
            }
            EngineEvent::Failed(error) => self.fail(error),
        }
    }

    fn end(&mut self) {
        self.ended = true;
        let (cached, generated) = (self.num_cached.unwrap_or(0), self.account.generated);
        record_usage(&self.span, self.account.prompt_tokens, generated);
        self.ready.extend(self.chunks.usage(cached, generated).map(|chunk| data(&chunk)));
        self.ready.push_back(Event::default().data("[DONE]"));
    }

    fn fail(&mut self, error: RequestError) {
        self.ended = true;
        self.ready.push_back(data(&ApiError::from(error).body_json()));
    }
}

fn data(chunk: &impl Serialize) -> Event {
    let event = Event::default().json_data(chunk);
    event.unwrap_or_else(|error| Event::default().data(format!("{{\"error\":{{\"message\":\"{error}\"}}}}")))
}
