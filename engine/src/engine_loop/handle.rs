//! The door of the engine: checks a request, bounds how many are inside, and hands back where its events come.
//!
//! Held by the HTTP edge and the terminal.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use protocol::ModelFingerprint;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::tiers::Command;
use super::{EngineState, EngineStats};
use crate::announcer::{Announcement, Subscription};
use crate::event::{EngineEvent, RequestError};
use crate::kv::BLOCK_SIZE;
use crate::metrics::EngineMetrics;
use crate::offload::PoolStore;
use crate::sampling_defaults::SamplingDefaults;
use crate::sequence::{EngineRequest, RequestId};

/// An engine's sizes, fixed at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Longest sequence.
    pub max_model_len: usize,
    /// KV blocks.
    pub num_blocks: usize,
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Requests that may wait.
    pub max_queue: usize,
    /// Tokens of the vocabulary.
    pub vocab_size: usize,
}

pub(super) struct Submission {
    pub(super) id: RequestId,
    pub(super) request: EngineRequest,
    pub(super) events: mpsc::Sender<EngineEvent>,
    pub(super) admitted: Admitted,
    pub(super) arrived: Instant,
    pub(super) deadline: Option<Deadline>,
}

/// When a request fails, and the time that it was given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline {
    pub(super) at: Instant,
    timeout: Duration,
}

impl Deadline {
    pub(super) fn error(self) -> RequestError {
        RequestError::DeadlineExceeded { seconds: self.timeout.as_secs_f64() }
    }
}

/// One request's place in the engine; given back when dropped.
pub(super) struct Admitted(Arc<AtomicUsize>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Cheap to clone; the engine ends when all are gone.
#[derive(Clone)]
pub struct EngineHandle {
    pub(super) submissions: mpsc::Sender<Submission>,
    pub(super) state: watch::Receiver<EngineState>,
    pub(super) stats: watch::Receiver<EngineStats>,
    pub(super) metrics: Arc<EngineMetrics>,
    pub(super) next_id: Arc<AtomicU64>,
    pub(super) in_engine: Arc<AtomicUsize>,
    pub(super) shape: Arc<Shape>,
    pub(super) sampling_defaults: SamplingDefaults,
    pub(super) fingerprint: Arc<OnceLock<ModelFingerprint>>,
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) kv_store: Arc<PoolStore>,
}

/// A request under way. Dropping it cancels the request.
#[derive(Debug)]
pub struct Generation {
    events: mpsc::Receiver<EngineEvent>,
    /// The engine keeps it too; here it holds even where a step never ends.
    deadline: Option<Deadline>,
}

impl Generation {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<EngineEvent> {
        let Some(deadline) = self.deadline else { return self.events.recv().await };
        match tokio::time::timeout_at(deadline.at, self.events.recv()).await {
            Ok(event) => event,
            Err(_) => {
                // The engine drops a request whose reader is gone.
                self.events.close();
                while self.events.try_recv().is_ok() {}
                Some(EngineEvent::Failed(deadline.error()))
            }
        }
    }

    /// The next event, blocking this thread: for the terminal.
    pub fn blocking_next(&mut self) -> Option<EngineEvent> {
        self.events.blocking_recv()
    }
}

impl EngineHandle {
    /// Sizes.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// How tokens are chosen where a request does not say.
    pub fn sampling_defaults(&self) -> SamplingDefaults {
        self.sampling_defaults
    }

    /// Longest sequence.
    pub fn max_model_len(&self) -> usize {
        self.shape.max_model_len
    }

    /// Where the engine stands.
    pub fn state(&self) -> EngineState {
        self.state.borrow().clone()
    }

    /// Follows the engine's state.
    pub fn watch(&self) -> watch::Receiver<EngineState> {
        self.state.clone()
    }

    /// The engine's numbers after its last step.
    pub fn stats(&self) -> EngineStats {
        *self.stats.borrow()
    }

    /// What is counted for Prometheus.
    pub fn metrics(&self) -> &EngineMetrics {
        &self.metrics
    }

    /// Names the model's KV state; `None` until loaded.
    pub fn fingerprint(&self) -> Option<ModelFingerprint> {
        self.fingerprint.get().copied()
    }

    /// The blocks of the pool and of the tiers below it, for other processes.
    pub fn kv_store(&self) -> Arc<PoolStore> {
        Arc::clone(&self.kv_store)
    }

    /// Puts the blocks that are nowhere else where they outlive this process, the most valuable first. To be called when no
    /// request runs; whoever drops it leaves the rest.
    pub async fn drain_blocks(&self) {
        if !matches!(self.state(), EngineState::Ready(_)) {
            return;
        }
        let (reply, drained) = oneshot::channel();
        if self.commands.send(Command::Drain { reply }).await.is_ok() {
            // An engine that ended holds nothing to put.
            drop(drained.await);
        }
    }

    /// What is held of prompt chains, and every change from now on; `None` where the engine has ended.
    pub(crate) async fn subscribe(&self) -> Option<Subscription> {
        let (reply, subscription) = oneshot::channel();
        self.commands.send(Command::Subscribe { reply }).await.ok()?;
        subscription.await.ok()
    }

    /// Tells routers of chunks, as far as their blocks are held.
    pub(crate) async fn announce(&self, announcements: Vec<Announcement>) {
        // An engine that has ended holds nothing.
        drop(self.commands.send(Command::Announce(announcements)).await);
    }

    /// Requests inside, waiting or running.
    pub fn num_in_engine(&self) -> usize {
        self.in_engine.load(Ordering::Relaxed)
    }

    /// Checks a request and hands it to the engine.
    ///
    /// # Errors
    /// When it can never run, too many wait, or the engine does not run.
    pub fn generate(&self, request: EngineRequest) -> Result<Generation, RequestError> {
        let mut all = self.generate_all(&request, 1, |_, _| {})?;
        all.pop().ok_or(RequestError::EmptyPrompt)
    }

    /// Checks a request and hands as many answers of it to the engine as are wanted, or none; `vary` sets what is another in
    /// the answer of this index.
    ///
    /// # Errors
    /// When it can never run, too many wait, or the engine does not run.
    pub fn generate_all(
        &self,
        request: &EngineRequest,
        wanted: usize,
        vary: impl Fn(usize, &mut EngineRequest),
    ) -> Result<Vec<Generation>, RequestError> {
        match self.state() {
            EngineState::Ready(_) => {}
            EngineState::Loading(..) => return Err(RequestError::Loading),
            EngineState::LoadFailed(reason) | EngineState::Failed(reason) => {
                return Err(RequestError::EngineFailed(reason));
            }
        }
        if self.stats.borrow().refuses {
            return Err(RequestError::Refused);
        }
        let limit = self.shape.max_queue + self.shape.max_num_seqs;
        if wanted > limit {
            return Err(RequestError::TooManyAnswers { wanted, limit });
        }
        let varied = |index| {
            let mut request = request.clone();
            vary(index, &mut request);
            request
        };
        let requests: Vec<EngineRequest> = (0..wanted).map(varied).collect();
        requests.iter().try_for_each(|request| self.check(request))?;
        let in_engine = self.in_engine.fetch_add(wanted, Ordering::Relaxed);
        let admitted: Vec<Admitted> = (0..wanted).map(|_| Admitted(Arc::clone(&self.in_engine))).collect();
        if in_engine + wanted > limit {
            return Err(RequestError::QueueFull { in_engine, wanted, limit });
        }
        let arrived = Instant::now();
        let submit = |(request, admitted): (EngineRequest, Admitted)| {
            let (sender, events) = mpsc::channel(request.params.max_tokens + 4);
            let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
            // A time that no clock can tell is no deadline.
            let at = |timeout| Some(Deadline { at: arrived.checked_add(timeout)?, timeout });
            let deadline = request.timeout.and_then(at);
            let submission = Submission { id, request, events: sender, admitted, arrived, deadline };
            // The channel has a place for each that was admitted, so it is full only where its other end is gone.
            let gone = |_| RequestError::EngineFailed("its thread has ended".into());
            self.submissions.try_send(submission).map_err(gone)?;
            Ok(Generation { events, deadline })
        };
        requests.into_iter().zip(admitted).map(submit).collect()
    }

    fn check(&self, request: &EngineRequest) -> Result<(), RequestError> {
        let EngineRequest { prompt, params, generated, .. } = request;
        let Shape { max_model_len, num_blocks, vocab_size, .. } = *self.shape;
        let (prompt_len, max_tokens) = (prompt.len(), params.max_tokens);
        if prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        let len = prompt_len.saturating_add(max_tokens);
        if len > max_model_len {
            return Err(RequestError::TooLong { prompt: prompt_len, max_tokens, max_model_len });
        }
        let capacity = num_blocks * BLOCK_SIZE;
        if len > capacity {
            return Err(RequestError::NeverFits { prompt: prompt_len, max_tokens, capacity });
        }
        let biased: Vec<u32> = params.logit_bias.iter().map(|(token, _)| *token).collect();
        let all = [
            ("prompt", &prompt[..]),
            ("logit_bias", &biased[..]),
            ("stop_token_ids", &params.stop_token_ids[..]),
            ("generated", &generated[..]),
        ];
        for (param, ids) in all {
            if let Some(&id) = ids.iter().find(|&&id| id as usize >= vocab_size) {
                return Err(RequestError::UnknownToken { param, id, vocab_size });
            }
        }
        Ok(())
    }
}
