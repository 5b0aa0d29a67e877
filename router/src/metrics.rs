//! What the router counts for Prometheus: `pagoda_router_*`.
//!
//! Registered once; gauges of workers and the index are set when they are scraped.

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};

use crate::fleet::Fleet;

/// The families.
#[derive(Clone, Debug)]
pub struct RouterMetrics {
    registry: Registry,
    /// By model and outcome.
    pub requests: IntCounterVec,
    /// By why the winner won.
    pub decisions: IntCounterVec,
    /// By worker.
    pub sent: IntCounterVec,
    /// Seconds to the first byte of an answer, by worker.
    pub ttft: HistogramVec,
    /// Seconds that the router itself takes to choose.
    pub pick: Histogram,
    /// Prompt tokens that were expected to be found, and that were: by worker.
    pub predicted_tokens: IntCounterVec,
    /// See above.
    pub hit_tokens: IntCounterVec,
    /// Prompt tokens, by worker.
    pub prompt_tokens: IntCounterVec,
    /// Tries after the first, by why.
    pub retries: IntCounterVec,
    /// Streams that went on elsewhere, by why.
    pub continuations: IntCounterVec,
    /// Streams that could not.
    pub broken: IntCounter,
    /// Rivals that were asked, and that won.
    pub hedges: IntCounterVec,
    /// Circuits that opened, by worker.
    pub opened: IntCounterVec,
    /// Changes that workers told.
    pub events: IntCounter,
    /// Streams of events that began anew, by worker.
    pub resyncs: IntCounterVec,
    circuit: IntGaugeVec,
    ready: IntGaugeVec,
    staleness: prometheus::GaugeVec,
    running: IntGaugeVec,
    index_chunks: IntGauge,
    index_bytes: IntGauge,
    index_refused: IntGauge,
}

impl RouterMetrics {
    /// Registers the families.
    ///
    /// # Errors
    /// When a name is taken.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let counters = |name: &str, help: &str, labels: &[&str]| -> prometheus::Result<IntCounterVec> {
            let family = IntCounterVec::new(Opts::new(format!("pagoda_router_{name}"), help), labels)?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        let counter = |name: &str, help: &str| -> prometheus::Result<IntCounter> {
            let family = IntCounter::new(format!("pagoda_router_{name}"), help)?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        let gauges = |name: &str, help: &str| -> prometheus::Result<IntGaugeVec> {
            let family = IntGaugeVec::new(Opts::new(format!("pagoda_router_{name}"), help), &["worker"])?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        let gauge = |name: &str, help: &str| -> prometheus::Result<IntGauge> {
            let family = IntGauge::new(format!("pagoda_router_{name}"), help)?;
            registry.register(Box::new(family.clone()))?;
            Ok(family)
        };
        let ttft = HistogramOpts::new("pagoda_router_ttft_seconds", "From a request to the first byte of its answer.")
            .buckets(vec![0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0]);
        let ttft = HistogramVec::new(ttft, &["worker"])?;
        let pick = HistogramOpts::new("pagoda_router_pick_seconds", "What the choice of a worker takes.")
            .buckets(vec![1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3]);
        let pick = Histogram::with_opts(pick)?;
        let staleness = Opts::new("pagoda_router_staleness_seconds", "Since a worker was last heard.");
        let staleness = prometheus::GaugeVec::new(staleness, &["worker"])?;
        registry.register(Box::new(ttft.clone()))?;
        registry.register(Box::new(pick.clone()))?;
        registry.register(Box::new(staleness.clone()))?;
        Ok(Self {
            registry: registry.clone(),
            requests: counters("requests_total", "Requests, by how they ended.", &["model", "outcome"])?,
            decisions: counters("decisions_total", "Choices, by why the winner won.", &["reason"])?,
            sent: counters("sent_total", "Requests sent to a worker.", &["worker"])?,
            ttft,
            pick,
            predicted_tokens: counters("predicted_hit_tokens_total", "Tokens expected in a cache.", &["worker"])?,
            hit_tokens: counters("hit_tokens_total", "Tokens found in a cache.", &["worker"])?,
            prompt_tokens: counters("prompt_tokens_total", "Tokens of prompts.", &["worker"])?,
            retries: counters("retries_total", "Tries after the first, before a first token.", &["reason"])?,
            continuations: counters("continuations_total", "Streams that went on elsewhere.", &["reason"])?,
            broken: counter("broken_streams_total", "Streams that could not go on.")?,
            hedges: counters("hedges_total", "Rivals of silent workers.", &["outcome"])?,
            opened: counters("circuit_opened_total", "Circuits that opened.", &["worker"])?,
            events: counter("events_total", "Chunks that workers told to hold or to hold no longer.")?,
            resyncs: counters("resyncs_total", "Streams of events that ended.", &["worker"])?,
            circuit: gauges("circuit_open", "1 while a worker is not asked.")?,
            ready: gauges("worker_ready", "1 while a worker takes requests.")?,
            staleness,
            running: gauges("requests_running", "Requests at a worker.")?,
            index_chunks: gauge("index_chunks", "Chunks of prompts in the index.")?,
            index_bytes: gauge("index_bytes", "Memory of index and estimates, about.")?,
            index_refused: gauge("index_refused_chunks", "Chunks that found no room in the index.")?,
        })
    }

    /// A worker is gone: its series end.
    pub fn forget(&self, worker: &str) {
        let labels = &[worker];
        for family in [&self.sent, &self.predicted_tokens, &self.hit_tokens, &self.prompt_tokens, &self.opened] {
            // One that was never counted has none.
            drop(family.remove_label_values(labels));
        }
        for family in [&self.circuit, &self.ready, &self.running] {
            drop(family.remove_label_values(labels));
        }
        drop(self.resyncs.remove_label_values(labels));
        drop(self.staleness.remove_label_values(labels));
        drop(self.ttft.remove_label_values(labels));
    }

    /// All of it as text, with the fleet as it is.
    pub fn render(&self, fleet: &Fleet) -> String {
        for worker in fleet.workers().iter() {
            let labels = &[&*worker.name];
            let told = worker.told();
            let ready = worker.is_fresh() && told.report.is_some_and(|report| report.ready);
            self.circuit.with_label_values(labels).set(i64::from(!worker.is_circuit_closed()));
            self.ready.with_label_values(labels).set(i64::from(ready));
            self.running.with_label_values(labels).set(worker.num_requests() as i64);
            let age = told.at.map_or(f64::INFINITY, |at| at.elapsed().as_secs_f64());
            self.staleness.with_label_values(labels).set(age);
        }
        let shared = fleet.shared();
        self.index_chunks.set(shared.index.len() as i64);
        self.index_bytes.set((shared.index.num_bytes() + shared.estimates.num_bytes()) as i64);
        self.index_refused.set(shared.index.num_refused() as i64);
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap_or_default()
    }
}
