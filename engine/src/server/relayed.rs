//! Streams to a router: what each event delivers is told in a comment before it, and a stream that begins in the middle.
//!
//! Used by `stream` for requests of the internal listener. Invariant: an event and its comment leave together, so that
//! whoever has the event knows all tokens up to it.

use axum::response::sse::Event;
use protocol::handover::{self, Delivery, Handover, Progress};
use protocol::openai::FieldError;
use serde_json::Value;
use tokio::sync::watch;

use super::Server;
use super::request::Wanted;

/// Marks a request that came in by the internal listener.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfRouter;

/// What a router put into a body.
pub(super) fn of_body(body: &Value) -> Result<Handover, FieldError> {
    let Some(field) = body.get(handover::FIELD) else { return Ok(Handover::default()) };
    serde_json::from_value(field.clone()).map_err(|error| FieldError::new(handover::FIELD, error.to_string()))
}

impl Server {
    /// A stream to a router.
    pub(super) fn relayed(&self, wanted: &Wanted, usage_told: bool) -> Relayed {
        Relayed::new(wanted.num_answers, &wanted.resume, usage_told, self.draining.subscribe())
    }
}

/// One answer's way to a router.
#[derive(Debug, Default)]
struct Relay {
    before: Progress,
    text_bytes: usize,
    /// Since the last event.
    token_ids: Vec<u32>,
}

/// All answers of one stream.
pub(super) struct Relayed {
    relays: Vec<Relay>,
    usage_told: bool,
    draining: watch::Receiver<bool>,
}

impl Relayed {
    fn new(num_answers: usize, resume: &[Progress], usage_told: bool, draining: watch::Receiver<bool>) -> Self {
        let before = |index: usize| resume.get(index).cloned().unwrap_or_default();
        let relay = |index| {
            let before = before(index);
            Relay { text_bytes: before.text_bytes, before, token_ids: Vec::new() }
        };
        Self { relays: (0..num_answers).map(relay).collect(), usage_told, draining }
    }

    /// Whether another engine has told the usage.
    pub(super) fn usage_told(&self) -> bool {
        self.usage_told
    }

    /// How far an answer was when this stream began.
    pub(super) fn before(&self, index: usize) -> &Progress {
        &self.relays[index].before
    }

    /// Notes a token that the next event delivers.
    pub(super) fn note_token(&mut self, index: usize, token_id: u32) {
        self.relays[index].token_ids.push(token_id);
    }

    /// The beginning of an event that delivers so many bytes of text.
    pub(super) fn event(&mut self, index: usize, text_bytes: usize, finished: bool) -> Event {
        let relay = &mut self.relays[index];
        relay.text_bytes += text_bytes;
        let token_ids = std::mem::take(&mut relay.token_ids);
        Event::default().comment(Delivery { index, text_bytes: relay.text_bytes, finished, token_ids }.encode())
    }

    /// Waits until this engine is to go away.
    pub(super) async fn drained(&mut self) {
        if self.draining.wait_for(|draining| *draining).await.is_err() {
            std::future::pending().await
        }
    }
}

/// What ends a stream that another engine is to continue.
pub(super) fn hand_off() -> Event {
    Event::default().comment(handover::HAND_OFF)
}
