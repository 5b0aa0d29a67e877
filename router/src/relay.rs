//! A stream on its way to the client, whichever workers it comes from.
//!
//! Made by dispatch. Events go on as they come, without the comments that tell what they deliver; where a worker fails, the
//! stream goes on at another from there. Invariants: every delivered token once; what was delivered and what is known of it
//! never differ, since an event and its comment are one; dropping the relay (the client went away) cancels the request.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use axum::body::Body;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use protocol::handover::{Delivery, HAND_OFF, Progress, USAGE_TOLD, Used};

use crate::Router;
use crate::asked::Asked;
use crate::dispatch::{Outcome, stream_head};
use crate::leg::{self, Leg, LegError};
use crate::worker::Worker;

/// So long a stream that has begun waits for a worker to go on at.
const CONTINUE_WITHIN: Duration = Duration::from_secs(20);
/// Between two rounds of tries.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A stream.
pub(crate) struct Relay {
    router: Arc<Router>,
    asked: Asked,
    leg: Option<Leg>,
    /// By answer.
    progress: Vec<Progress>,
    /// Tokens of the prompt that the first worker was expected to hold.
    predicted: f64,
    outcome: Outcome,
    /// Whether anything went to the client.
    delivered: bool,
    /// Whether it went on elsewhere.
    continued: bool,
    /// Failures since a token came.
    failures: usize,
    ended: bool,
    /// Whether all that was delivered is known, so that it can go on elsewhere.
    resumable: bool,
    /// Since when an event is awaited that is more than a sign of life.
    waiting_since: Option<Instant>,
    /// A failure that is dealt with once the client has what came before it.
    failed: Option<LegError>,
    /// What came before the client reads.
    ready: BytesMut,
}

/// What an event asks for.
enum Taken {
    GoOn,
    Done,
    Failed(LegError),
}

impl Relay {
    /// A stream whose head has come from a worker.
    ///
    /// # Errors
    /// When it breaks before anything came.
    pub(crate) async fn begin(
        router: Arc<Router>,
        asked: Asked,
        leg: Leg,
        predicted: f64,
        outcome: &Outcome,
    ) -> Result<Self, LegError> {
        let mut relay = Self {
            router,
            progress: vec![Progress::default(); asked.n.clamp(1, 128)],
            asked,
            leg: Some(leg),
            predicted,
            outcome: *outcome,
            delivered: false,
            continued: false,
            failures: 0,
            ended: false,
            resumable: true,
            waiting_since: None,
            failed: None,
            ready: BytesMut::new(),
        };
        // Where two race, it is for the first token; else the client hears as soon as there is anything.
        match relay.router.config.hedge_after {
            None => relay.first_event().await?,
            Some(_) => relay.first_token().await?,
        }
        let first = relay.outcome.began.elapsed().as_secs_f64();
        if let Some(leg) = &relay.leg {
            relay.router.fleet.shared().metrics.ttft.with_label_values(&[&leg.worker().name]).observe(first);
        }
        Ok(relay)
    }

    /// Reads on until there is something for the client.
    async fn first_event(&mut self) -> Result<(), LegError> {
        while self.ready.is_empty() && !self.ended {
            self.step().await?;
        }
        Ok(())
    }

    /// Reads on until there is a token.
    async fn first_token(&mut self) -> Result<(), LegError> {
        while !self.ended && self.progress.iter().all(|progress| progress.token_ids.is_empty()) {
            self.step().await?;
            if self.leg.as_ref().is_some_and(|leg| !leg.tells()) && !self.ready.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// As a response.
    pub(crate) fn into_response(self) -> Response {
        let request_id = self.asked.request_id.clone();
        let pieces = stream::unfold(self, |mut relay| async move {
            let piece = relay.next().await?;
            Some((Ok::<Bytes, std::convert::Infallible>(piece), relay))
        });
        let mut response = Response::new(Body::from_stream(pieces));
        stream_head(&mut response, request_id);
        response
    }

    /// The next piece for the client; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        while self.ready.is_empty() && !self.ended {
            match self.failed.take() {
                Some(error) => self.go_on(error).await,
                None => self.failed = self.step().await.err(),
            }
        }
        if self.ready.is_empty() {
            return None;
        }
        self.delivered = true;
        Some(self.ready.split().freeze())
    }

    /// Takes in the next event, and those that came with it.
    async fn step(&mut self) -> Result<(), LegError> {
        let config = &self.router.config;
        let limit = if self.has_tokens() { config.stream_timeout } else { config.answer_timeout };
        let until = *self.waiting_since.get_or_insert_with(Instant::now) + limit;
        let Some(leg) = &mut self.leg else { return Err(LegError::Broken("there is no worker".into())) };
        let Some(mut event) = leg.next_event(until).await? else {
            // Servers that are not ours may end without saying so.
            if !leg.tells() && self.delivered {
                self.done();
                return Ok(());
            }
            return Err(LegError::Broken("it ended early".into()));
        };
        loop {
            match self.take(&event) {
                Taken::GoOn => {}
                Taken::Failed(error) => return Err(error),
                Taken::Done => {
                    self.done();
                    return Ok(());
                }
            }
            match self.leg.as_mut().and_then(Leg::buffered) {
                Some(next) => event = next,
                None => return Ok(()),
            }
        }
    }

    /// Whether any token came.
    fn has_tokens(&self) -> bool {
        let tells = self.leg.as_ref().is_some_and(Leg::tells);
        if tells { self.progress.iter().any(|progress| !progress.token_ids.is_empty()) } else { self.delivered }
    }

    /// Takes in one event: notes what it delivers, and passes the rest on.
    fn take(&mut self, event: &Bytes) -> Taken {
        let tells = self.leg.as_ref().is_some_and(Leg::tells);
        let mut rest: &[u8] = event;
        if tells && let Some(comment) = event.strip_prefix(b": pagoda") {
            let end = comment.iter().position(|&byte| byte == b'\n').unwrap_or(comment.len());
            let (comment, after) = comment.split_at(end);
            rest = after.get(1..).unwrap_or_default();
            let comment = format!("pagoda{}", String::from_utf8_lossy(comment));
            if comment == HAND_OFF {
                return Taken::Failed(LegError::HandOff);
            }
            self.note(&comment);
        }
        let data = rest.strip_prefix(b"data:").map(|data| data.trim_ascii());
        let is_error = data.is_some_and(|data| data.starts_with(b"{\"error\""));
        let nothing_yet = !self.delivered && self.ready.is_empty();
        if is_error && ((tells && is_server_error(data.unwrap_or_default())) || (!tells && nothing_yet)) {
            return Taken::Failed(LegError::Failed(String::from_utf8_lossy(rest).trim().to_owned()));
        }
        if rest.iter().any(|byte| !matches!(byte, b'\n' | b'\r')) {
            self.ready.extend_from_slice(rest);
        }
        if data.is_some() {
            self.waiting_since = None;
        }
        if is_error || data == Some(b"[DONE]") { Taken::Done } else { Taken::GoOn }
    }

    fn note(&mut self, comment: &str) {
        if let Some(delivery) = Delivery::parse(comment) {
            if !delivery.token_ids.is_empty() {
                self.failures = 0;
            }
            match self.progress.get_mut(delivery.index) {
                Some(progress) => progress.note(&delivery),
                None => self.resumable = false,
            }
        } else if let Some(used) = Used::of_comment(comment) {
            if let Some(leg) = self.leg.as_ref().filter(|_| !self.continued) {
                self.router.used(leg.worker(), self.predicted, &used);
            }
        } else if comment == USAGE_TOLD {
            self.asked.handover.usage_told = true;
        } else {
            // It delivers something, and nobody knows what.
            self.resumable = false;
        }
    }

    fn done(&mut self) {
        self.ended = true;
        if let Some(leg) = self.leg.take() {
            leg.in_flight.answered();
            self.router.remember(&self.asked, leg.worker());
            let worker = Arc::clone(leg.worker());
            self.router.ended(&self.asked, Some(&worker), &self.outcome, "ok");
            // The client does not wait for the end of what it has.
            tokio::spawn(leg.finish());
        }
    }

    /// The worker failed: the stream goes on at another, or ends with an error that says so.
    async fn go_on(&mut self, error: LegError) {
        let Some(leg) = self.leg.take() else { return self.give_up(&error) };
        let worker = Arc::clone(leg.worker());
        let tells = leg.tells();
        drop(leg);
        self.router.failed(&worker, &error);
        tracing::info!(
            worker = %worker.name, %error, request_id = self.asked.request_id.to_str().unwrap_or_default(),
            "a stream's worker failed"
        );
        self.failures += 1;
        let begun = self.delivered || !self.ready.is_empty();
        if (begun && !(tells && self.resumable)) || self.failures > self.router.config.max_tries {
            return self.give_up(&error);
        }
        self.waiting_since = None;
        let reason = error.reason();
        match self.next_leg(&worker, begun).await {
            Some(leg) => {
                self.router.fleet.shared().metrics.continuations.with_label_values(&[reason]).inc();
                self.continued = true;
                self.leg = Some(leg);
            }
            None => self.give_up(&error),
        }
    }

    /// The rest of the stream at another worker; at the same one where there is no other.
    async fn next_leg(&mut self, failed: &Arc<Worker>, begun: bool) -> Option<Leg> {
        self.asked.handover.resume = if begun { self.progress.clone() } else { Vec::new() };
        self.asked.handover.elapsed_ms = self.outcome.began.elapsed().as_millis() as u64;
        let until = Instant::now() + CONTINUE_WITHIN;
        let (mut tried, mut pause) = (vec![Arc::clone(&failed.name)], FIRST_PAUSE);
        while Instant::now() < until {
            let choice = self.router.choose(&self.asked, &tried);
            let mut order = choice.order().filter(|(worker, ..)| !begun || worker.tells());
            let next = order.next().filter(|_| tried.len() <= self.router.config.max_tries);
            let Some((worker, _, uncached)) = next else {
                // Those that were tried are busy or away: they may come back.
                tried.clear();
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                continue;
            };
            self.outcome.tries += 1;
            let opened = tokio::time::timeout_at(until, self.router.open(&self.asked, worker, uncached)).await;
            let status = match opened {
                Ok(Ok(leg)) if leg.is_stream() => return Some(leg),
                Ok(Ok(leg)) => leg.head.status(),
                Ok(Err(error)) => {
                    self.router.failed(worker, &error);
                    tried.push(Arc::clone(&worker.name));
                    continue;
                }
                Err(_) => return None,
            };
            self.router.failed(worker, &LegError::Status(status));
            if leg::is_final(status) {
                return None;
            }
            tried.push(Arc::clone(&worker.name));
        }
        None
    }

    fn give_up(&mut self, error: &LegError) {
        self.ended = true;
        self.router.fleet.shared().metrics.broken.inc();
        self.router.ended(&self.asked, None, &self.outcome, "broken");
        let message = format!("the stream could not go on: {error}");
        let body = serde_json::json!({ "error": { "message": message, "type": "server_error", "param": null, "code": "stream_broken" } });
        self.ready.extend_from_slice(format!("data: {body}\n\n").as_bytes());
    }
}

/// Whether an error event says that the engine failed, and not that the request did.
fn is_server_error(event: &[u8]) -> bool {
    let Ok(body) = serde_json::from_slice::<serde_json::Value>(event) else { return false };
    body["error"]["type"] == "server_error" && body["error"]["code"].is_null()
}
