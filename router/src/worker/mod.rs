//! One engine as the router sees it: where it is, what it told, what it was given, and whether it may be asked.
//!
//! Kept by the fleet; written by its event stream (`events`) or probes (`probe`) and by dispatch. Invariant: numbers here are
//! read without waiting for the network.

pub mod breaker;
pub mod connection;
pub mod events;
pub mod probe;

use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use hyper::header::HeaderValue;
use protocol::WorkerReport;

use crate::index::Slot;
use crate::pick::View;
use breaker::{Breaker, BreakerLimits};
use connection::Upstream;

/// A worker that has told nothing for so long is suspect.
pub const STALE_AFTER: Duration = Duration::from_secs(3);
/// Requests of late: after so long one counts half.
const RECENT_HALF_LIFE_S: f64 = 30.0;
/// A worker is complained of at most so often.
const COMPLAIN_EVERY: Duration = Duration::from_secs(60);
/// How fast an answer's length and time are averaged.
const AVERAGE_SHARE: f64 = 0.1;

/// What speaks at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A Pagoda engine's internal listener.
    Pagoda,
    /// Another server of OpenAI's API. It tells nothing of what it holds; that is estimated from what was sent to it.
    OpenAi,
}

/// Where a worker is and how it is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerConfig {
    /// By which it is known, and stands on the ring.
    pub name: String,
    /// Which kind.
    pub kind: Kind,
    /// `HOST:PORT`.
    pub address: String,
    /// Models that it serves; of a Pagoda engine they are its own word.
    pub models: Vec<String>,
    /// `Authorization` of requests to it.
    pub authorization: Option<HeaderValue>,
}

/// What is known of a worker now.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Its last report; of a foreign server what its metrics say.
    pub report: Option<Arc<WorkerReport>>,
    /// When it was last heard.
    pub at: Option<Instant>,
    /// Whether its stream of events is there.
    pub connected: bool,
}

#[derive(Debug, Default)]
struct State {
    told: Told,
    breaker: Breaker,
    /// Prompt tokens that were sent there since its last report.
    tokens_since: f64,
    /// Requests of late, and when that was counted.
    recent: (f64, Option<Instant>),
    /// Average of what an answer takes.
    answer_seconds: f64,
    /// Average of tokens expected and not found.
    misprediction: f64,
    complained: Option<Instant>,
}

/// A worker.
pub struct Worker {
    /// Where it is.
    pub config: WorkerConfig,
    /// Its name, shared.
    pub name: Arc<str>,
    /// Its connections.
    pub upstream: Upstream,
    /// Its number in the index; another after each snapshot.
    slot: AtomicU16,
    /// Its number among estimates.
    pub estimated: Slot,
    num_requests: AtomicUsize,
    state: Mutex<State>,
}

impl Worker {
    /// A worker of which nothing is known yet.
    pub fn new(config: WorkerConfig, upstream: Upstream, slot: Slot, estimated: Slot) -> Self {
        let name = config.name.as_str().into();
        let (slot, num_requests) = (AtomicU16::new(slot), AtomicUsize::new(0));
        Self { config, name, upstream, slot, estimated, num_requests, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number in the index.
    pub fn slot(&self) -> Slot {
        self.slot.load(Ordering::Acquire)
    }

    /// From now on this is its number; the old one.
    pub fn set_slot(&self, slot: Slot) -> Slot {
        self.slot.swap(slot, Ordering::AcqRel)
    }

    /// What it told last.
    pub fn told(&self) -> Told {
        self.state().told.clone()
    }

    /// It told how it is.
    pub fn report(&self, report: WorkerReport) {
        let mut state = self.state();
        let is_back =
            !state.told.connected || state.told.report.as_ref().is_some_and(|before| before.epoch != report.epoch);
        state.told = Told { report: Some(Arc::new(report)), at: Some(Instant::now()), connected: true };
        state.tokens_since = 0.0;
        // A worker that was away and is back is another: this is what brings a revived one traffic at once.
        if is_back {
            state.breaker.succeed();
        }
    }

    /// It was heard of.
    pub fn heard(&self) {
        self.state().told.at = Some(Instant::now());
    }

    /// Its stream of events, or a probe, broke.
    pub fn lost(&self) {
        self.state().told.connected = false;
        self.upstream.forget();
    }

    /// Whether it was heard of late.
    pub fn is_fresh(&self) -> bool {
        self.state().is_fresh()
    }

    /// Names that it serves its model under.
    pub fn models(&self) -> Vec<String> {
        self.state().served(&self.config).to_vec()
    }

    /// A request failed there. Whether that opened its circuit.
    pub fn fail(&self, limits: &BreakerLimits) -> bool {
        self.state().breaker.fail(Instant::now(), limits)
    }

    /// Whether it tells what it holds.
    pub fn tells(&self) -> bool {
        self.config.kind == Kind::Pagoda
    }

    /// A request found so many tokens fewer than were expected. The mean of late, where it is over `most` and was not said in
    /// the last minute.
    pub fn mispredicted(&self, off: f64, most: f64) -> Option<f64> {
        let mut state = self.state();
        state.misprediction += AVERAGE_SHARE * (off - state.misprediction);
        let mean = state.misprediction;
        let is_new = state.complained.is_none_or(|at| at.elapsed() > COMPLAIN_EVERY);
        if mean.abs() <= most || !is_new {
            return None;
        }
        state.complained = Some(Instant::now());
        Some(mean)
    }

    /// Whether its circuit is closed.
    pub fn is_circuit_closed(&self) -> bool {
        self.state().breaker.is_closed(Instant::now())
    }

    /// Requests that this router has there.
    pub fn num_requests(&self) -> usize {
        self.num_requests.load(Ordering::Relaxed)
    }

    /// A request goes there with so many tokens to compute; it counts until what is given back is dropped.
    pub fn begin(self: &Arc<Self>, num_tokens: f64) -> InFlight {
        self.num_requests.fetch_add(1, Ordering::Relaxed);
        let mut state = self.state();
        state.tokens_since += num_tokens;
        state.recent = (state.recent_now() + 1.0, Some(Instant::now()));
        InFlight { worker: Arc::clone(self), began: Instant::now() }
    }

    /// What the picker sees. What it holds of the prompt, and its weight, are the fleet's to say.
    pub fn view(&self, model: &str) -> View {
        let state = self.state();
        let report = state.told.report.as_deref();
        let (load, capacity, rates) =
            report.map(|report| (report.load, report.capacity, report.rates)).unwrap_or_default();
        let own = self.num_requests();
        let used = load.num_used_blocks as f64 / capacity.num_blocks.max(1) as f64;
        let places = capacity.max_num_seqs.max(1) as f64;
        View {
            name: Arc::clone(&self.name),
            serves: state.served(&self.config).iter().any(|served| served == model),
            ready: report.is_some_and(|report| report.ready),
            draining: load.draining,
            circuit_closed: state.breaker.is_closed(Instant::now()),
            fresh: state.is_fresh(),
            max_model_len: capacity.max_model_len,
            num_requests: own.max(load.num_running + load.num_waiting),
            num_waiting: load.num_waiting,
            max_num_seqs: capacity.max_num_seqs,
            queued_tokens: load.num_uncomputed_tokens as f64 + state.tokens_since,
            prefill_tokens_per_s: rates.prefill_tokens_per_s,
            decode_step_s: rates.decode_step_s,
            bytes_per_token: rates.bytes_per_token,
            seconds_a_place: state.answer_seconds / places,
            kv_used: used,
            held_tokens: 0.0,
            held_share: 0.0,
            recent_requests: state.recent_now(),
            weight: 1,
        }
    }
}

impl State {
    fn is_fresh(&self) -> bool {
        self.told.connected && self.told.at.is_some_and(|at| at.elapsed() < STALE_AFTER)
    }

    /// By its own word, or before it has told, the configuration's.
    fn served<'a>(&'a self, config: &'a WorkerConfig) -> &'a [String] {
        self.told.report.as_ref().map_or(&config.models, |report| &report.models)
    }

    fn recent_now(&self) -> f64 {
        let age = self.recent.1.map_or(0.0, |at| at.elapsed().as_secs_f64());
        self.recent.0 * (-age / RECENT_HALF_LIFE_S).exp2()
    }
}

/// A request at a worker.
pub struct InFlight {
    worker: Arc<Worker>,
    began: Instant,
}

impl InFlight {
    /// Its worker.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// It was answered to its end.
    pub fn answered(&self) {
        let seconds = self.began.elapsed().as_secs_f64();
        let mut state = self.worker.state();
        state.breaker.succeed();
        let before = state.answer_seconds;
        state.answer_seconds = if before == 0.0 { seconds } else { before + AVERAGE_SHARE * (seconds - before) };
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.worker.num_requests.fetch_sub(1, Ordering::Relaxed);
    }
}
