//! Engine events as server-sent events: one `data:` line a chunk, `[DONE]` at the end.
//!
//! Used by chat and text completions, which differ in what a chunk looks like. A failure in mid-stream is an error event
//! and the end. Dropping the stream (the client went away) drops the generation, which cancels it.

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream};
use serde::Serialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use super::error::ApiError;
use crate::engine_loop::Generation;
use crate::event::{EngineEvent, RequestError};

/// Proxies drop a connection that is silent for long; a long prefill is.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How an endpoint writes its chunks.
pub(super) trait Chunks: Send + 'static {
    /// One chunk's JSON.
    type Chunk: Serialize;

    /// Before any token.
    fn first(&self) -> Option<Self::Chunk>;
    /// New text.
    fn text(&self, text: String) -> Self::Chunk;
    /// The end, with text that was held back.
    fn last(&self, text: String, finish_reason: &'static str) -> Self::Chunk;
    /// After the end, where asked for.
    fn usage(&self, num_generated: usize) -> Option<Self::Chunk>;
}

struct Streaming<C> {
    generation: Generation,
    chunks: C,
    ready: VecDeque<Event>,
    ended: bool,
}

/// A streamed response.
pub(super) fn respond<C: Chunks>(generation: Generation, chunks: C) -> Response {
    let mut ready = VecDeque::new();
    ready.extend(chunks.first().map(|chunk| data(&chunk)));
    let state = Streaming { generation, chunks, ready, ended: false };
    let sse = Sse::new(events(state)).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = sse.into_response();
    // nginx buffers a response unless told not to.
    response.headers_mut().insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

fn events<C: Chunks>(state: Streaming<C>) -> impl Stream<Item = Result<Event, Infallible>> {
    stream::unfold(state, |mut state| async move {
        loop {
            if let Some(event) = state.ready.pop_front() {
                return Some((Ok(event), state));
            }
            if state.ended {
                return None;
            }
            let event = state.generation.next().await;
            state.take(event);
        }
    })
}

impl<C: Chunks> Streaming<C> {
    fn take(&mut self, event: Option<EngineEvent>) {
        match event {
            Some(EngineEvent::Token { text, .. }) => {
                if !text.is_empty() {
                    self.ready.push_back(data(&self.chunks.text(text)));
                }
            }
            Some(EngineEvent::Finished { reason, text, num_generated }) => {
                self.ended = true;
                self.ready.push_back(data(&self.chunks.last(text, reason.as_str())));
                self.ready.extend(self.chunks.usage(num_generated).map(|chunk| data(&chunk)));
                self.ready.push_back(Event::default().data("[DONE]"));
            }
            Some(EngineEvent::Failed(error)) => self.fail(error),
            None => self.fail(RequestError::EngineFailed("its thread has ended".into())),
        }
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
