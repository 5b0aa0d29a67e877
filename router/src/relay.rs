//! A stream on its way to the client, whichever workers it comes from.
//!
//! Made by dispatch. Events go on as they come, without the comments that tell what they deliver; where a worker fails, the
//! stream goes on at another from there. Invariants: every delivered token once; what was delivered and what is known of it
//! never differ, since an event and its comment are one; dropping the relay (the client went away) cancels the request.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use futures_util::stream;
use protocol::handover::{Delivery, HAND_OFF, Progress, Used};

use crate::Router;
use crate::asked::Asked;
use crate::dispatch::{Outcome, stream_head};
use crate::leg::{Leg, LegError};
use crate::worker::{Kind, Worker};

/// So long a stream that has begun waits for a worker to go on at.
const CONTINUE_WITHIN: Duration = Duration::from_secs(20);
/// Between two looks.
const LOOK: Duration = Duration::from_millis(50);

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
        let outcome = Outcome { began: outcome.began, tries: outcome.tries };
        let progress = vec![Progress::default(); asked.n.clamp(1, 128)];
        let ready = BytesMut::new();
        let (delivered, continued, failures, ended) = (false, false, 0, false);
        let mut relay = Self {
            router,
            asked,
            leg: Some(leg),
            progress,
            predicted,
            outcome,
            delivered,
            continued,
            failures,
            ended,
            ready,
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
        let mut head = Response::new(());
        let asked = self.asked.clone();
        let pieces = stream::unfold(self, |mut relay| async move {
            let piece = relay.next().await?;
            Some((Ok::<Bytes, std::convert::Infallible>(piece), relay))
        });
        *head.status_mut() = hyper::StatusCode::OK;
        let mut response = head.map(|()| Body::from_stream(pieces));
        stream_head(&mut response, &asked);
        response
    }

    /// The next piece for the client; `None` at the end.
    async fn next(&mut self) -> Option<Bytes> {
        while self.ready.is_empty() && !self.ended {
            if let Err(error) = self.step().await {
                self.go_on(error).await;
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
        let begun = self.progress.iter().any(|progress| !progress.token_ids.is_empty());
        let limit = begun.then_some(self.router.config.stream_timeout);
        let Some(leg) = &mut self.leg else { return Err(LegError::Broken("there is no worker".into())) };
        let Some(mut event) = leg.next_event(limit).await? else {
            return Err(LegError::Broken("it ended early".into()));
        };
        loop {
            match self.take(&event) {
                Taken::GoOn => {}
                Taken::Failed(error) => return Err(error),
                Taken::Done => {
                    self.done().await;
                    return Ok(());
                }
            }
            match self.leg.as_mut().and_then(Leg::buffered) {
                Some(next) => event = next,
                None => return Ok(()),
            }
        }
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
        if tells && rest.starts_with(b"data: {\"error\"") && is_server_error(rest) {
            return Taken::Failed(LegError::Failed(String::from_utf8_lossy(rest).trim().to_owned()));
        }
        if rest.iter().any(|byte| !matches!(byte, b'\n' | b'\r')) {
            self.ready.extend_from_slice(rest);
        }
        let is_error = rest.starts_with(b"data: {\"error\"");
        if is_error || rest.trim_ascii() == b"data: [DONE]" { Taken::Done } else { Taken::GoOn }
    }

    fn note(&mut self, comment: &str) {
        if let Some(delivery) = Delivery::parse(comment) {
            if let Some(progress) = self.progress.get_mut(delivery.index) {
                progress.note(&delivery);
            }
            if !delivery.token_ids.is_empty() {
                self.failures = 0;
            }
        } else if let (Some(used), Some(leg)) = (Used::of_comment(comment), &self.leg)
            && !self.continued
        {
            self.router.used(leg.worker(), self.predicted, &used);
        }
    }

    async fn done(&mut self) {
        self.ended = true;
        if let Some(leg) = self.leg.take() {
            leg.in_flight.answered();
            self.router.remember(&self.asked, leg.worker());
            let worker = Arc::clone(leg.worker());
            self.router.ended(&self.asked, Some(&worker), &self.outcome, "ok");
            leg.finish().await;
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
        if (begun && !tells) || self.failures > self.router.config.max_tries {
            return self.give_up(&error);
        }
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
        let until = Instant::now() + CONTINUE_WITHIN;
        let mut tried = vec![Arc::clone(&failed.name)];
        while Instant::now() < until {
            let choice = self.router.choose(&self.asked, &tried);
            let mut order = choice.order().filter(|(worker, ..)| !begun || worker.config.kind == Kind::Pagoda);
            let Some((worker, _, uncached)) = order.next() else {
                // All were tried or are away: they may come back.
                tried.clear();
                tokio::time::sleep(LOOK).await;
                continue;
            };
            self.outcome.tries += 1;
            match self.router.open(&self.asked, worker, uncached).await {
                Ok(leg) if leg.head.status() == hyper::StatusCode::OK => return Some(leg),
                Ok(leg) => self.router.failed(worker, &LegError::Status(leg.head.status())),
                Err(error) => self.router.failed(worker, &error),
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
    let Some(json) = event.strip_prefix(b"data: ") else { return false };
    let Ok(body) = serde_json::from_slice::<serde_json::Value>(json.trim_ascii()) else { return false };
    body["error"]["type"] == "server_error" && body["error"]["code"].is_null()
}
