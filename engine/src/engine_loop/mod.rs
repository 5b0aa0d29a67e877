//! The thread that owns an engine, and the handle that others reach it by.
//!
//! The HTTP edge holds [`EngineHandle`]s; the thread loads the model, then steps while there is work. Invariants: the
//! loop never waits for a reader (a request's channel holds all it can ever send); a request whose reader is gone is
//! dropped before the next step, so its blocks are free within one; when the device fails every request hears of it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use tokio::sync::{mpsc, watch};

use crate::config::EngineConfig;
use crate::engine::Engine;
use crate::error::LoadError;
use crate::event::{EngineEvent, RequestError};
use crate::gguf::GgufFile;
use crate::kv::{BLOCK_SIZE, BlockManager};
use crate::model_runner::{self, Sizes};
use crate::sampling_params::SamplingParams;
use crate::scheduler::{Scheduler, SchedulerLimits};
use crate::sequence::RequestId;
use crate::tokenizer::Tokenizer;

/// Where the engine stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Weights are on their way: (tensors loaded, tensors in all).
    Loading(usize, usize),
    /// Serving, on this device.
    Ready(String),
    /// Could not start.
    LoadFailed(String),
    /// Ran, and will not run again.
    Failed(String),
}

/// Numbers of the running engine, written by its thread.
#[derive(Debug, Default)]
pub struct EngineStats {
    /// Sequences that run.
    pub num_running: AtomicUsize,
    /// Sequences that wait.
    pub num_waiting: AtomicUsize,
    /// KV blocks that sequences hold.
    pub num_used_blocks: AtomicUsize,
    /// Steps since the start.
    pub num_steps: AtomicU64,
}

struct Submission {
    id: RequestId,
    prompt: Vec<u32>,
    params: SamplingParams,
    reader: Reader,
}

/// Where a request's events go. While it exists, the request counts as in the engine.
struct Reader {
    events: mpsc::Sender<EngineEvent>,
    _admitted: Admitted,
}

/// One request's place in the engine; given back when dropped.
struct Admitted(Arc<AtomicUsize>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Cheap to clone; the engine ends when all are gone.
#[derive(Clone)]
pub struct EngineHandle {
    submissions: mpsc::Sender<Submission>,
    state: watch::Receiver<EngineState>,
    stats: Arc<EngineStats>,
    next_id: Arc<AtomicU64>,
    in_engine: Arc<AtomicUsize>,
    max_queue: usize,
    max_num_seqs: usize,
    max_model_len: usize,
    vocab_size: usize,
}

/// A request under way. Dropping it cancels the request.
pub struct Generation {
    events: mpsc::Receiver<EngineEvent>,
}

impl Generation {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<EngineEvent> {
        self.events.recv().await
    }

    /// The next event, blocking this thread: for the terminal.
    pub fn blocking_next(&mut self) -> Option<EngineEvent> {
        self.events.blocking_recv()
    }
}

/// Reads the file's header and starts the engine's thread, which loads the model.
///
/// # Errors
/// When the settings do not fit the model, or the thread cannot be started.
pub fn spawn(config: EngineConfig, file: GgufFile, tokenizer: Arc<Tokenizer>) -> Result<EngineHandle, LoadError> {
    let sizes = Sizes::choose(crate::model::ModelConfig::from_gguf(&file)?, &config)?;
    let (submissions, receiver) = mpsc::channel(config.max_queue + config.max_num_seqs);
    let (state_sender, state) = watch::channel(EngineState::Loading(0, 1));
    let stats = Arc::new(EngineStats::default());
    let handle = EngineHandle {
        submissions,
        state,
        stats: Arc::clone(&stats),
        next_id: Arc::new(AtomicU64::new(0)),
        in_engine: Arc::new(AtomicUsize::new(0)),
        max_queue: config.max_queue,
        max_num_seqs: config.max_num_seqs,
        max_model_len: sizes.max_model_len,
        vocab_size: tokenizer.vocab_size(),
    };
    let thread = move || {
        let guard = FailureGuard(state_sender);
        run(&config, &file, &sizes, tokenizer, receiver, &stats, &guard.0);
    };
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(thread)
        .map_err(|error| LoadError::Setting(format!("cannot start the engine thread: {error}")))?;
    Ok(handle)
}

/// Turns a panic of the engine thread into the failed state, so that nobody waits for it.
struct FailureGuard(watch::Sender<EngineState>);

impl Drop for FailureGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.send_replace(EngineState::Failed("the engine thread panicked".into()));
        }
    }
}

fn run(
    config: &EngineConfig,
    file: &GgufFile,
    sizes: &Sizes,
    tokenizer: Arc<Tokenizer>,
    receiver: mpsc::Receiver<Submission>,
    stats: &EngineStats,
    state: &watch::Sender<EngineState>,
) {
    let mut progress = |loaded, total| {
        state.send_replace(EngineState::Loading(loaded, total));
    };
    let loaded = match model_runner::load(file, sizes, config, &mut progress) {
        Ok(loaded) => loaded,
        Err(error) => {
            state.send_replace(EngineState::LoadFailed(error.to_string()));
            return;
        }
    };
    let limits =
        SchedulerLimits { max_num_seqs: config.max_num_seqs, max_num_batched_tokens: config.max_num_batched_tokens };
    let scheduler = Scheduler::new(limits, BlockManager::new(sizes.layout.num_blocks, BLOCK_SIZE));
    let engine = Engine::new(loaded.runner, scheduler, tokenizer, sizes.max_model_len);
    state.send_replace(EngineState::Ready(loaded.device));
    EngineLoop { engine, receiver, readers: HashMap::new(), stats }.run(state);
}

struct EngineLoop<'a> {
    engine: Engine,
    receiver: mpsc::Receiver<Submission>,
    readers: HashMap<RequestId, Reader>,
    stats: &'a EngineStats,
}

impl EngineLoop<'_> {
    fn run(&mut self, state: &watch::Sender<EngineState>) {
        while self.take_submissions() {
            self.drop_abandoned();
            let stepped = self.engine.step();
            self.stats.num_steps.fetch_add(1, Ordering::Relaxed);
            // Before the events, so that who sees an answer end sees its blocks free.
            self.publish();
            match stepped {
                Ok(events) => events.into_iter().for_each(|(id, event)| self.deliver(id, event)),
                Err(error) => {
                    tracing::error!(%error, requests = self.readers.len(), "device failed");
                    state.send_replace(EngineState::Failed(error.to_string()));
                    for (_, reader) in self.readers.drain() {
                        send(&reader, EngineEvent::Failed(RequestError::EngineFailed(error.to_string())));
                    }
                    return;
                }
            }
        }
    }

    /// Takes what has been submitted, waiting only when there is nothing to do. False when all handles are gone.
    fn take_submissions(&mut self) -> bool {
        if self.engine.scheduler().is_idle() {
            match self.receiver.blocking_recv() {
                Some(submission) => self.take(submission),
                None => return false,
            }
        }
        while let Ok(submission) = self.receiver.try_recv() {
            self.take(submission);
        }
        true
    }

    fn take(&mut self, submission: Submission) {
        let Submission { id, prompt, params, reader } = submission;
        self.readers.insert(id, reader);
        self.engine.add(id, prompt, params);
    }

    fn drop_abandoned(&mut self) {
        let gone: Vec<RequestId> =
            self.readers.iter().filter(|(_, reader)| reader.events.is_closed()).map(|(id, _)| *id).collect();
        for id in gone {
            self.readers.remove(&id);
            self.engine.abort(id);
        }
    }

    fn deliver(&mut self, id: RequestId, event: EngineEvent) {
        let Some(reader) = self.readers.get(&id) else { return };
        let is_last = event.is_last();
        send(reader, event);
        if is_last {
            self.readers.remove(&id);
        }
    }

    fn publish(&self) {
        let scheduler = self.engine.scheduler();
        let blocks = scheduler.blocks();
        self.stats.num_running.store(scheduler.num_running(), Ordering::Relaxed);
        self.stats.num_waiting.store(scheduler.num_waiting(), Ordering::Relaxed);
        self.stats.num_used_blocks.store(blocks.num_blocks() - blocks.num_free_blocks(), Ordering::Relaxed);
    }
}

/// The channel has room for all that a request can send, so sending fails only when the reader is gone, which the next
/// step notices.
fn send(reader: &Reader, event: EngineEvent) {
    drop(reader.events.try_send(event));
}

impl EngineHandle {
    /// Longest sequence.
    pub fn max_model_len(&self) -> usize {
        self.max_model_len
    }

    /// Where the engine stands.
    pub fn state(&self) -> EngineState {
        self.state.borrow().clone()
    }

    /// Follows the engine's state.
    pub fn watch(&self) -> watch::Receiver<EngineState> {
        self.state.clone()
    }

    /// The engine's numbers.
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Checks a request and hands it to the engine.
    ///
    /// # Errors
    /// When it can never run, too many wait, or the engine does not run.
    pub fn generate(&self, prompt: Vec<u32>, params: SamplingParams) -> Result<Generation, RequestError> {
        match self.state() {
            EngineState::Ready(_) => {}
            EngineState::Loading(..) => return Err(RequestError::Loading),
            EngineState::LoadFailed(reason) | EngineState::Failed(reason) => {
                return Err(RequestError::EngineFailed(reason));
            }
        }
        self.check(&prompt, &params)?;
        let in_engine = self.in_engine.fetch_add(1, Ordering::Relaxed);
        let admitted = Admitted(Arc::clone(&self.in_engine));
        let full = || RequestError::QueueFull { in_engine, limit: self.max_queue + self.max_num_seqs };
        if in_engine >= self.max_queue + self.max_num_seqs {
            return Err(full());
        }
        let (sender, events) = mpsc::channel(params.max_tokens + 2);
        let id = RequestId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let reader = Reader { events: sender, _admitted: admitted };
        self.submissions.try_send(Submission { id, prompt, params, reader }).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => full(),
            mpsc::error::TrySendError::Closed(_) => RequestError::EngineFailed("its thread has ended".into()),
        })?;
        Ok(Generation { events })
    }

    fn check(&self, prompt: &[u32], params: &SamplingParams) -> Result<(), RequestError> {
        if prompt.is_empty() {
            return Err(RequestError::EmptyPrompt);
        }
        if prompt.len() + params.max_tokens > self.max_model_len {
            let (prompt, max_tokens) = (prompt.len(), params.max_tokens);
            return Err(RequestError::TooLong { prompt, max_tokens, max_model_len: self.max_model_len });
        }
        match prompt.iter().find(|&&id| id as usize >= self.vocab_size) {
            Some(&id) => Err(RequestError::UnknownToken { id, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }
}
