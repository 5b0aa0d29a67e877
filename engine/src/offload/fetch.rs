//! One sequence's blocks, from the tiers to memory: looked up, read a few at a time, checked, and handed over in order.
//!
//! A task of its own; the engine loop ends it when the hold is over. The first block that is missing or not what was asked
//! for ends it too: what follows it could not be used.

use std::sync::Arc;

use cache_tier::{Store, TieredStore};
use futures_util::{StreamExt, stream};
use protocol::{BlockIdentity, BlockKey, Lookup};
use tokio::sync::{Semaphore, mpsc};

use super::{Arrival, FetchId};
use crate::kv::StagedBlock;
use crate::metrics::EngineMetrics;

/// Blocks that are read together, and their bytes at most.
const BLOCKS_AT_ONCE: usize = 16;
const BYTES_AT_ONCE: usize = 64 << 20;
/// Reads under way.
const READS_AHEAD: usize = 2;

pub(super) struct Fetching {
    pub(super) fetch: FetchId,
    pub(super) tiers: Arc<TieredStore>,
    pub(super) identities: Vec<BlockIdentity>,
    pub(super) payload_bytes: usize,
    pub(super) room: Arc<Semaphore>,
    pub(super) arrivals: mpsc::Sender<Arrival>,
    pub(super) metrics: Arc<EngineMetrics>,
}

impl Fetching {
    pub(super) async fn run(self) {
        let fetch = self.fetch;
        self.bring().await;
        // The engine is gone where nobody listens.
        drop(self.arrivals.send(Arrival::End { fetch }).await);
    }

    async fn bring(&self) {
        let keys: Vec<BlockKey> = self.identities.iter().map(|identity| identity.key).collect();
        let num_blocks = self.tiers.lookup(&keys).await.num_blocks;
        if num_blocks == 0 || self.arrivals.send(Arrival::Found { fetch: self.fetch, num_blocks }).await.is_err() {
            return;
        }
        let firsts = (0..num_blocks).step_by(self.blocks_at_once());
        // One read is ahead of what is checked and handed over.
        let reads = stream::iter(firsts).map(|first| self.read(first, num_blocks)).buffered(READS_AHEAD);
        let mut reads = std::pin::pin!(reads);
        while let Some(Some(blocks)) = reads.next().await {
            let is_whole = blocks.len() == self.blocks_at_once();
            if self.arrivals.send(Arrival::Blocks { fetch: self.fetch, blocks }).await.is_err() || !is_whole {
                return;
            }
        }
    }

    fn blocks_at_once(&self) -> usize {
        (BYTES_AT_ONCE / self.payload_bytes.max(1)).clamp(1, BLOCKS_AT_ONCE)
    }

    /// The next blocks from `first`, up to the first that is missing or wrong; `None` where there is no room for them.
    async fn read(&self, first: usize, num_blocks: usize) -> Option<Vec<StagedBlock>> {
        let identities = &self.identities[first..num_blocks.min(first + self.blocks_at_once())];
        let keys: Vec<BlockKey> = identities.iter().map(|identity| identity.key).collect();
        let kib = (self.payload_bytes * keys.len()).div_ceil(1024) as u32;
        // Later blocks must not wait for room that the first of this very sequence hold.
        let room = Arc::clone(&self.room);
        let room = if first == 0 {
            room.acquire_many_owned(kib).await.ok()?
        } else {
            room.try_acquire_many_owned(kib).ok()?
        };
        let room = Arc::new(room);
        let found = self.tiers.get(&keys).await;
        let payloads = found.into_iter().zip(identities).map_while(|(lookup, identity)| self.open(lookup, identity));
        Some(payloads.map(|payload| StagedBlock { payload, room: Some(Arc::clone(&room)) }).collect())
    }

    /// The payload of a block that is what was asked for.
    fn open(&self, lookup: Lookup<protocol::KvFrame>, identity: &BlockIdentity) -> Option<bytes::Bytes> {
        let result = match lookup {
            Lookup::Hit(frame) => match frame.open(identity, self.payload_bytes) {
                Ok(payload) => {
                    self.metrics.kv.load("loaded", payload.len() as u64);
                    return Some(payload);
                }
                Err(error) => {
                    tracing::warn!(block = %identity.key.block, %error, "a KV block is recomputed");
                    "damaged"
                }
            },
            Lookup::Miss => "missing",
            Lookup::Busy => "busy",
        };
        self.metrics.kv.load(result, 0);
        None
    }
}
