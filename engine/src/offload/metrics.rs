//! What is counted of blocks on their way: vLLM's names where they mean the same, `pagoda_kv_*` for the rest.
//!
//! Part of the engine's metrics; written by the loop and the offload's tasks.

use cache_tier::PlaceStats;
use cache_tier::metrics::PlaceMetrics;
use prometheus::{Histogram, IntCounter, IntCounterVec};
use protocol::{PutOutcome, PutReason};

use crate::metrics::{Cells, TTFT_S, raise};

/// The cells.
pub struct OffloadMetrics {
    asked_tokens: IntCounter,
    loaded_tokens: IntCounter,
    load_bytes: IntCounter,
    store_bytes: IntCounter,
    loads: IntCounterVec,
    stores: IntCounterVec,
    lost: IntCounter,
    holds: Histogram,
    places: PlaceMetrics,
}

impl OffloadMetrics {
    pub(crate) fn new(cells: &Cells<'_>) -> prometheus::Result<Self> {
        Ok(Self {
            asked_tokens: cells.counter(
                "vllm:external_prefix_cache_queries_total",
                "Prompt tokens that the KV tiers were asked for.",
            )?,
            loaded_tokens: cells
                .counter("vllm:external_prefix_cache_hits_total", "Prompt tokens taken up from the KV tiers.")?,
            load_bytes: cells.counter("vllm:kv_offload_load_bytes_total", "Bytes of KV blocks from the tiers.")?,
            store_bytes: cells.counter("vllm:kv_offload_store_bytes_total", "Bytes of KV blocks that tiers took.")?,
            loads: cells.counters(
                "pagoda_kv_loads_total",
                "KV blocks asked of the tiers: loaded, missing, busy or damaged; and requests whose blocks came late.",
                &["result"],
            )?,
            stores: cells.counters(
                "pagoda_kv_stores_total",
                "KV blocks offered to the tiers, by why and by what became of them.",
                &["reason", "outcome"],
            )?,
            lost: cells
                .counter("pagoda_kv_lost_total", "KV blocks that went faster than the tiers could take them.")?,
            holds: cells.histogram("pagoda_kv_hold_seconds", "Seconds that requests waited for the tiers.", &TTFT_S)?,
            places: PlaceMetrics::new(&cells.registry)?,
        })
    }

    /// The numbers of the tiers, when they are asked for.
    pub fn places(&self, stats: &[PlaceStats]) {
        self.places.refresh(stats);
    }

    pub(crate) fn tokens(&self, asked: u64, loaded: u64) {
        raise(&self.asked_tokens, asked);
        raise(&self.loaded_tokens, loaded);
    }

    /// A block that was asked for; `loaded` with its bytes.
    pub(crate) fn load(&self, result: &str, bytes: u64) {
        self.loads.with_label_values(&[result]).inc();
        self.load_bytes.inc_by(bytes);
    }

    pub(crate) fn store(&self, reason: PutReason, outcome: PutOutcome, bytes: u64) {
        self.stores.with_label_values(&[reason.as_str(), outcome.as_str()]).inc();
        if outcome == PutOutcome::Stored {
            self.store_bytes.inc_by(bytes);
        }
    }

    pub(crate) fn lost(&self, num_blocks: u64) {
        self.lost.inc_by(num_blocks);
    }

    pub(crate) fn held(&self, seconds: f64) {
        self.holds.observe(seconds);
    }
}
