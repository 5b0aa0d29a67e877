//! The engine's own pool as a place that other processes may read: what `/kv/v1` of an engine serves first.
//!
//! Its other half is the engine loop, which answers between two steps. Nothing is put here: blocks come into the pool with
//! the sequences that need them. What the tiers hold is served behind it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use cache_tier::{Place, PlaceStats, Store, TieredStore};
use futures_util::future::BoxFuture;
use protocol::{BlockKey, KvFrame, Lookup, Prefix, PutOutcome, PutReason};
use tokio::sync::{mpsc, oneshot, watch};

use crate::engine_loop::{Command, EngineStats};

/// So long a question waits for its answer: the engine may be within a long step.
const TIMEOUT: Duration = Duration::from_secs(2);

/// A question to the engine loop.
#[derive(Debug)]
pub(crate) enum PoolJob {
    /// How many leading keys the pool holds.
    Lookup { keys: Vec<BlockKey>, reply: oneshot::Sender<usize> },
    /// The blocks of these keys, up to the first that it does not hold.
    Get { keys: Vec<BlockKey>, reply: oneshot::Sender<Vec<KvFrame>> },
}

/// Pool and tiers of one engine.
pub struct PoolStore {
    commands: mpsc::Sender<Command>,
    stats: watch::Receiver<EngineStats>,
    num_blocks: usize,
    pool_bytes: u64,
    tiers: Option<Arc<TieredStore>>,
    /// What others have read of the pool.
    read: Mutex<PlaceStats>,
}

impl PoolStore {
    pub(crate) fn new(
        commands: mpsc::Sender<Command>,
        stats: watch::Receiver<EngineStats>,
        (num_blocks, pool_bytes): (usize, u64),
        tiers: Option<Arc<TieredStore>>,
    ) -> Self {
        let read = Mutex::new(PlaceStats::new(Place::Device));
        Self { commands, stats, num_blocks, pool_bytes, tiers, read }
    }

    /// Whether any tier outlives this process.
    pub fn outlives(&self) -> bool {
        self.tiers.as_ref().is_some_and(|tiers| tiers.outlives())
    }

    async fn ask<T>(&self, job: PoolJob, answer: oneshot::Receiver<T>) -> Option<T> {
        self.commands.try_send(Command::Pool(job)).ok()?;
        tokio::time::timeout(TIMEOUT, answer).await.ok()?.ok()
    }
}

impl Store for PoolStore {
    fn place(&self) -> Place {
        Place::Device
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let held = self.ask(PoolJob::Lookup { keys: keys.to_vec(), reply }, answer).await;
            let num_blocks = held.unwrap_or(0);
            let mut prefix = match &self.tiers {
                Some(tiers) if num_blocks < keys.len() => tiers.lookup(&keys[num_blocks..]).await,
                _ => Prefix::default(),
            };
            prefix.num_blocks += num_blocks;
            prefix.busy |= held.is_none();
            prefix
        })
    }

    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let held = self.ask(PoolJob::Get { keys: keys.to_vec(), reply }, answer).await;
            let missing = if held.is_some() { Lookup::Miss } else { Lookup::Busy };
            let mut found: Vec<Lookup<KvFrame>> = held.into_iter().flatten().map(Lookup::Hit).collect();
            self.read.lock().unwrap_or_else(PoisonError::into_inner).count_lookups(&found);
            let rest = &keys[found.len().min(keys.len())..];
            match &self.tiers {
                Some(tiers) if !rest.is_empty() => found.extend(tiers.get(rest).await),
                _ => found.resize(keys.len(), missing),
            }
            found
        })
    }

    fn put(&self, frames: Vec<KvFrame>, reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>> {
        Box::pin(async move {
            match &self.tiers {
                Some(tiers) => tiers.put(frames, reason).await,
                None => vec![PutOutcome::Refused; frames.len()],
            }
        })
    }

    fn lease<'a>(&'a self, keys: &'a [BlockKey], millis: u32) -> BoxFuture<'a, usize> {
        Box::pin(async move {
            match &self.tiers {
                Some(tiers) => tiers.lease(keys, millis).await,
                None => 0,
            }
        })
    }

    fn stats(&self) -> Vec<PlaceStats> {
        let num_blocks = self.stats.borrow().num_cached_blocks as u64;
        let (capacity_bytes, block_bytes) = (self.pool_bytes, self.pool_bytes / self.num_blocks.max(1) as u64);
        let used_bytes = num_blocks * block_bytes;
        let read = *self.read.lock().unwrap_or_else(PoisonError::into_inner);
        let device = PlaceStats { num_blocks, capacity_bytes, used_bytes, ..read };
        std::iter::once(device).chain(self.tiers.iter().flat_map(|tiers| tiers.stats())).collect()
    }
}
