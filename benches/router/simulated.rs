//! Many simulated engines and the router in one process, on paused time over pipes; and the choice itself, among many workers.
//!
//! What the clock says is what the engines' profile says: how long the process itself takes does not count.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use engine::chat_template::ChatTemplate;
use engine::config::EngineConfig;
use engine::engine_loop;
use engine::server::{self, ConnectionLimits, Server, ServerConfig};
use engine::sim::SimProfile;
use engine::tokenizer::Tokenizer;
use futures_util::future::BoxFuture;
use protocol::HeldChunk;
use protocol::prompt_chain::Chunk;
use router::Router;
use router::config::RouterConfig;
use router::index::Index;
use router::pick::{Ask, View, pick};
use router::policies::Preset;
use router::ring::{Ring, RingWorker};
use router::worker::connection::{Connector, Io};
use router::worker::{Kind, WorkerConfig};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::watch;
use tokio::time::Instant;

use super::measure::percentile;
use super::traces::{self, Traced};

/// Prompts, answers and pools are an eighth of what they were, and each token takes eight times as long: requests take what they
/// took, in steps that are coarser.
const SCALE: u64 = 8;
/// Tokens of a trace's block.
const BLOCK_TOKENS: u64 = 512 / SCALE;

/// Engines by their addresses.
struct Pipes {
    engines: HashMap<String, axum::Router>,
    stop: watch::Receiver<bool>,
}

impl Connector for Pipes {
    fn connect<'a>(&'a self, address: &'a str) -> BoxFuture<'a, io::Result<Box<dyn Io>>> {
        let routes = self.engines.get(address).cloned();
        let stop = self.stop.clone();
        Box::pin(async move {
            let routes = routes.ok_or(io::ErrorKind::ConnectionRefused)?;
            let (near, far) = tokio::io::duplex(1 << 20);
            tokio::spawn(server::serve_connection(far, routes, ConnectionLimits::internal(), stop));
            Ok(Box::new(near) as Box<dyn Io>)
        })
    }
}

/// A cluster in this process.
struct Cluster {
    routes: axum::Router,
    router: Arc<Router>,
    _stop: watch::Sender<bool>,
    stop: watch::Receiver<bool>,
}

impl Cluster {
    async fn start(profiles: Vec<SimProfile>, preset: Preset) -> Self {
        let (sender, stop) = watch::channel(false);
        let (mut engines, mut workers) = (HashMap::new(), Vec::new());
        for (number, profile) in profiles.into_iter().enumerate() {
            let mut config = EngineConfig::new(PathBuf::new(), "m");
            config.max_step_ms = 100.0 * SCALE as f64;
            config.max_queue = 100_000;
            let tokenizer = Arc::new(Tokenizer::bytes4());
            let engine = engine_loop::spawn_sim(&config, profile, Arc::clone(&tokenizer), None).unwrap();
            let names = ServerConfig { served_model_names: vec!["m".into()], ..Default::default() };
            let server = Server::new(engine, tokenizer, Some(ChatTemplate::plain().unwrap()), names);
            engines.insert(format!("engine-{number}:1"), server::internal_router(server, None));
            workers.push(WorkerConfig {
                name: format!("engine-{number}"),
                kind: Kind::Pagoda,
                address: format!("engine-{number}:1"),
                models: Vec::new(),
                authorization: None,
            });
        }
        let config = RouterConfig { weights: preset.weights(), ..Default::default() };
        let pipes = Arc::new(Pipes { engines, stop: stop.clone() });
        let router = Router::new(config, &prometheus::Registry::new(), pipes).unwrap();
        router.fleet().set(workers);
        while router.models().is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let routes = router::server::routes(Arc::clone(&router));
        Self { routes, router, _stop: sender, stop }
    }

    /// Asks for a completion; the seconds to its first token.
    async fn ask(&self, prompt: &str, max_tokens: u64) -> f64 {
        let began = Instant::now();
        let (near, far) = tokio::io::duplex(1 << 20);
        let limits = ConnectionLimits::default();
        tokio::spawn(server::serve_connection(far, self.routes.clone(), limits, self.stop.clone()));
        let body =
            format!(r#"{{"model":"m","prompt":"{prompt}","max_tokens":{max_tokens},"ignore_eos":true,"stream":true}}"#);
        let (read, mut write) = tokio::io::split(near);
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        write.write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).await.unwrap();
        let mut lines = BufReader::new(read).lines();
        let mut first = None;
        while let Some(line) = lines.next_line().await.unwrap() {
            assert!(!line.contains("\"error\""), "{line}");
            if line.starts_with("data: {") {
                first.get_or_insert_with(|| began.elapsed().as_secs_f64());
            }
            if line == "data: [DONE]" {
                return first.unwrap();
            }
        }
        panic!("a stream ended early");
    }

    /// The part of all prompt tokens that was found in caches.
    fn hit_rate(&self) -> f64 {
        let page = self.router.metrics_text();
        let sum = |name: &str| {
            let lines = page.lines().filter(|line| line.starts_with(name));
            lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum::<f64>()
        };
        sum("pagoda_router_hit_tokens_total") / sum("pagoda_router_prompt_tokens_total")
    }
}

fn on_paused_time<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(work)
}

/// An 8B model on a GPU of the middle, each token eight times as long, and as fast as `speed` of those.
fn profile(speed: f64, kv_blocks: usize) -> SimProfile {
    let mut profile = SimProfile::load("l40s").unwrap();
    let factor = SCALE as f64 / speed;
    profile.step_ms *= factor;
    profile.decode_ms *= factor;
    profile.decode_ms_per_sequence *= factor;
    profile.prefill_ms_per_token *= factor;
    profile.kv_blocks = kv_blocks;
    profile
}

/// The text of a request of the trace: four letters a token, the same for the same block.
fn text(request: &Traced) -> String {
    let letters = (request.input / SCALE).max(1) as usize * 4;
    let mut text = String::with_capacity(letters + 2048);
    for &block in &request.blocks {
        for at in 0..BLOCK_TOKENS {
            let hash = (block * 1_000_003 + at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            text.extend((0..4).map(|letter| char::from(b'a' + (hash >> (8 + 5 * letter)) as u8 % 26)));
        }
    }
    text.truncate(letters);
    text
}

fn output(request: &Traced) -> u64 {
    (request.output / SCALE).max(1)
}

/// What one cache without bounds would find.
fn infinite_hits(trace: &[Traced]) -> f64 {
    let (mut seen, mut hits, mut all) = (HashSet::new(), 0, 0);
    for request in trace {
        let mut is_prefix = true;
        let mut tokens = 0;
        for &block in &request.blocks {
            is_prefix &= !seen.insert(block);
            tokens += if is_prefix { 512 } else { 0 };
        }
        hits += tokens.min(request.input);
        all += request.input;
    }
    hits as f64 / all as f64
}

const ENGINES: usize = 16;
/// Sends requests, at most so many at once; or each at its time, `factor` times as long after the first. Requests a second and
/// the times to first tokens.
async fn replay(
    cluster: Cluster,
    trace: Arc<Vec<Traced>>,
    at_once: usize,
    factor: Option<f64>,
) -> (f64, Vec<f64>, f64) {
    let cluster = Arc::new(cluster);
    let (began, times) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
    let places = Arc::new(tokio::sync::Semaphore::new(at_once));
    let mut tasks = Vec::with_capacity(trace.len());
    for index in 0..trace.len() {
        if let Some(factor) = factor {
            tokio::time::sleep_until(began + Duration::from_secs_f64(trace[index].at_ms as f64 / 1e3 * factor)).await;
        }
        let place = Arc::clone(&places).acquire_owned().await.unwrap();
        let (cluster, trace, times) = (Arc::clone(&cluster), Arc::clone(&trace), Arc::clone(&times));
        tasks.push(tokio::spawn(async move {
            let request = &trace[index];
            let first = cluster.ask(&text(request), output(request)).await;
            times.lock().unwrap().push(first);
            drop(place);
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    let rate = trace.len() as f64 / began.elapsed().as_secs_f64();
    let times = std::mem::take(&mut *times.lock().unwrap());
    (rate, times, cluster.hit_rate())
}

pub fn trace() {
    let trace = Arc::new(traces::conversation());
    let distinct = trace.iter().flat_map(|request| &request.blocks).collect::<HashSet<_>>().len();
    let kv_blocks = distinct * BLOCK_TOKENS as usize / 16 / 3 / ENGINES;
    let infinite = infinite_hits(&trace);
    println!(
        "trace: {} requests, {distinct} distinct blocks, {ENGINES} engines of {kv_blocks} KV blocks; one infinite cache finds {:.2} %",
        trace.len(),
        infinite * 100.0
    );
    let mut saturation = 0.0;
    for preset in [Preset::RoundRobin, Preset::LlmDDefault, Preset::Pagoda] {
        let name = preset.name();
        let run = async {
            let cluster = Cluster::start(vec![profile(1.0, kv_blocks); ENGINES], preset).await;
            replay(cluster, Arc::clone(&trace), ENGINES * 24, None).await
        };
        let (rate, _, hits) = on_paused_time(run);
        if preset == Preset::RoundRobin {
            saturation = rate;
        }
        println!(
            "  {name:14} saturates at {rate:.2} requests/s ({:.2} of round-robin), hits {:.2} % ({:.3} of infinite)",
            rate / saturation,
            hits * 100.0,
            hits / infinite
        );
    }
    // The rate at which round-robin saturates, open loop.
    let seconds = trace.last().unwrap().at_ms as f64 / 1e3;
    let factor = trace.len() as f64 / seconds / saturation;
    for preset in [Preset::RoundRobin, Preset::LlmDDefault, Preset::Pagoda] {
        let name = preset.name();
        let run = async {
            let cluster = Cluster::start(vec![profile(1.0, kv_blocks); ENGINES], preset).await;
            replay(cluster, Arc::clone(&trace), usize::MAX >> 4, Some(factor)).await
        };
        let (_, times, hits) = on_paused_time(run);
        let of = |part| percentile(&times, part);
        println!(
            "  {name:14} at that rate: TTFT p50 {:.2} s, p90 {:.2} s, hits {:.2} %",
            of(0.5),
            of(0.9),
            hits * 100.0
        );
    }
}

/// Engines of unequal speeds, prompts of unequal lengths, at 70 % of what all of them can do.
pub fn unequal() {
    const SPEEDS: [f64; 4] = [1.0, 1.0, 4.0, 16.0];
    const COUNT: usize = 3000;
    let request = |number: u64| Traced {
        at_ms: 0,
        input: 512 + number * 7919 % 64 * 64,
        output: 64 + number * 104_729 % 32 * 8,
        blocks: (0..12).map(|at| number * 1000 + at).collect(),
    };
    let requests: Vec<Traced> = (0..COUNT as u64).map(request).collect();
    let engines = || SPEEDS.iter().map(|&speed| profile(speed, 12_000)).collect::<Vec<_>>();
    // What each can do alone, and how long an unloaded one takes.
    let mut capacity = 0.0;
    let mut unloaded = Vec::new();
    for &speed in &SPEEDS {
        let run = async {
            let cluster = Cluster::start(vec![profile(speed, 12_000)], Preset::LeastLoad).await;
            let some = Arc::new((0..200).map(request).collect::<Vec<_>>());
            let (rate, ..) = replay(cluster, some, 48, None).await;
            let cluster = Cluster::start(vec![profile(speed, 12_000)], Preset::LeastLoad).await;
            let few = Arc::new((0..20).map(request).collect::<Vec<_>>());
            let (_, times, _) = replay(cluster, few, 1, None).await;
            (rate, times)
        };
        let (rate, times) = on_paused_time(run);
        capacity += rate;
        unloaded.extend(times);
    }
    let (rate, limit) = (0.7 * capacity, 2.0 * percentile(&unloaded, 0.5));
    println!(
        "unequal: engines of speeds {SPEEDS:?} can do {:.2} requests/s; at 70 %, first tokens within {:.2} s",
        capacity, limit
    );
    let mut of_pagoda = 0.0;
    for preset in Preset::ALL {
        let name = preset.name();
        // Poisson arrivals, the same for all.
        let (mut at, mut state) = (0.0, 7u64);
        let timed = requests.iter().map(|request| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            at += -((((state >> 11) as f64 + 1.0) / (1u64 << 53) as f64).ln()) / rate;
            Traced { at_ms: (at * 1e3) as u64, blocks: request.blocks.clone(), ..*request }
        });
        let timed = Arc::new(timed.collect::<Vec<_>>());
        let run = async {
            let cluster = Cluster::start(engines(), preset).await;
            replay(cluster, timed, usize::MAX >> 4, Some(1.0)).await
        };
        let (_, times, _) = on_paused_time(run);
        let good = times.iter().filter(|time| **time <= limit).count() as f64 / COUNT as f64 * rate;
        if preset == Preset::Pagoda {
            of_pagoda = good;
        }
        let (p50, p90) = (percentile(&times, 0.5), percentile(&times, 0.9));
        println!(
            "  {name:14} goodput {good:.2}/s (pagoda's is {:.2} of it), TTFT p50 {p50:.2} s, p90 {p90:.2} s",
            of_pagoda / good
        );
    }
}

/// Choosing among so many workers for a prompt, of which some hold parts.
pub fn pick_among(count: usize, chain: &[Chunk], held: impl Fn(&[Chunk]) -> Vec<HeldChunk>) {
    let index = Index::new(usize::MAX);
    for worker in 0..count {
        index.store(worker as u16, &held(&chain[..chain.len() * (worker + 1) / count]));
    }
    let worker = |place: usize| RingWorker { name: format!("worker-{place}"), place, weight: 1 };
    let ring = Ring::new((0..count).map(worker).collect());
    let view = |place: usize| View {
        name: format!("worker-{place}").into(),
        serves: true,
        ready: true,
        draining: false,
        circuit_closed: true,
        fresh: true,
        max_model_len: 131_072,
        num_requests: place % 7,
        num_waiting: 0,
        max_num_seqs: 64,
        queued_tokens: (place % 13) as f64 * 1000.0,
        prefill_tokens_per_s: 10_000.0,
        decode_step_s: 0.02,
        bytes_per_token: 4.0,
        seconds_a_place: 0.1,
        kv_used: 0.5,
        held_tokens: 0.0,
        held_share: 0.0,
        recent_requests: (place % 7) as f64,
        weight: 1,
    };
    let views: Vec<View> = (0..count).map(view).collect();
    let weights = Preset::Pagoda.weights();
    let mut times = Vec::new();
    for round in 0..200 {
        let mut views = views.clone();
        let started = Instant::now();
        for held in index.held(chain) {
            let view = &mut views[usize::from(held.slot)];
            view.held_tokens = f64::from(held.num_tokens);
            view.held_share = held.num_chunks as f64 / chain.len() as f64;
        }
        let walk = ring.walk(round).take(16).collect();
        let ask = Ask { num_tokens: 100_000.0, walk, seed: round, ..Default::default() };
        let decision = pick(&ask, &views, &weights);
        times.push(started.elapsed().as_secs_f64());
        assert_eq!(decision.order.len(), count);
    }
    times.sort_by(f64::total_cmp);
    println!(
        "pick: {count} workers, {} chunks of a prompt of 100,000 tokens: {:.2} ms median, {:.2} ms p99",
        chain.len(),
        times[100] * 1e3,
        times[197] * 1e3
    );
}

/// llm-d's shape of prompts that share their beginnings, a sixteenth of it: the beginnings are 2.9 times one engine's pool, and
/// with all questions 73 % of all pools.
pub fn shared() {
    const GROUPS: u64 = 150;
    const ROUNDS: u64 = 20;
    let request = |number: u64| {
        // Each round in another order.
        let (round, group) = (number / GROUPS, (number * 7919 + number / GROUPS * 31) % GROUPS);
        let beginning = (0..6).map(|at| group * 100 + at);
        let question = (0..2).map(|at| 1_000_000 + (round * GROUPS + group) * 10 + at);
        Traced { at_ms: 0, input: 459 * SCALE, output: 62 * SCALE, blocks: beginning.chain(question).collect() }
    };
    let requests = Arc::new((0..GROUPS * ROUNDS).map(request).collect::<Vec<_>>());
    println!("shared: {} requests of {GROUPS} beginnings, 8 engines of 1200 KV blocks", requests.len());
    let mut of_pagoda = 0.0;
    for preset in Preset::ALL {
        let name = preset.name();
        let run = async {
            let cluster = Cluster::start(vec![profile(0.5, 1200); 8], preset).await;
            replay(cluster, Arc::clone(&requests), 8 * 24, None).await
        };
        let (rate, times, hits) = on_paused_time(run);
        if preset == Preset::Pagoda {
            of_pagoda = rate;
        }
        println!(
            "  {name:14} {:.0} output tokens/s (pagoda's is {:.2} of it), hits {:.1} %, TTFT p90 {:.1} s",
            rate * 62.0,
            of_pagoda / rate,
            hits * 100.0,
            percentile(&times, 0.9)
        );
    }
}
