//! The places' numbers for Prometheus.
//!
//! Registered by the engine and by `pagoda cache serve` beside their own, refreshed when they are scraped.

use std::sync::{Mutex, PoisonError};

use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use crate::store::PlaceStats;

/// One family a kind of number, labelled with the place.
#[derive(Debug)]
pub struct PlaceMetrics {
    blocks: IntGaugeVec,
    used_bytes: IntGaugeVec,
    capacity_bytes: IntGaugeVec,
    lookups: IntCounterVec,
    puts: IntCounterVec,
    evictions: IntCounterVec,
    read_bytes: IntCounterVec,
    written_bytes: IntCounterVec,
    /// Two scrapes at once would both raise a counter to where it is.
    refreshing: Mutex<()>,
}

impl PlaceMetrics {
    /// Registers the families.
    ///
    /// # Errors
    /// When a name is taken.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGaugeVec> {
            let family = IntGaugeVec::new(Opts::new(name, help), &["tier"])?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        let counter = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<IntCounterVec> {
            let family = IntCounterVec::new(Opts::new(name, help), labels)?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        Ok(Self {
            blocks: gauge("pagoda_kv_tier_blocks", "KV blocks that a tier holds.")?,
            used_bytes: gauge("pagoda_kv_tier_used_bytes", "Bytes that a tier takes.")?,
            capacity_bytes: gauge("pagoda_kv_tier_capacity_bytes", "Most bytes that a tier takes.")?,
            lookups: counter(
                "pagoda_kv_tier_lookups_total",
                "KV blocks that were asked of a tier: hit, miss, busy, or damaged (a miss as well).",
                &["tier", "result"],
            )?,
            puts: counter(
                "pagoda_kv_tier_puts_total",
                "KV blocks that were offered to a tier: stored, not-admitted (seen once) or refused (no room or time).",
                &["tier", "outcome"],
            )?,
            evictions: counter("pagoda_kv_tier_evictions_total", "KV blocks that made room in a tier.", &["tier"])?,
            read_bytes: counter("pagoda_kv_tier_read_bytes_total", "Bytes that a tier handed out.", &["tier"])?,
            written_bytes: counter("pagoda_kv_tier_written_bytes_total", "Bytes that a tier took in.", &["tier"])?,
            refreshing: Mutex::new(()),
        })
    }

    /// Brings the families to the places' present numbers.
    pub fn refresh(&self, all: &[PlaceStats]) {
        let _alone = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        for stats in all {
            let tier = stats.place.as_str();
            let gauges = [
                (&self.blocks, stats.num_blocks),
                (&self.used_bytes, stats.used_bytes),
                (&self.capacity_bytes, stats.capacity_bytes),
            ];
            for (family, value) in gauges {
                family.with_label_values(&[tier]).set(i64::try_from(value).unwrap_or(i64::MAX));
            }
            let raise = |family: &IntCounterVec, labels: &[&str], value: u64| {
                let counter = family.with_label_values(labels);
                counter.inc_by(value.saturating_sub(counter.get()));
            };
            let results =
                [("hit", stats.hits), ("miss", stats.misses), ("busy", stats.busy), ("damaged", stats.damaged)];
            results.iter().for_each(|(result, value)| raise(&self.lookups, &[tier, result], *value));
            let outcomes = [("stored", stats.stored), ("not-admitted", stats.not_admitted), ("refused", stats.refused)];
            outcomes.iter().for_each(|(outcome, value)| raise(&self.puts, &[tier, outcome], *value));
            raise(&self.evictions, &[tier], stats.evicted);
            raise(&self.read_bytes, &[tier], stats.read_bytes);
            raise(&self.written_bytes, &[tier], stats.written_bytes);
        }
    }
}
