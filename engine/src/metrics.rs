//! What an engine counts for Prometheus: vLLM's names, labels and buckets where they mean the same, `pagoda_*` for the rest.
//!
//! Written by the engine loop and the server, rendered by `GET /metrics`. Every cell is an atomic, so writers never wait for
//! who scrapes.

use prometheus::core::Collector;
use prometheus::{
    Encoder, Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};

use crate::engine_loop::{EngineStats, Shape};
use crate::error::LoadError;
use crate::kv::BLOCK_SIZE;
use crate::offload::OffloadMetrics;
use crate::scheduler::SchedulerCounters;

/// Buckets of the time to the first token, seconds.
pub(crate) const TTFT_S: [f64; 22] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Buckets of the time between two tokens, seconds.
const ITL_S: [f64; 19] =
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Buckets of whole requests, seconds.
const REQUEST_S: [f64; 21] = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Buckets of a step's tokens.
const STEP_TOKENS: [f64; 13] =
    [1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16_384.0];
/// Buckets of a step, seconds.
const STEP_S: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0];

/// A request that has left the engine.
#[derive(Clone, Copy, Debug)]
pub struct FinishedRequest {
    /// `stop`, `length`, `abort` or `error`.
    pub reason: &'static str,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens of its answer.
    pub generation_tokens: usize,
    /// Tokens that it asked for at most.
    pub max_tokens: usize,
    /// Arrival to end.
    pub e2e_s: f64,
    /// Arrival to start.
    pub queue_s: Option<f64>,
    /// Start to first token.
    pub prefill_s: Option<f64>,
    /// First token to last.
    pub decode_s: Option<f64>,
}

/// All cells, in the order in which they are registered below.
pub struct EngineMetrics {
    registry: Registry,
    waiting: IntGauge,
    running: IntGauge,
    kv_usage: Gauge,
    prefix_queries: IntCounter,
    prefix_hits: IntCounter,
    preemptions: IntCounter,
    prompt_tokens: IntCounter,
    prefill_tokens: IntCounter,
    generation_tokens: IntCounter,
    success: IntCounterVec,
    ttft: Histogram,
    itl: Histogram,
    tpot: Histogram,
    e2e: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    request_max_tokens: Histogram,
    request_n: Histogram,
    step_tokens: Histogram,
    prefill_step: Histogram,
    decode_step: Histogram,
    batch_size: Histogram,
    dispatches: IntCounter,
    device_memory: IntGauge,
    wasted_tokens: IntGauge,
    cached_blocks: IntGauge,
    tokens_by_key: IntCounterVec,
    /// Blocks between the pool and the tiers.
    pub(crate) kv: OffloadMetrics,
}

/// Registers cells under the labels that all of vLLM's have.
pub(crate) struct Cells<'a> {
    pub(crate) registry: Registry,
    model_name: &'a str,
}

impl Cells<'_> {
    fn opts(&self, name: &str, help: &str) -> Opts {
        Opts::new(name, help).const_label("model_name", self.model_name).const_label("engine", "0")
    }

    fn register<C: Collector + Clone + 'static>(&self, cell: prometheus::Result<C>) -> prometheus::Result<C> {
        let cell = cell?;
        self.registry.register(Box::new(cell.clone()))?;
        Ok(cell)
    }

    pub(crate) fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.register(IntCounter::with_opts(self.opts(name, help)))
    }

    pub(crate) fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        self.register(IntCounterVec::new(self.opts(name, help), labels))
    }

    pub(crate) fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.register(IntGauge::with_opts(self.opts(name, help)))
    }

    pub(crate) fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        let opts = HistogramOpts { common_opts: self.opts(name, help), buckets: buckets.to_vec() };
        self.register(Histogram::with_opts(opts))
    }

    fn step(&self, phase: &str) -> prometheus::Result<Histogram> {
        let opts = self.opts("pagoda_step_seconds", "Seconds of a step, by whether it held prompt tokens.");
        let opts = HistogramOpts { common_opts: opts.const_label("phase", phase), buckets: STEP_S.to_vec() };
        self.register(Histogram::with_opts(opts))
    }

    /// A gauge that is always 1 and tells sizes by its labels.
    fn cache_config_info(&self, shape: &Shape) -> prometheus::Result<()> {
        let opts = self.opts("vllm:cache_config_info", "Information of the KV cache, as labels.");
        let opts = opts.const_label("block_size", BLOCK_SIZE.to_string());
        let opts = opts.const_label("num_gpu_blocks", shape.num_blocks.to_string());
        self.register(IntGauge::with_opts(opts))?.set(1);
        Ok(())
    }
}

impl EngineMetrics {
    /// Cells of an engine of these sizes, all zero.
    ///
    /// # Errors
    /// When the model's name cannot be a label.
    pub fn new(model_name: &str, shape: &Shape) -> Result<Self, LoadError> {
        let cells = Cells { registry: Registry::new(), model_name };
        Self::registered(cells, shape).map_err(|error| LoadError::Setting(format!("metrics: {error}")))
    }

    fn registered(cells: Cells<'_>, shape: &Shape) -> prometheus::Result<Self> {
        cells.cache_config_info(shape)?;
        let lengths = one_two_five(shape.max_model_len);
        let seconds = |name: &str, help: &str| cells.histogram(name, help, &REQUEST_S);
        let tokens = |name: &str, help: &str| cells.histogram(name, help, &lengths);
        let usage = cells.opts("vllm:kv_cache_usage_perc", "Part of the KV blocks that sequences hold, 0 to 1.");
        Ok(Self {
            waiting: cells.gauge("vllm:num_requests_waiting", "Requests that wait.")?,
            running: cells.gauge("vllm:num_requests_running", "Requests that run.")?,
            kv_usage: cells.register(Gauge::with_opts(usage))?,
            prefix_queries: cells
                .counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the cache.")?,
            prefix_hits: cells.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the cache.")?,
            preemptions: cells.counter("vllm:num_preemptions_total", "Sequences that lost their KV blocks.")?,
            prompt_tokens: cells
                .counter("vllm:prompt_tokens_total", "Prompt tokens of requests that have their first token.")?,
            prefill_tokens: cells
                .counter("pagoda_prefill_tokens_total", "Tokens computed in prefill, after preemption too.")?,
            generation_tokens: cells.counter("vllm:generation_tokens_total", "Tokens generated.")?,
            success: cells.counters(
                "vllm:request_success_total",
                "Requests that ended, by why.",
                &["finished_reason"],
            )?,
            ttft: cells.histogram("vllm:time_to_first_token_seconds", "Seconds to the first token.", &TTFT_S)?,
            itl: cells.histogram("vllm:inter_token_latency_seconds", "Seconds between tokens.", &ITL_S)?,
            tpot: cells.histogram(
                "vllm:request_time_per_output_token_seconds",
                "A request's mean seconds between tokens.",
                &ITL_S,
            )?,
            e2e: seconds("vllm:e2e_request_latency_seconds", "Seconds from arrival to end.")?,
            queue: seconds("vllm:request_queue_time_seconds", "Seconds from arrival to start.")?,
            inference: seconds("vllm:request_inference_time_seconds", "Seconds from start to last token.")?,
            prefill: seconds("vllm:request_prefill_time_seconds", "Seconds from start to first token.")?,
            decode: seconds("vllm:request_decode_time_seconds", "Seconds from first token to last.")?,
            request_prompt_tokens: tokens("vllm:request_prompt_tokens", "Prompt tokens of a request.")?,
            request_generation_tokens: tokens("vllm:request_generation_tokens", "Tokens of an answer.")?,
            request_max_tokens: tokens("vllm:request_params_max_tokens", "Tokens asked for at most.")?,
            request_n: cells.histogram("vllm:request_params_n", "Answers asked for.", &[1.0, 2.0, 5.0, 10.0, 20.0])?,
            step_tokens: cells.histogram("vllm:iteration_tokens_total", "Tokens of a step.", &STEP_TOKENS)?,
            prefill_step: cells.step("prefill")?,
            decode_step: cells.step("decode")?,
            batch_size: cells.histogram("pagoda_step_decodes", "Streams that took a token in a step.", &STEP_TOKENS)?,
            dispatches: cells.counter("pagoda_dispatches_total", "Kernels dispatched.")?,
            device_memory: cells.gauge("pagoda_device_memory_bytes", "Device memory allocated.")?,
            wasted_tokens: cells.gauge("pagoda_kv_wasted_tokens", "Token slots that are held and empty.")?,
            cached_blocks: cells.gauge("pagoda_kv_cached_blocks", "KV blocks that can be found by their name.")?,
            tokens_by_key: cells.counters("pagoda_tokens_total", "Tokens, by API key and kind.", &["key", "kind"])?,
            kv: OffloadMetrics::new(&cells)?,
            registry: cells.registry,
        })
    }

    /// Everything in Prometheus' text format.
    ///
    /// # Errors
    /// When a cell cannot be written: a bug.
    pub fn render(&self) -> prometheus::Result<String> {
        let mut text = Vec::with_capacity(64 << 10);
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// A request's number of answers, at the door.
    pub fn asked(&self, n: usize) {
        self.request_n.observe(n as f64);
    }

    /// Tokens of an answered request, by the name of its API key.
    pub fn used_by_key(&self, key: &str, prompt_tokens: usize, generation_tokens: usize) {
        self.tokens_by_key.with_label_values(&[key, "prompt"]).inc_by(prompt_tokens as u64);
        self.tokens_by_key.with_label_values(&[key, "generation"]).inc_by(generation_tokens as u64);
    }

    pub(crate) fn first_token(&self, prompt_tokens: usize, seconds: f64) {
        self.prompt_tokens.inc_by(prompt_tokens as u64);
        self.generation_tokens.inc();
        self.ttft.observe(seconds);
    }

    pub(crate) fn inter_token(&self, seconds: f64) {
        self.generation_tokens.inc();
        self.itl.observe(seconds);
    }

    pub(crate) fn step(&self, num_decodes: usize, num_prefill_tokens: usize, seconds: f64) {
        self.prefill_tokens.inc_by(num_prefill_tokens as u64);
        self.step_tokens.observe((num_decodes + num_prefill_tokens) as f64);
        self.batch_size.observe(num_decodes as f64);
        let phase = if num_prefill_tokens > 0 { &self.prefill_step } else { &self.decode_step };
        phase.observe(seconds);
    }

    pub(crate) fn state(&self, stats: &EngineStats, num_blocks: usize, counters: SchedulerCounters, wasted: usize) {
        self.waiting.set(stats.num_waiting as i64);
        self.running.set(stats.num_running as i64);
        self.kv_usage.set(stats.num_used_blocks as f64 / num_blocks.max(1) as f64);
        self.wasted_tokens.set(wasted as i64);
        self.cached_blocks.set(stats.num_cached_blocks as i64);
        raise(&self.prefix_queries, counters.num_queried_tokens);
        raise(&self.prefix_hits, counters.num_hit_tokens);
        raise(&self.preemptions, counters.num_preemptions);
        self.kv.tokens(counters.num_asked_tokens, counters.num_loaded_tokens);
    }

    pub(crate) fn device(&self, num_dispatches: u64, memory_bytes: u64) {
        raise(&self.dispatches, num_dispatches);
        self.device_memory.set(i64::try_from(memory_bytes).unwrap_or(i64::MAX));
    }

    pub(crate) fn finished(&self, request: &FinishedRequest) {
        self.success.with_label_values(&[request.reason]).inc();
        self.e2e.observe(request.e2e_s);
        self.request_prompt_tokens.observe(request.prompt_tokens as f64);
        self.request_generation_tokens.observe(request.generation_tokens as f64);
        self.request_max_tokens.observe(request.max_tokens as f64);
        let observe = |cell: &Histogram, seconds: Option<f64>| {
            if let Some(seconds) = seconds {
                cell.observe(seconds);
            }
        };
        observe(&self.queue, request.queue_s);
        observe(&self.prefill, request.prefill_s);
        observe(&self.decode, request.decode_s);
        observe(&self.inference, request.prefill_s.zip(request.decode_s).map(|(prefill, decode)| prefill + decode));
        let between = request.generation_tokens.saturating_sub(1);
        observe(&self.tpot, request.decode_s.filter(|_| between > 0).map(|seconds| seconds / between as f64));
    }
}

/// Brings a counter up to a sum that is kept elsewhere.
pub(crate) fn raise(counter: &IntCounter, sum: u64) {
    counter.inc_by(sum.saturating_sub(counter.get()));
}

/// 1, 2, 5, 10, ... up to `max`: vLLM's buckets of token counts.
fn one_two_five(max: usize) -> Vec<f64> {
    let decades = (0..).map(|exponent| 10f64.powi(exponent));
    decades.flat_map(|decade| [decade, 2.0 * decade, 5.0 * decade]).take_while(|bound| *bound <= max as f64).collect()
}
