//! The loop's part of moving blocks: what leaves the device is handed to the offload, what arrives is handed to the engine,
//! and other processes' questions about the pool are answered between two steps.
//!
//! Part of [`EngineLoop`]; nothing here waits for a tier.

use bytes::Bytes;
use protocol::{BlockHash, BlockKey, KvFrame};
use tokio::sync::oneshot;

use super::driver::EngineLoop;
use crate::announcer::{Announcement, Subscription};
use crate::kv::{BlockCopies, BlockId};
use crate::model_runner::StepRunner;
use crate::offload::{BlockKind, PoolJob, Staging};
use crate::ops::DeviceError;

/// Blocks of one answer to another process: what a device copies out in a few milliseconds.
const BLOCKS_AN_ANSWER: usize = 32;

/// What others ask of the loop beside requests.
#[derive(Debug)]
pub(crate) enum Command {
    /// About the pool.
    Pool(PoolJob),
    /// To put the blocks of the pool down; the answer comes when they are.
    Drain { reply: oneshot::Sender<()> },
    /// To tell routers of chunks, as far as their blocks are held: an answer has made them.
    Announce(Vec<Announcement>),
    /// To be told what is held of prompt chains.
    Subscribe { reply: oneshot::Sender<Subscription> },
}

impl Command {
    /// Whether it takes the device's time.
    pub(super) fn copies(&self) -> bool {
        matches!(self, Self::Pool(PoolJob::Get { .. }))
    }
}

impl EngineLoop {
    /// Tells what this engine's blocks are, once its runner is there.
    pub(super) fn know_blocks<R: StepRunner>(&mut self, runner: &R) {
        let Some(&model) = self.fingerprint.get() else { return };
        let kind = BlockKind { model, numerics: runner.numerics(), payload: runner.payload() };
        self.kind = Some(kind);
        if let Some(offload) = &mut self.offload {
            offload.set_kind(kind);
        }
    }

    /// Hands the engine what has arrived, and lets those go on whose hold is over.
    pub(super) fn take_arrivals(&mut self) {
        let rate = self.engine.rate().prefill_tokens_per_s();
        let Some(offload) = &mut self.offload else { return };
        let arrived = offload.arrived(rate);
        arrived.into_iter().for_each(|staging| self.stage(staging));
    }

    pub(super) fn stage(&mut self, staging: Staging) {
        let Staging { id, blocks, is_last } = staging;
        self.engine.stage(id, blocks, is_last);
    }

    /// Asks the tiers for what the scheduler wants.
    pub(super) fn ask_tiers(&mut self) {
        let rate = self.engine.rate().prefill_tokens_per_s();
        let wanted = self.engine.take_wanted();
        if let Some(offload) = &mut self.offload {
            wanted.into_iter().for_each(|wanted| offload.fetch(wanted, rate));
        }
    }

    /// Sends what a copy brought on its way down.
    pub(super) fn put_down<R: StepRunner>(&mut self, runner: &mut R, copies: BlockCopies) -> Result<(), DeviceError> {
        let payloads = runner.copied_out()?;
        if let Some(offload) = self.offload.as_mut().filter(|_| !copies.stores.is_empty()) {
            offload.put(copies.stores, payloads);
        }
        Ok(())
    }

    /// Whether blocks could go down while nothing runs.
    pub(super) fn has_idle_work(&self) -> bool {
        let can_put = self.offload.as_ref().is_some_and(|offload| offload.can_put());
        can_put && (self.draining.is_some() || self.engine.scheduler().blocks().has_used_again())
    }

    /// Puts a batch of blocks down while nothing runs: those used again, or all in a drain.
    pub(super) async fn idle_work<R: StepRunner>(&mut self, runner: &mut R) -> Result<(), DeviceError> {
        if !self.has_idle_work() {
            return Ok(());
        }
        let copies = if self.draining.is_some() { self.engine.drain_copies() } else { self.engine.idle_copies() };
        if copies.is_empty() {
            if let (Some(reply), Some(offload)) = (self.draining.take(), &self.offload) {
                self.draining = offload.flush(reply).err();
            }
            return Ok(());
        }
        runner.copy_blocks(&ids(&copies), &[])?;
        if let Some(latency) = runner.copy_latency() {
            tokio::time::sleep(latency).await;
        }
        self.put_down(runner, copies)
    }

    /// Carries a command out.
    pub(super) fn obey<R: StepRunner>(&mut self, command: Command, runner: &mut R) -> Result<(), DeviceError> {
        match command {
            // Who asked may be gone.
            Command::Pool(PoolJob::Lookup { keys, reply }) => {
                let held = self.engine.scheduler().blocks().held(&self.own(&keys), keys.len()).len();
                let _gone = reply.send(held);
            }
            Command::Pool(PoolJob::Get { keys, reply }) => {
                let _gone = reply.send(self.copy_out(&keys, runner)?);
            }
            Command::Announce(announcements) => self.announce_held(announcements),
            Command::Subscribe { reply } => {
                let _gone = reply.send(self.announcer.subscribe());
            }
            Command::Drain { reply } => match &self.offload {
                Some(offload) if offload.outlives() => self.draining = Some(reply),
                _ => {
                    let _gone = reply.send(());
                }
            },
        }
        Ok(())
    }

    /// The leading keys that are of this engine's model.
    fn own(&self, keys: &[BlockKey]) -> Vec<BlockHash> {
        let model = self.kind.map(|kind| kind.model);
        keys.iter().take_while(|key| Some(key.model) == model).map(|key| key.block).collect()
    }

    fn copy_out<R: StepRunner>(&mut self, keys: &[BlockKey], runner: &mut R) -> Result<Vec<KvFrame>, DeviceError> {
        let Some(kind) = self.kind else { return Ok(Vec::new()) };
        let blocks = self.engine.scheduler().blocks();
        let block_ids = blocks.held(&self.own(keys), BLOCKS_AN_ANSWER);
        if block_ids.is_empty() {
            return Ok(Vec::new());
        }
        let names: Vec<_> = block_ids.iter().filter_map(|&block_id| blocks.pool().name_of(block_id).cloned()).collect();
        runner.copy_blocks(&block_ids, &[])?;
        let payloads: Vec<Bytes> = runner.copied_out()?;
        let frame = |(name, payload): (&_, Bytes)| KvFrame::new(kind.identity(name), kind.numerics, payload);
        Ok(names.iter().zip(payloads).map(frame).collect())
    }
}

/// The blocks that leave.
pub(super) fn ids(copies: &BlockCopies) -> Vec<BlockId> {
    copies.stores.iter().map(|store| store.block_id).collect()
}
