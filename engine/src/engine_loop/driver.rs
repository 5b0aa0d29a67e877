//! The loop itself: takes requests, steps, and sends each reader its events.
//!
//! Run by the engine's thread or task, which owns everything here. The clock is read here, so that the engine knows none.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use protocol::ModelFingerprint;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use super::handle::{Admitted, Deadline, Submission};
use super::tiers::{self, Command};
use super::{EngineState, EngineStats};
use crate::announcer::Announcer;
use crate::engine::{Engine, Step};
use crate::event::{EngineEvent, RequestError};
use crate::metrics::{EngineMetrics, FinishedRequest};
use crate::model_runner::StepRunner;
use crate::offload::{Arrival, BlockKind, Offload};
use crate::ops::DeviceError;
use crate::sequence::RequestId;

pub(super) struct EngineLoop {
    readers: HashMap<RequestId, Reader>,
    stats: watch::Sender<EngineStats>,
    metrics: Arc<EngineMetrics>,
    commands: mpsc::Receiver<Command>,
    pub(super) engine: Engine,
    pub(super) fingerprint: Arc<OnceLock<ModelFingerprint>>,
    pub(super) kind: Option<BlockKind>,
    /// The tiers, where there are any.
    pub(super) offload: Option<Offload>,
    /// Who waits for the end of a drain.
    pub(super) draining: Option<oneshot::Sender<()>>,
    /// Whether there was nothing to do when last looked, though requests are here: they wait for blocks.
    is_held: bool,
    num_lost: u64,
    /// What routers are told of the pool.
    pub(super) announcer: Announcer,
}

/// What the loop waits for while it has nothing to do.
enum Event {
    Submission(Option<Box<Submission>>),
    Command(Command),
    Arrival(Option<Arrival>),
    Pause,
}

/// Where a request's events go, and when it passed which point. While it exists, the request counts as in the engine.
struct Reader {
    events: mpsc::Sender<EngineEvent>,
    _admitted: Admitted,
    arrived: Instant,
    deadline: Option<Deadline>,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    num_tokens: usize,
    prompt_len: usize,
    max_tokens: usize,
}

impl EngineLoop {
    pub(super) fn new(
        engine: Engine,
        stats: watch::Sender<EngineStats>,
        metrics: Arc<EngineMetrics>,
        commands: mpsc::Receiver<Command>,
        fingerprint: Arc<OnceLock<ModelFingerprint>>,
        offload: Option<Offload>,
    ) -> Self {
        Self {
            readers: HashMap::new(),
            stats,
            metrics,
            commands,
            engine,
            fingerprint,
            kind: None,
            offload,
            draining: None,
            is_held: false,
            num_lost: 0,
            announcer: Announcer::default(),
        }
    }

    /// Runs until all handles are gone or the device fails.
    pub(super) async fn run<R: StepRunner>(
        mut self,
        mut runner: R,
        mut receiver: mpsc::Receiver<Submission>,
        state: &watch::Sender<EngineState>,
    ) {
        self.know_blocks(&runner);
        self.engine.keep_changes();
        loop {
            match self.turn(&mut runner, &mut receiver).await {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => return self.fail(&error, state),
            }
        }
    }

    /// One step, or what there is to do without one. False when all handles are gone.
    async fn turn<R: StepRunner>(
        &mut self,
        runner: &mut R,
        receiver: &mut mpsc::Receiver<Submission>,
    ) -> Result<bool, DeviceError> {
        if !self.take_in(runner, receiver).await? {
            return Ok(false);
        }
        self.drop_abandoned();
        self.take_arrivals();
        let step = self.engine.begin();
        self.ask_tiers();
        self.is_held = step.is_none() && !self.engine.scheduler().is_idle();
        match step {
            Some(step) => self.run_step(runner, step).await?,
            None => {
                self.idle_work(runner).await?;
                self.publish(runner, None);
            }
        }
        Ok(true)
    }

    async fn run_step<R: StepRunner>(&mut self, runner: &mut R, mut step: Step) -> Result<(), DeviceError> {
        self.note_started(&step);
        let copies = std::mem::take(&mut step.copies);
        let has_loads = !copies.loads.is_empty();
        if !copies.is_empty() {
            runner.copy_blocks(&tiers::ids(&copies), &copies.loads)?;
            if let Some(latency) = runner.copy_latency() {
                tokio::time::sleep(latency).await;
            }
        }
        if step.input.num_rows() == 0 {
            self.put_down(runner, copies)?;
            self.publish(runner, None);
            return Ok(());
        }
        let started = Instant::now();
        if let Some(latency) = runner.latency(&step.input) {
            tokio::time::sleep(latency).await;
        }
        let selected = runner.run(&step.input)?;
        let elapsed = started.elapsed();
        self.put_down(runner, copies)?;
        let measured = (step.num_decodes(), step.num_prefill_tokens(), elapsed);
        // A device may copy blocks in within the time of the step behind it: that tells nothing of how fast it computes. What
        // a full pool puts down goes with every step, and is a part of how fast the engine is.
        if !has_loads {
            self.engine.note_rate(&step, elapsed.as_secs_f64());
        }
        let events = self.engine.finish(step, selected);
        // Before the events, so that who sees an answer end sees its blocks free.
        self.publish(runner, Some(measured));
        events.into_iter().for_each(|(id, event)| self.deliver(id, event));
        Ok(())
    }

    fn fail(&mut self, error: &DeviceError, state: &watch::Sender<EngineState>) {
        tracing::error!(%error, requests = self.readers.len(), "device failed");
        state.send_replace(EngineState::Failed(error.to_string()));
        for (_, reader) in self.readers.drain() {
            self.metrics.finished(&reader.summary("error"));
            send(&reader, EngineEvent::Failed(RequestError::EngineFailed(error.to_string())));
        }
    }

    /// Takes what has been submitted and asked, waiting only when there is nothing to do. False when all handles are gone.
    async fn take_in<R: StepRunner>(
        &mut self,
        runner: &mut R,
        receiver: &mut mpsc::Receiver<Submission>,
    ) -> Result<bool, DeviceError> {
        let is_idle = self.engine.scheduler().is_idle();
        if (is_idle || self.is_held) && !self.has_idle_work() {
            match self.wait(receiver).await {
                Event::Submission(None) => return Ok(false),
                Event::Submission(Some(submission)) => self.take(*submission),
                Event::Command(command) => self.obey(command, runner)?,
                Event::Arrival(arrived) => {
                    let rate = self.engine.rate().prefill_tokens_per_s();
                    let staging = arrived.and_then(|arrived| self.offload.as_mut()?.take(arrived, rate));
                    staging.into_iter().for_each(|staging| self.stage(staging));
                }
                Event::Pause => {}
            }
        }
        while let Ok(submission) = receiver.try_recv() {
            self.take(submission);
        }
        // One that copies blocks between two steps, so that many do not hold streams up.
        while let Ok(command) = self.commands.try_recv() {
            let copies = command.copies();
            self.obey(command, runner)?;
            if copies {
                break;
            }
        }
        Ok(true)
    }

    async fn wait(&mut self, receiver: &mut mpsc::Receiver<Submission>) -> Event {
        let awaits_tiers = self.offload.as_ref().is_some_and(Offload::is_waiting);
        // Requests that wait for nothing that is known here would be a bug, which must not take the processor; a request's
        // deadline is looked at as often; what goes down waits for room in the queue.
        let goes_down = self.offload.is_some() && self.engine.scheduler().blocks().has_used_again();
        let pauses = self.is_held || self.draining.is_some() || goes_down;
        let pause = Duration::from_millis(if awaits_tiers { 5 } else { 1 });
        tokio::select! {
            submission = receiver.recv() => Event::Submission(submission.map(Box::new)),
            Some(command) = self.commands.recv() => Event::Command(command),
            arrived = next_arrival(&mut self.offload) => Event::Arrival(arrived),
            () = tokio::time::sleep(pause), if pauses => Event::Pause,
        }
    }

    fn take(&mut self, submission: Submission) {
        let Submission { id, request, events, admitted, arrived, deadline } = submission;
        let reader = Reader {
            events,
            _admitted: admitted,
            arrived,
            deadline,
            started: None,
            first_token: None,
            last_token: None,
            num_tokens: 0,
            prompt_len: request.prompt.len(),
            max_tokens: request.params.max_tokens,
        };
        self.readers.insert(id, reader);
        let events = self.engine.add(id, request);
        self.contradict(id);
        events.into_iter().for_each(|event| self.deliver(id, event));
    }

    /// Drops requests whose readers are gone or whose time is over.
    fn drop_abandoned(&mut self) {
        let now = Instant::now();
        let is_late = |reader: &Reader| reader.deadline.is_some_and(|deadline| deadline.at <= now);
        let gone = self.readers.iter().filter(|(_, reader)| reader.events.is_closed() || is_late(reader));
        for id in gone.map(|(id, _)| *id).collect::<Vec<RequestId>>() {
            if let Some(reader) = self.readers.remove(&id) {
                if let Some(deadline) = reader.deadline.filter(|deadline| deadline.at <= now) {
                    send(&reader, EngineEvent::Failed(deadline.error()));
                }
                self.metrics.finished(&reader.summary("abort"));
            }
            self.engine.abort(id);
            if let Some(offload) = &mut self.offload {
                offload.forget(id);
            }
        }
    }

    fn note_started(&mut self, step: &Step) {
        let now = Instant::now();
        for id in &step.admitted {
            if let Some(reader) = self.readers.get_mut(id) {
                reader.started.get_or_insert(now);
            }
        }
    }

    fn deliver(&mut self, id: RequestId, event: EngineEvent) {
        let Some(reader) = self.readers.get_mut(&id) else { return };
        let reason = match &event {
            EngineEvent::Resumed { .. } | EngineEvent::Prompt { .. } => None,
            EngineEvent::Token { .. } => {
                reader.note_token(&self.metrics);
                None
            }
            EngineEvent::Finished { reason, .. } => Some(reason.as_str()),
            EngineEvent::Failed(_) => Some("error"),
        };
        send(reader, event);
        if let Some(reason) = reason {
            self.metrics.finished(&reader.summary(reason));
            self.readers.remove(&id);
        }
    }

    /// Tells what a step left behind, and how long it took.
    fn publish<R: StepRunner>(&mut self, runner: &R, step: Option<(usize, usize, Duration)>) {
        self.announce();
        let scheduler = self.engine.scheduler();
        let blocks = scheduler.blocks();
        let num_used_blocks = blocks.num_blocks() - blocks.num_free_blocks();
        let wasted_slots = scheduler.num_wasted_slots();
        self.stats.send_modify(|stats| {
            stats.num_running = scheduler.num_running();
            stats.num_waiting = scheduler.num_waiting();
            stats.num_used_blocks = num_used_blocks;
            stats.num_cached_blocks = blocks.num_cached_blocks();
            stats.num_uncomputed_tokens = scheduler.num_uncomputed_tokens();
            stats.num_preemptions = scheduler.counters().num_preemptions;
            stats.rate = self.engine.rate();
            stats.refuses = runner.refuses();
            if step.is_some() {
                stats.num_steps += 1;
                stats.wasted_slot_steps += wasted_slots as u64;
                stats.held_slot_steps += (num_used_blocks * blocks.block_size()) as u64;
            }
        });
        let num_lost = blocks.pool().num_lost();
        self.metrics.kv.lost(num_lost - self.num_lost);
        self.num_lost = num_lost;
        if let Some((num_decodes, num_prefill_tokens, elapsed)) = step {
            self.metrics.step(num_decodes, num_prefill_tokens, elapsed.as_secs_f64());
        }
        self.metrics.state(&self.stats.borrow(), blocks.num_blocks(), scheduler.counters(), wasted_slots);
        self.metrics.device(runner.num_dispatches(), runner.memory_bytes());
    }
}

/// What arrives next from the tiers; for ever where there are none.
async fn next_arrival(offload: &mut Option<Offload>) -> Option<Arrival> {
    match offload {
        Some(offload) => offload.next().await,
        None => std::future::pending().await,
    }
}

impl Reader {
    fn note_token(&mut self, metrics: &EngineMetrics) {
        let now = Instant::now();
        match self.last_token {
            Some(last) => metrics.inter_token((now - last).as_secs_f64()),
            None => {
                self.first_token = Some(now);
                metrics.first_token(self.prompt_len, (now - self.arrived).as_secs_f64());
            }
        }
        self.last_token = Some(now);
        self.num_tokens += 1;
    }

    fn summary(&self, reason: &'static str) -> FinishedRequest {
        let now = Instant::now();
        let between = |from: Option<Instant>, to: Option<Instant>| Some((to? - from?).as_secs_f64());
        FinishedRequest {
            reason,
            prompt_tokens: self.prompt_len,
            generation_tokens: self.num_tokens,
            max_tokens: self.max_tokens,
            e2e_s: (now - self.arrived).as_secs_f64(),
            queue_s: between(Some(self.arrived), Some(self.started.unwrap_or(now))),
            prefill_s: between(self.started, self.first_token),
            decode_s: between(self.first_token, self.last_token),
        }
    }
}

/// The channel has room for all that a request can send, so sending fails only when the reader is gone, which the next
/// step notices.
fn send(reader: &Reader, event: EngineEvent) {
    drop(reader.events.try_send(event));
}
