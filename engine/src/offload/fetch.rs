//! One sequence's blocks, from the tiers to memory: looked up, read a few at a time, checked, and handed over in order.
//!
//! A task of its own; the engine loop ends it when the hold is over. The first block that is missing or not what was asked
//! for ends it too: what follows it could not be used.

use std::sync::Arc;

use cache_tier::{Store, TieredStore};
use futures_util::{StreamExt, stream};
use protocol::{BlockIdentity, BlockKey, Lookup};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::{Arrival, FetchId, STAGED_KIB};
use crate::kv::StagedBlock;
use crate::metrics::EngineMetrics;

/// Blocks that are read together, and their bytes at most.
const BLOCKS_AT_ONCE: usize = 16;
const BYTES_AT_ONCE: usize = 64 << 20;
/// KiB of one sequence's blocks: two sequences may always have theirs.
const MOST_KIB: usize = STAGED_KIB / 2;
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
        let kib = self.payload_bytes.div_ceil(1024).max(1);
        let num_blocks = self.tiers.lookup(&keys).await.num_blocks.min(MOST_KIB / kib);
        if num_blocks == 0 || self.arrivals.send(Arrival::Found { fetch: self.fetch, num_blocks }).await.is_err() {
            return;
        }
        // Room for all of them at once: who waited for more while holding some could wait for itself.
        let Ok(mut room) = Arc::clone(&self.room).acquire_many_owned((kib * num_blocks) as u32).await else { return };
        let parts = self.identities[..num_blocks].chunks(self.blocks_at_once());
        let reads: Vec<_> = parts.map(|part| self.read(part, room.split(kib * part.len()))).collect();
        // One read is ahead of what is checked and handed over.
        let reads = stream::iter(reads).buffered(READS_AHEAD);
        let mut reads = std::pin::pin!(reads);
        while let Some(blocks) = reads.next().await {
            let is_whole = blocks.len() == self.blocks_at_once();
            if self.arrivals.send(Arrival::Blocks { fetch: self.fetch, blocks }).await.is_err() || !is_whole {
                return;
            }
        }
    }

    fn blocks_at_once(&self) -> usize {
        (BYTES_AT_ONCE / self.payload_bytes.max(1)).clamp(1, BLOCKS_AT_ONCE)
    }

    /// These blocks, up to the first that is missing or wrong.
    async fn read(&self, identities: &[BlockIdentity], room: Option<OwnedSemaphorePermit>) -> Vec<StagedBlock> {
        let keys: Vec<BlockKey> = identities.iter().map(|identity| identity.key).collect();
        let room = room.map(Arc::new);
        let found = self.tiers.get(&keys).await;
        let payloads = found.into_iter().zip(identities).map_while(|(lookup, identity)| self.open(lookup, identity));
        payloads.map(|payload| StagedBlock { payload, room: room.clone() }).collect()
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
