//! What all answers share: ids, times, and collecting a whole answer from the engine's events.

use std::time::{SystemTime, UNIX_EPOCH};

use super::error::ApiError;
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

/// A complete answer.
pub(super) struct Answer {
    pub(super) text: String,
    pub(super) finish_reason: &'static str,
    pub(super) num_generated: usize,
}

/// Waits for the whole answer.
pub(super) async fn collect(mut generation: Generation) -> Result<Answer, ApiError> {
    let mut answer = String::new();
    while let Some(event) = generation.next().await {
        match event {
            EngineEvent::Token { text, .. } => answer.push_str(&text),
            EngineEvent::Finished { reason, text, num_generated } => {
                answer.push_str(&text);
                return Ok(Answer { text: answer, finish_reason: reason.as_str(), num_generated });
            }
            EngineEvent::Failed(error) => return Err(error.into()),
        }
    }
    Err(RequestError::EngineFailed("its thread has ended".into()).into())
}
