//! Blocks on their way between the device's pool and the tiers below it.
//!
//! Held by the engine loop, which hands it what leaves and asks it for what is missing, and never waits: tasks on the
//! server's runtime do. Invariant: a sequence is held back for its blocks at most as long as computing them would take;
//! whatever happens below, it then goes on.

mod fetch;
mod metrics;
mod pool_store;
mod put;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cache_tier::TieredStore;
use protocol::{BlockIdentity, BlockKey, ModelFingerprint, NumericsClass};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::kv::{BLOCK_SIZE, BlockName, PayloadShape, StagedBlock, Store};
use crate::metrics::EngineMetrics;
use crate::scheduler::{MAX_STORES, Wanted};
use crate::sequence::RequestId;
pub use metrics::OffloadMetrics;
pub(crate) use pool_store::PoolJob;
pub use pool_store::PoolStore;
use put::PutJob;

/// KiB of blocks that have arrived and wait for their sequences.
const STAGED_KIB: usize = 512 << 10;
/// Batches of blocks on their way down; more are lost, and recomputed one day.
const PUT_QUEUE: usize = 16;
/// KiB of blocks on their way down.
const PUT_KIB: usize = 512 << 10;
/// What is told between two looks.
const ARRIVALS: usize = 64;
/// So long a sequence is held back before the engine has measured how fast it computes.
const UNMEASURED_HOLD: Duration = Duration::from_secs(1);

/// A request, and which of its fetches: one that was given up may still tell something while the next is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FetchId {
    id: RequestId,
    number: u64,
}

/// What a fetch tells.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// The tiers have so many of the blocks: the hold is bounded by those.
    Found { fetch: FetchId, num_blocks: usize },
    /// The next blocks, in order.
    Blocks { fetch: FetchId, blocks: Vec<StagedBlock> },
    /// Nothing more comes.
    End { fetch: FetchId },
}

/// A sequence's blocks under way.
#[derive(Debug)]
struct Fetch {
    number: u64,
    asked: Instant,
    deadline: Instant,
    task: AbortHandle,
}

/// What a fetch has for the engine.
#[derive(Debug)]
pub(crate) struct Staging {
    /// Whose.
    pub(crate) id: RequestId,
    /// The next blocks.
    pub(crate) blocks: Vec<StagedBlock>,
    /// Whether nothing more comes.
    pub(crate) is_last: bool,
}

/// The tiers as the engine loop sees them.
pub(crate) struct Offload {
    tiers: Arc<TieredStore>,
    runtime: Handle,
    puts: mpsc::Sender<PutJob>,
    arrivals: (mpsc::Sender<Arrival>, mpsc::Receiver<Arrival>),
    fetches: HashMap<RequestId, Fetch>,
    num_fetches: u64,
    room: Arc<Semaphore>,
    put_room: Arc<Semaphore>,
    metrics: Arc<EngineMetrics>,
    /// What the engine's blocks are, once it is loaded.
    kind: Option<BlockKind>,
}

/// What all blocks of one engine share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockKind {
    /// Their model.
    pub(crate) model: ModelFingerprint,
    /// What makes them here.
    pub(crate) numerics: NumericsClass,
    /// What a canonical payload is made of.
    pub(crate) payload: PayloadShape,
}

impl BlockKind {
    /// A block's whole identity.
    pub(crate) fn identity(&self, name: &BlockName) -> BlockIdentity {
        let key = BlockKey { model: self.model, block: name.hash };
        BlockIdentity { key, parent: name.parent, token_ids: name.token_ids.clone() }
    }
}

impl Offload {
    /// Over these tiers; tasks run on `runtime`.
    pub(crate) fn new(tiers: Arc<TieredStore>, runtime: Handle, metrics: Arc<EngineMetrics>) -> Self {
        let (puts, receiver) = mpsc::channel(PUT_QUEUE);
        runtime.spawn(put::run(Arc::clone(&tiers), receiver, Arc::clone(&metrics)));
        let (room, put_room) = (Arc::new(Semaphore::new(STAGED_KIB)), Arc::new(Semaphore::new(PUT_KIB)));
        let (fetches, arrivals) = (HashMap::new(), mpsc::channel(ARRIVALS));
        Self { tiers, runtime, puts, arrivals, fetches, num_fetches: 0, room, put_room, metrics, kind: None }
    }

    /// Tells what the engine's blocks are. Until then nothing moves.
    pub(crate) fn set_kind(&mut self, kind: BlockKind) {
        self.kind = Some(kind);
    }

    /// Asks the tiers for blocks, which would take as long to compute as the rate says.
    pub(crate) fn fetch(&mut self, wanted: Wanted, prefill_tokens_per_s: f64) {
        let Wanted { id, blocks } = wanted;
        let identities = match &self.kind {
            Some(kind) => blocks.iter().map(|name| kind.identity(name)).collect(),
            None => Vec::new(),
        };
        let payload_bytes = self.kind.map_or(0, |kind| kind.payload.bytes);
        self.num_fetches += 1;
        let number = self.num_fetches;
        let asked = Instant::now();
        let deadline = asked + hold(blocks.len(), prefill_tokens_per_s);
        let fetching = fetch::Fetching {
            fetch: FetchId { id, number },
            tiers: Arc::clone(&self.tiers),
            identities,
            payload_bytes,
            room: Arc::clone(&self.room),
            arrivals: self.arrivals.0.clone(),
            metrics: Arc::clone(&self.metrics),
        };
        let task = self.runtime.spawn(fetching.run()).abort_handle();
        self.fetches.insert(id, Fetch { number, asked, deadline, task });
    }

    /// Gives up on a sequence that is gone.
    pub(crate) fn forget(&mut self, id: RequestId) {
        if let Some(fetch) = self.fetches.remove(&id) {
            fetch.task.abort();
        }
    }

    /// Whether any sequence is held back.
    pub(crate) fn is_waiting(&self) -> bool {
        !self.fetches.is_empty()
    }

    /// What has arrived, and which holds are over.
    pub(crate) fn arrived(&mut self, prefill_tokens_per_s: f64) -> Vec<Staging> {
        let mut staged = Vec::new();
        while let Ok(arrival) = self.arrivals.1.try_recv() {
            staged.extend(self.take(arrival, prefill_tokens_per_s));
        }
        let now = Instant::now();
        let late = self.fetches.iter().filter(|(_, fetch)| fetch.deadline <= now);
        for (id, asked) in late.map(|(id, fetch)| (*id, fetch.asked)).collect::<Vec<_>>() {
            self.forget(id);
            self.metrics.kv.held((now - asked).as_secs_f64());
            self.metrics.kv.load("late", 0);
            staged.push(Staging { id, blocks: Vec::new(), is_last: true });
        }
        staged
    }

    /// Takes in one thing that a fetch tells; what of it is for the engine.
    pub(crate) fn take(&mut self, arrival: Arrival, prefill_tokens_per_s: f64) -> Option<Staging> {
        let (Arrival::Found { fetch: FetchId { id, number }, .. }
        | Arrival::Blocks { fetch: FetchId { id, number }, .. }
        | Arrival::End { fetch: FetchId { id, number } }) = arrival;
        let fetch = self.fetches.get_mut(&id).filter(|fetch| fetch.number == number)?;
        match arrival {
            Arrival::Found { num_blocks, .. } => {
                fetch.deadline = fetch.deadline.min(fetch.asked + hold(num_blocks, prefill_tokens_per_s));
                None
            }
            Arrival::Blocks { blocks, .. } => Some(Staging { id, blocks, is_last: false }),
            Arrival::End { .. } => {
                self.metrics.kv.held((Instant::now() - fetch.asked).as_secs_f64());
                self.fetches.remove(&id);
                Some(Staging { id, blocks: Vec::new(), is_last: true })
            }
        }
    }

    /// Waits until something arrives or a hold is over; for ever where nothing is awaited.
    pub(crate) async fn next(&mut self) -> Option<Arrival> {
        let deadline = self.fetches.values().map(|fetch| fetch.deadline).min();
        let Some(deadline) = deadline else { return std::future::pending().await };
        tokio::time::timeout_at(deadline, self.arrivals.1.recv()).await.unwrap_or_default()
    }

    /// Whether anything below outlives this process.
    pub(crate) fn outlives(&self) -> bool {
        self.tiers.outlives()
    }

    /// Whether another batch may go down now.
    pub(crate) fn can_put(&self) -> bool {
        let Some(kind) = &self.kind else { return false };
        let kib = (MAX_STORES * kind.payload.bytes).div_ceil(1024).min(PUT_KIB);
        !self.puts.is_closed() && self.puts.capacity() > 0 && self.put_room.available_permits() >= kib
    }

    /// Sends blocks down; where too many are on their way, they are lost.
    pub(crate) fn put(&mut self, stores: Vec<Store>, payloads: Vec<Bytes>) {
        let Some(kind) = self.kind else { return };
        let num_blocks = stores.len() as u64;
        let kib = payloads.iter().map(Bytes::len).sum::<usize>().div_ceil(1024).min(PUT_KIB) as u32;
        let room = Arc::clone(&self.put_room).try_acquire_many_owned(kib).ok();
        let send = |room| self.puts.try_send(PutJob::Blocks { kind, stores, payloads, room }).is_ok();
        if !room.is_some_and(send) {
            self.metrics.kv.lost(num_blocks);
        }
    }

    /// After all that was put: brings what is only in memory to where it outlives the process; the answer tells when.
    pub(crate) fn flush(&self, reply: oneshot::Sender<()>) -> Result<(), oneshot::Sender<()>> {
        match self.puts.try_reserve() {
            Ok(place) => {
                place.send(PutJob::Flush { reply });
                Ok(())
            }
            Err(_) => Err(reply),
        }
    }
}

/// How long computing blocks would take.
fn hold(num_blocks: usize, prefill_tokens_per_s: f64) -> Duration {
    if prefill_tokens_per_s > 0.0 {
        Duration::from_secs_f64(((num_blocks * BLOCK_SIZE) as f64 / prefill_tokens_per_s).min(3600.0))
    } else {
        UNMEASURED_HOLD
    }
}
