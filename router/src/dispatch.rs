//! From a request to the worker that answers it: choose, try, and where that fails, try the next.
//!
//! Called by the server. Invariants: before anything was delivered a failure costs the client nothing but time; tries are
//! bounded; a worker's own refusal of a request (4xx) is the answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::time::Instant;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderName, RETRY_AFTER};

use crate::Router;
use crate::asked::{Asked, REQUEST_ID};
use crate::error::RouteError;
use crate::leg::{self, Leg, LegError};
use crate::pick::{Ask, Decision, Explanation, View, pick};
use crate::relay::Relay;
use crate::worker::Worker;

/// Workers of the ring's walk that are looked at.
const WALK_DEPTH: usize = 16;
/// The header that asks for, and has, an explanation.
pub const EXPLAIN: &str = "x-pagoda-explain";

/// A choice, and what it was made of.
pub(crate) struct Choice {
    pub(crate) workers: Arc<Vec<Arc<Worker>>>,
    views: Vec<View>,
    ask: Ask,
    pub(crate) decision: Decision,
}

impl Choice {
    /// The workers to be tried, best first, with the tokens of the prompt that each is expected to hold and those that it will
    /// have to compute.
    pub(crate) fn order(&self) -> impl Iterator<Item = (&Arc<Worker>, f64, f64)> {
        self.decision.order.iter().map(|scored| {
            let held = self.views[scored.place].held_tokens;
            (&self.workers[scored.place], held, (self.ask.num_tokens - held).max(0.0))
        })
    }

    /// Why the winner won.
    fn reason(&self) -> &'static str {
        let Some(winner) = self.decision.order.first() else { return "none" };
        match () {
            () if self.views[winner.place].held_tokens > 0.0 => "prefix",
            () if self.ask.session == Some(winner.place) => "session",
            () if self.ask.walk.first() == Some(&winner.place) => "ring",
            () => "load",
        }
    }

    /// In words.
    pub(crate) fn explain(&self, router: &Router) -> Explanation {
        self.decision.explain(&self.ask, &self.views, &router.config.weights)
    }

    /// Why there is nobody.
    fn error(&self, asked: &Asked) -> RouteError {
        let served: std::collections::BTreeSet<String> =
            self.workers.iter().flat_map(|worker| worker.models()).collect();
        if !served.is_empty() && !served.contains(&asked.model) {
            let served = served.into_iter().collect::<Vec<_>>().join(", ");
            return RouteError::UnknownModel { asked: asked.model.clone(), served };
        }
        let why = |&(place, refusal): &(usize, _)| {
            let refusal = serde_json::to_value(refusal).unwrap_or_default();
            format!("{} is {}", self.views[place].name, refusal.as_str().unwrap_or_default())
        };
        let why: Vec<String> = self.decision.refused.iter().take(8).map(why).collect();
        let why = if why.is_empty() { "there are none".into() } else { why.join(", ") };
        RouteError::NoWorker { model: asked.model.clone(), why }
    }
}

/// A worker, and why it failed.
type Failed = (Arc<Worker>, LegError);

/// Hedges that are always allowed.
const MIN_HEDGES: usize = 8;

/// A request that is asked twice, counted while it is.
struct Hedge<'a>(&'a AtomicUsize);

impl Drop for Hedge<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer that has begun.
enum Begun {
    Stream(Box<Relay>),
    /// One that comes whole, or a refusal.
    Whole(Box<Leg>),
}

/// How a request went, for log and metrics.
#[derive(Clone, Copy)]
pub(crate) struct Outcome {
    pub(crate) began: Instant,
    pub(crate) tries: usize,
}

impl Router {
    /// Chooses among the workers that are not `tried`.
    pub(crate) fn choose(&self, asked: &Asked, tried: &[Arc<str>]) -> Choice {
        let began = Instant::now();
        let workers = self.fleet.workers();
        let (mut views, num_tokens) = self.fleet.views(&workers, &asked.model, &asked.chain);
        views.iter_mut().filter(|view| tried.contains(&view.name)).for_each(|view| view.circuit_closed = false);
        let walk = self.fleet.walk(&workers, &views, asked.ring_key, WALK_DEPTH);
        let session = asked.session.as_deref().and_then(|session| self.sessions.get(session));
        let session = session.and_then(|name| views.iter().position(|view| view.name == name));
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let ask = Ask { num_tokens, max_tokens: asked.max_tokens, walk, session, seed: turn ^ asked.ring_key, turn };
        let decision = pick(&ask, &views, &self.config.weights);
        self.fleet.shared().metrics.pick.observe(began.elapsed().as_secs_f64());
        Choice { workers, views, ask, decision }
    }

    /// Answers a request.
    pub(crate) async fn answer(self: &Arc<Self>, asked: Asked, explains: bool) -> Response {
        let outcome = Outcome { began: Instant::now(), tries: 0 };
        let choice = self.choose(&asked, &[]);
        let explanation = explains.then(|| serde_json::to_string(&choice.explain(self)).ok()).flatten();
        let mut response = self.routed(asked, choice, outcome).await;
        if let Some(value) = explanation.and_then(|text| HeaderValue::try_from(text).ok()) {
            response.headers_mut().insert(HeaderName::from_static(EXPLAIN), value);
        }
        response
    }

    async fn routed(self: &Arc<Self>, asked: Asked, mut choice: Choice, mut outcome: Outcome) -> Response {
        let metrics = &self.fleet.shared().metrics;
        metrics.decisions.with_label_values(&[choice.reason()]).inc();
        asked.span.record("reason", choice.reason());
        let mut tried: Vec<Arc<str>> = Vec::new();
        let mut last: Option<(Arc<str>, LegError)> = None;
        while outcome.tries < self.config.max_tries {
            if let Some((_, error)) = &last {
                metrics.retries.with_label_values(&[error.reason()]).inc();
                choice = self.choose(&asked, &tried);
            }
            let Some((worker, held, uncached)) = choice.order().next() else { break };
            let worker = Arc::clone(worker);
            outcome.tries += 1;
            match self.try_at(&asked, &worker, (held, uncached), &outcome, &mut tried).await {
                Ok(response) => return response,
                Err((worker, error)) => {
                    self.failed(&worker, &error);
                    tried.push(Arc::clone(&worker.name));
                    last = Some((Arc::clone(&worker.name), error));
                }
            }
        }
        let error = match last {
            // All are busy: that is what the client hears, and when to come again.
            Some((_, LegError::Status(status))) if leg::is_busy(status) => {
                RouteError::NoWorker { model: asked.model.clone(), why: format!("{} are busy", tried.join(", ")) }
            }
            Some((worker, error)) => {
                RouteError::AllFailed { tries: outcome.tries, worker: worker.to_string(), error: error.to_string() }
            }
            None => choice.error(&asked),
        };
        self.ended(&asked, None, &outcome, "refused");
        let mut response = error.into_response();
        response.headers_mut().insert(HeaderName::from_static(REQUEST_ID), asked.request_id.clone());
        response
    }

    /// One try: the answer, streamed or whole, or why it failed before anything was delivered.
    async fn try_at(
        self: &Arc<Self>,
        asked: &Asked,
        worker: &Arc<Worker>,
        (held, uncached): (f64, f64),
        outcome: &Outcome,
        tried: &mut Vec<Arc<str>>,
    ) -> Result<Response, Failed> {
        let leg = match self.begin(asked, worker, (held, uncached), outcome, tried).await? {
            Begun::Stream(relay) => return Ok(relay.into_response()),
            Begun::Whole(leg) => leg,
        };
        let (status, worker) = (leg.head.status(), &Arc::clone(leg.worker()));
        let used = leg.used();
        let headers = leg.head.headers().clone();
        let (body, in_flight) = leg.whole().await.map_err(|error| (Arc::clone(worker), error))?;
        if status.is_success() {
            in_flight.answered();
        }
        if let Some(used) = used {
            self.used(worker, held, &used);
        }
        self.remember(asked, worker);
        let first = outcome.began.elapsed().as_secs_f64();
        self.fleet.shared().metrics.ttft.with_label_values(&[&worker.name]).observe(first);
        self.ended(asked, Some(worker), outcome, if status.is_success() { "ok" } else { "client-error" });
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = status;
        for name in [CONTENT_TYPE, RETRY_AFTER] {
            if let Some(value) = headers.get(&name) {
                response.headers_mut().insert(name, value.clone());
            }
        }
        response.headers_mut().insert(HeaderName::from_static(REQUEST_ID), asked.request_id.clone());
        Ok(response)
    }

    /// A try, or two: with `hedge_after` a second worker is asked when the first has brought no token by then, and the first
    /// that does has it.
    async fn begin(
        self: &Arc<Self>,
        asked: &Asked,
        worker: &Arc<Worker>,
        tokens: (f64, f64),
        outcome: &Outcome,
        tried: &mut Vec<Arc<str>>,
    ) -> Result<Begun, Failed> {
        let first = self.begin_at(asked, worker, tokens, outcome);
        let Some(after) = self.config.hedge_after.filter(|_| asked.stream) else { return first.await };
        let mut first = std::pin::pin!(first);
        if let Ok(begun) = tokio::time::timeout(after, &mut first).await {
            return begun;
        }
        tried.push(Arc::clone(&worker.name));
        let choice = self.choose(asked, tried);
        let next = choice.order().next();
        let (Some((rival, held, uncached)), Some(_hedge)) = (next, self.hedge()) else { return first.await };
        tried.push(Arc::clone(&rival.name));
        let hedges = &self.fleet.shared().metrics.hedges;
        hedges.with_label_values(&["asked"]).inc();
        let mut second = std::pin::pin!(self.begin_at(asked, rival, (held, uncached), outcome));
        // Who fails leaves it to the other.
        tokio::select! {
            begun = &mut first => match begun {
                Ok(begun) => Ok(begun),
                Err((worker, error)) => {
                    self.failed(&worker, &error);
                    second.await
                }
            },
            begun = &mut second => match begun {
                Ok(begun) => {
                    hedges.with_label_values(&["won"]).inc();
                    Ok(begun)
                }
                Err((worker, error)) => {
                    self.failed(&worker, &error);
                    first.await
                }
            },
        }
    }

    /// Leave to ask twice: where all are slow, asking twice makes it worse.
    fn hedge(&self) -> Option<Hedge<'_>> {
        let in_flight: usize = self.fleet.workers().iter().map(|worker| worker.num_requests()).sum();
        let before = self.num_hedges.fetch_add(1, Ordering::Relaxed);
        let hedge = Hedge(&self.num_hedges);
        (before < MIN_HEDGES.max(in_flight / 20)).then_some(hedge)
    }

    async fn begin_at(
        self: &Arc<Self>,
        asked: &Asked,
        worker: &Arc<Worker>,
        (held, uncached): (f64, f64),
        outcome: &Outcome,
    ) -> Result<Begun, Failed> {
        let failed = |error| (Arc::clone(worker), error);
        let leg = self.open(asked, worker, uncached).await.map_err(failed)?;
        let status = leg.head.status();
        if asked.stream && leg.is_stream() {
            let relay = Relay::begin(Arc::clone(self), asked.clone(), leg, held, outcome).await;
            return Ok(Begun::Stream(Box::new(relay.map_err(failed)?)));
        }
        if status == StatusCode::OK || leg::is_final(status) {
            return Ok(Begun::Whole(Box::new(leg)));
        }
        Err(failed(LegError::Status(status)))
    }

    /// Sends a request to a worker, and notes that it will come to hold the prompt.
    pub(crate) async fn open(&self, asked: &Asked, worker: &Arc<Worker>, uncached: f64) -> Result<Leg, LegError> {
        let shared = self.fleet.shared();
        shared.metrics.sent.with_label_values(&[&worker.name]).inc();
        if asked.endpoint.generates() {
            if worker.tells() {
                shared.recent.sent(worker.estimated, &asked.chain);
            } else {
                let num_tokens = asked.chain.num_bytes() as f64 / 4.0;
                shared.estimates.sent(worker.estimated, asked.chain.chunks(), num_tokens);
            }
        }
        // A whole answer takes as long as it takes.
        Leg::open(asked, worker, uncached, asked.stream.then_some(self.config.answer_timeout)).await
    }

    /// A try failed.
    pub(crate) fn failed(&self, worker: &Worker, error: &LegError) {
        tracing::debug!(worker = %worker.name, %error, "a try failed");
        if error.is_fault() && worker.fail(&self.config.breaker) {
            tracing::warn!(worker = %worker.name, %error, "a worker fails: it is not asked for a while");
            self.fleet.shared().metrics.opened.with_label_values(&[&worker.name]).inc();
        }
    }

    /// An answer told what it used.
    pub(crate) fn used(&self, worker: &Worker, predicted: f64, used: &protocol::handover::Used) {
        let metrics = &self.fleet.shared().metrics;
        let labels = &[&*worker.name];
        metrics.predicted_tokens.with_label_values(labels).inc_by(predicted as u64);
        metrics.hit_tokens.with_label_values(labels).inc_by(used.cached_tokens as u64);
        metrics.prompt_tokens.with_label_values(labels).inc_by(used.prompt_tokens as u64);
        let off = predicted - used.cached_tokens as f64;
        if let Some(mean) = worker.mispredicted(off, self.config.max_misprediction) {
            tracing::warn!(worker = %worker.name, tokens = mean, "a worker holds other prompts than it is expected to");
        }
    }

    /// A session is at a worker now.
    pub(crate) fn remember(&self, asked: &Asked, worker: &Worker) {
        if let Some(session) = &asked.session {
            self.sessions.set(session, &worker.name);
        }
    }

    /// A request is over.
    pub(crate) fn ended(&self, asked: &Asked, worker: Option<&Worker>, outcome: &Outcome, how: &str) {
        // Names that clients make up are no labels.
        let model = if worker.is_some() { asked.model.as_str() } else { "" };
        self.fleet.shared().metrics.requests.with_label_values(&[model, how]).inc();
        asked.span.record("worker", worker.map_or("", |worker| &worker.name));
        asked.span.record("tries", outcome.tries).record("how", how);
        if self.config.access_log {
            tracing::info!(
                target: "pagoda::access",
                request_id = asked.request_id.to_str().unwrap_or_default(),
                endpoint = asked.endpoint.path(),
                tenant = &*asked.tenant,
                model,
                worker = worker.map_or("", |worker| &worker.name),
                bytes = asked.body.len(),
                tries = outcome.tries,
                ms = outcome.began.elapsed().as_millis() as u64,
                how,
                "answered"
            );
        }
    }
}

/// The head of a stream.
pub(crate) fn stream_head(response: &mut Response, request_id: HeaderValue) {
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx buffers a response unless told not to.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    headers.insert(HeaderName::from_static(REQUEST_ID), request_id);
    headers.remove(header::CONTENT_LENGTH);
}
