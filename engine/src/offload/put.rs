//! The way down: frames are made here, off the engine's thread, and offered to the tiers a batch at a time.
//!
//! One task behind a bounded queue. A slow tier fills the queue; what does not fit is lost, and counted.

use std::sync::Arc;

use bytes::Bytes;
use cache_tier::{Store as _, TieredStore};
use protocol::{KvFrame, PutOutcome, PutReason};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};

use super::BlockKind;
use crate::kv::Store;
use crate::metrics::EngineMetrics;

#[derive(Debug)]
pub(super) enum PutJob {
    /// Blocks that left the pool together.
    Blocks { kind: BlockKind, stores: Vec<Store>, payloads: Vec<Bytes>, room: OwnedSemaphorePermit },
    /// The end of a drain.
    Flush { reply: oneshot::Sender<()> },
}

pub(super) async fn run(tiers: Arc<TieredStore>, mut jobs: mpsc::Receiver<PutJob>, metrics: Arc<EngineMetrics>) {
    let mut drained = Drained::default();
    while let Some(job) = jobs.recv().await {
        match job {
            PutJob::Blocks { kind, stores, payloads, room } => {
                put(&tiers, kind, stores, payloads, &metrics, &mut drained).await;
                drop(room);
            }
            PutJob::Flush { reply } => {
                let from_memory = tiers.drain_host().await;
                tiers.sync().await;
                let Drained { kept, lost } = std::mem::take(&mut drained);
                if lost > 0 {
                    tracing::warn!(from_device = kept, from_memory, lost, "KV blocks are drained, but not all");
                } else {
                    tracing::info!(from_device = kept, from_memory, "KV blocks are drained");
                }
                // Who asked has given up where nobody listens.
                let _gone = reply.send(());
            }
        }
    }
}

/// What became of the blocks of a drain.
#[derive(Debug, Default)]
struct Drained {
    kept: usize,
    lost: usize,
}

async fn put(
    tiers: &TieredStore,
    kind: BlockKind,
    stores: Vec<Store>,
    payloads: Vec<Bytes>,
    metrics: &EngineMetrics,
    drained: &mut Drained,
) {
    let mut by_reason: [Vec<KvFrame>; PutReason::ALL.len()] = Default::default();
    for (store, payload) in stores.into_iter().zip(payloads) {
        // What a step computed wrongly must not be found by others, now or after a restart.
        if !kind.payload.is_finite(&payload) {
            tracing::warn!(block = %store.name.hash, "a KV block that holds a NaN or an infinity is not kept");
            continue;
        }
        let frame = KvFrame::new(kind.identity(&store.name), kind.numerics, payload);
        if let Some(index) = PutReason::ALL.iter().position(|&reason| reason == store.reason) {
            by_reason[index].push(frame);
        }
    }
    for (frames, reason) in by_reason.into_iter().zip(PutReason::ALL).filter(|(frames, _)| !frames.is_empty()) {
        let bytes: Vec<u64> = frames.iter().map(|frame| frame.payload.len() as u64).collect();
        let outcomes = tiers.put(frames, reason).await;
        for (outcome, bytes) in outcomes.into_iter().zip(bytes) {
            metrics.kv.store(reason, outcome, bytes);
            if reason == PutReason::Drain {
                let is_kept = matches!(outcome, PutOutcome::Stored | PutOutcome::Present);
                *(if is_kept { &mut drained.kept } else { &mut drained.lost }) += 1;
            }
        }
    }
}
