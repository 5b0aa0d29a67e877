//! The thread (or, for a simulated device, the task) that owns an engine, and the handle that others reach it by.
//!
//! The HTTP edge holds [`EngineHandle`]s; the thread loads the model, then steps while there is work. Invariants: the
//! loop never waits for a reader (a request's channel holds all it can ever send); a request whose reader is gone is
//! dropped before the next step, so its blocks are free within one; when the device fails every request hears of it.

mod announcements;
mod driver;
mod handle;
mod tiers;

use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, OnceLock};

use cache_tier::TieredStore;
use tokio::sync::{mpsc, watch};

use crate::config::EngineConfig;
use crate::engine::{Engine, EngineLimits};
use crate::error::LoadError;
use crate::fingerprint;
use crate::kv::{BLOCK_SIZE, BlockManager};
use crate::metrics::EngineMetrics;
use crate::model_file::ModelFile;
use crate::model_runner;
use crate::offload::{Offload, PoolStore};
use crate::sampling_defaults::SamplingDefaults;
use crate::scheduler::{Scheduler, SchedulerLimits};
use crate::sim::{SimProfile, SimRunner};
use crate::sizes;
use crate::tokenizer::Tokenizer;
use driver::EngineLoop;
pub use handle::Shape;
use handle::Submission;
pub use handle::{EngineHandle, Generation};
pub(crate) use tiers::Command;

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

/// Numbers of the running engine after its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EngineStats {
    /// Sequences that run.
    pub num_running: usize,
    /// Sequences that wait.
    pub num_waiting: usize,
    /// KV blocks that sequences hold.
    pub num_used_blocks: usize,
    /// KV blocks whose contents can be found again, held or free.
    pub num_cached_blocks: usize,
    /// Tokens of prompts that are still to be computed.
    pub num_uncomputed_tokens: usize,
    /// Steps since the start.
    pub num_steps: u64,
    /// Sequences that lost their blocks, since the start.
    pub num_preemptions: u64,
    /// Token slots held and empty, summed over steps.
    pub wasted_slot_steps: u64,
    /// Token slots held, summed over steps.
    pub held_slot_steps: u64,
    /// Measured.
    pub rate: crate::step_rate::StepRate,
    /// Whether a simulated device refuses requests.
    pub refuses: bool,
}

/// Questions of other processes that wait for the engine.
const MAX_COMMANDS: usize = 16;

fn limits(
    config: &EngineConfig,
    max_model_len: usize,
    max_context_tokens: usize,
    tiers: Option<&TieredStore>,
) -> (SchedulerLimits, EngineLimits) {
    let scheduler = SchedulerLimits {
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_logits_rows: sizes::max_logits_rows(config),
        max_context_tokens,
        enable_prefix_caching: config.enable_prefix_caching,
        has_tiers: tiers.is_some() && config.enable_prefix_caching,
    };
    (scheduler, EngineLimits { max_model_len, max_step_s: config.max_step_ms / 1e3 })
}

/// What both kinds of engine are made of.
struct Parts {
    handle: EngineHandle,
    receiver: mpsc::Receiver<Submission>,
    state: watch::Sender<EngineState>,
    engine_loop: EngineLoop,
}

fn parts(
    config: &EngineConfig,
    tokenizer: Arc<Tokenizer>,
    shape: Shape,
    max_context_tokens: usize,
    pool_bytes: u64,
    tiers: Option<Arc<TieredStore>>,
) -> Result<Parts, LoadError> {
    let (submissions, receiver) = mpsc::channel(config.max_queue + config.max_num_seqs);
    let (state_sender, state) = watch::channel(EngineState::Loading(0, 1));
    let (stats_sender, stats) = watch::channel(EngineStats::default());
    let metrics = Arc::new(EngineMetrics::new(&config.served_model_name, &shape)?);
    let (commands, command_receiver) = mpsc::channel(MAX_COMMANDS);
    let tiers = tiers.filter(|tiers| !tiers.is_empty());
    let offload = match &tiers {
        None => None,
        Some(tiers) => {
            let runtime = tokio::runtime::Handle::try_current();
            let runtime = runtime.map_err(|error| LoadError::Setting(format!("KV tiers: {error}")))?;
            Some(Offload::new(Arc::clone(tiers), runtime, Arc::clone(&metrics)))
        }
    };
    let fingerprint = Arc::new(OnceLock::new());
    let pool = (shape.num_blocks, pool_bytes);
    let (scheduler, engine) = limits(config, shape.max_model_len, max_context_tokens, tiers.as_deref());
    let kv_store = Arc::new(PoolStore::new(commands.clone(), stats.clone(), pool, tiers));
    let scheduler = Scheduler::new(scheduler, BlockManager::new(shape.num_blocks, BLOCK_SIZE));
    let engine = Engine::new(scheduler, tokenizer, engine);
    let handle = EngineHandle {
        submissions,
        state,
        stats,
        metrics: Arc::clone(&metrics),
        next_id: Arc::new(AtomicU64::new(0)),
        in_engine: Arc::new(AtomicUsize::new(0)),
        shape: Arc::new(shape),
        sampling_defaults: SamplingDefaults::default(),
        fingerprint: Arc::clone(&fingerprint),
        commands,
        kv_store,
    };
    let engine_loop = EngineLoop::new(engine, stats_sender, metrics, command_receiver, fingerprint, offload);
    Ok(Parts { handle, receiver, state: state_sender, engine_loop })
}

/// Reads the file's header, opens the device and starts the engine's thread, which loads the model.
///
/// # Errors
/// When the device does not exist, the settings do not fit the model or the device, or the thread cannot be started.
pub fn spawn(
    config: EngineConfig,
    file: ModelFile,
    tokenizer: Arc<Tokenizer>,
    tiers: Option<Arc<TieredStore>>,
) -> Result<EngineHandle, LoadError> {
    let (opened, sizes) = model_runner::prepare(&file, &tokenizer, &config)?;
    let max_context_tokens = opened.max_context_tokens(&sizes.layout, config.max_num_seqs);
    let shape = Shape {
        max_model_len: sizes.max_model_len,
        num_blocks: sizes.layout.num_blocks,
        max_num_seqs: config.max_num_seqs,
        max_queue: config.max_queue,
        vocab_size: tokenizer.vocab_size(),
    };
    let pool_bytes = sizes.layout.total_bytes();
    let parts = parts(&config, tokenizer, shape, max_context_tokens, pool_bytes, tiers)?;
    let Parts { mut handle, receiver, state, engine_loop } = parts;
    if config.generation_config {
        handle.sampling_defaults = SamplingDefaults::of(&file)?;
        if handle.sampling_defaults != SamplingDefaults::default() {
            tracing::info!(defaults = ?handle.sampling_defaults, "requests take the model's own sampling defaults");
        }
    }
    let fingerprint = Arc::clone(&handle.fingerprint);
    let thread = move || {
        let guard = FailureGuard(state);
        let mut progress = |loaded, total| {
            guard.0.send_replace(EngineState::Loading(loaded, total));
        };
        match model_runner::load(opened, &file, &sizes, &config, &mut progress) {
            Ok(loaded) => {
                fingerprint.get_or_init(|| fingerprint::of_model(&file, &sizes, &config));
                guard.0.send_replace(EngineState::Ready(loaded.device));
                block_on(engine_loop.run(loaded.runner, receiver, &guard.0), &guard.0);
            }
            Err(error) => {
                guard.0.send_replace(EngineState::LoadFailed(error.to_string()));
            }
        }
    };
    start_thread(thread)?;
    Ok(handle)
}

/// Starts an engine on a simulated device: a task of the caller's runtime, or a thread where there is none.
///
/// # Errors
/// When the settings do not fit the profile.
pub fn spawn_sim(
    config: &EngineConfig,
    profile: SimProfile,
    tokenizer: Arc<Tokenizer>,
    tiers: Option<Arc<TieredStore>>,
) -> Result<EngineHandle, LoadError> {
    sizes::check_step(config)?;
    let max_model_len = profile.max_model_len(config.max_model_len)?;
    let shape = Shape {
        max_model_len,
        num_blocks: profile.kv_blocks,
        max_num_seqs: config.max_num_seqs,
        max_queue: config.max_queue,
        vocab_size: tokenizer.vocab_size(),
    };
    let pool_bytes = (profile.kv_blocks * BLOCK_SIZE) as f64 * profile.kv_bytes_per_token;
    let parts = parts(config, Arc::clone(&tokenizer), shape, usize::MAX, pool_bytes as u64, tiers)?;
    let Parts { handle, receiver, state, engine_loop } = parts;
    handle.fingerprint.get_or_init(|| profile.fingerprint());
    state.send_replace(EngineState::Ready(format!("sim:{}", profile.name)));
    let runner = SimRunner::new(profile, &tokenizer);
    let work = async move {
        let guard = FailureGuard(state);
        engine_loop.run(runner, receiver, &guard.0).await;
    };
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(work)),
        Err(_) => start_thread(move || {
            if let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_time().build() {
                runtime.block_on(work);
            }
        })?,
    }
    Ok(handle)
}

fn start_thread(work: impl FnOnce() + Send + 'static) -> Result<(), LoadError> {
    let spawned = std::thread::Builder::new().name("engine".into()).spawn(work);
    spawned.map(drop).map_err(|error| LoadError::Setting(format!("cannot start the engine thread: {error}")))
}

/// Runs the loop on this thread.
fn block_on(work: impl Future<Output = ()>, state: &watch::Sender<EngineState>) {
    match tokio::runtime::Builder::new_current_thread().enable_time().build() {
        Ok(runtime) => runtime.block_on(work),
        Err(error) => {
            state.send_replace(EngineState::Failed(format!("cannot start the engine's timer: {error}")));
        }
    }
}

/// Turns a panic of the engine into the failed state, so that nobody waits for it.
struct FailureGuard(watch::Sender<EngineState>);

impl Drop for FailureGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.send_replace(EngineState::Failed("the engine thread panicked".into()));
        }
    }
}
