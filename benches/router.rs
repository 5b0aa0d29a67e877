//! The router: `cargo bench --bench router -- [overhead|memory|placement|pick|trace|shared|unequal]` (all without an argument).
//!
//! `overhead`: CPU seconds a thousand requests and added latency, with 8 fake workers on loopback, beside `vllm-router` and
//! `sglang-router` where their programs are named by PAGODA_PEERS (a directory). `memory`: after 20,000 distinct prompts of 32 KB.
//! `placement`: 50 groups of prompts that begin alike. `pick`: choosing among 1,000 workers, and the index alone. `trace`,
//! `shared` and `unequal`: simulated engines on paused time, an hour of production chats, prompts that share their
//! beginnings, and engines of unequal speeds.

#[path = "router/fake.rs"]
mod fake;
#[path = "router/load.rs"]
mod load;
mod measure;
#[path = "router/simulated.rs"]
mod simulated;
mod traces;

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fake::Fakes;
use load::Load;
use measure::{cpu_seconds, median, percentile};
use protocol::prompt_chain::{ChainKind, ChainRoot, Chunk};
use protocol::{HeldChunk, PromptChain};

const CONNECTIONS: usize = 64;
const ROUNDS: usize = 3;

/// A router's process.
struct Process {
    child: Child,
    port: u16,
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts a router by name; `None` where a peer's program is not there.
fn start(name: &str, fakes: &Fakes) -> Option<Process> {
    let port = free_port();
    let urls: Vec<String> = fakes.ports.iter().map(|port| format!("http://127.0.0.1:{port}")).collect();
    let mut command = match name.split_once(' ') {
        None => {
            let file = std::env::temp_dir().join(format!("pagoda-workers-{port}.toml"));
            let text: String = urls.iter().map(|url| format!("[[worker]]\nurl = \"{url}\"\n")).collect();
            std::fs::write(&file, text).unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
            command.args(["route", "--port", &port.to_string(), "--workers"]).arg(file);
            command
        }
        Some((peer, policy)) => {
            let program = PathBuf::from(std::env::var_os("PAGODA_PEERS")?).join(peer);
            let mut command = Command::new(program);
            if peer == "sglang-router" {
                command.arg("launch");
            }
            command.args(["--policy", policy, "--host", "127.0.0.1", "--port", &port.to_string()]);
            command.args(["--log-level", "error", "--worker-urls"]).args(&urls);
            command
        }
    };
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
    let process = Process { child, port };
    let load = Load::new(port, 200, 1);
    let started = Instant::now();
    while !load.try_once() {
        assert!(started.elapsed() < Duration::from_secs(60), "{name} does not answer");
        std::thread::sleep(Duration::from_millis(100));
    }
    Some(process)
}

const PEERS: [&str; 5] = [
    "pagoda",
    "vllm-router round_robin",
    "vllm-router consistent_hash",
    "sglang-router round_robin",
    "sglang-router cache_aware",
];

fn overhead() {
    for bytes in [200, 32_000] {
        println!("overhead, prompts of {bytes} bytes, {CONNECTIONS} connections; medians of {ROUNDS}");
        for name in PEERS {
            let fakes = Fakes::start(8);
            let Some(router) = start(name, &fakes) else { continue };
            let count = if bytes > 1000 { 6_000 } else { 20_000 };
            let (mut cpu, mut rate, mut direct) = (Vec::new(), Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                let load = Load::new(router.port, bytes, CONNECTIONS);
                let before = cpu_seconds(router.child.id());
                let seconds = load.closed(count, round);
                cpu.push((cpu_seconds(router.child.id()) - before) / count as f64 * 1000.0);
                rate.push(count as f64 / seconds);
                direct.push(count as f64 / Load::new(fakes.ports[0], bytes, CONNECTIONS).closed(count, round));
            }
            let (cpu, rate, direct) = (median(cpu), median(rate), median(direct));
            let latency = if bytes < 1000 { added_latency(&router, &fakes) } else { String::new() };
            println!("  {name:28} {cpu:.3} CPU s a 1,000, {:.3} of direct's rate{latency}", rate / direct);
        }
    }
}

/// At 200 requests a second: what the router adds to the median and to the 99th percentile.
fn added_latency(router: &Process, fakes: &Fakes) -> String {
    let (mut p50, mut p99) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let through = Load::new(router.port, 200, 16).open(200.0, 1000);
        let direct = Load::new(fakes.ports[0], 200, 16).open(200.0, 1000);
        p50.push(percentile(&through, 0.5) - percentile(&direct, 0.5));
        p99.push(percentile(&through, 0.99) - percentile(&direct, 0.99));
    }
    format!(", adds {:.2} ms p50 and {:.2} ms p99", median(p50) * 1e3, median(p99) * 1e3)
}

fn rss_mb(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() / 1024.0
}

fn memory() {
    for name in PEERS {
        let fakes = Fakes::start(8);
        let Some(router) = start(name, &fakes) else { continue };
        let before = rss_mb(router.child.id());
        Load::new(router.port, 32_000, CONNECTIONS).closed(20_000, 7);
        println!(
            "memory: {name:28} {before:.0} MB at start, {:.0} MB after 20,000 distinct prompts of 32 KB",
            rss_mb(router.child.id())
        );
    }
}

fn placement() {
    const GROUPS: usize = 50;
    const EACH: usize = 20;
    for name in PEERS {
        for at_once in [1, 16] {
            let fakes = Fakes::start(8);
            let Some(router) = start(name, &fakes) else { continue };
            load::groups(router.port, GROUPS, EACH, at_once);
            let (hits, counts) = fakes.placement();
            let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
            let most = *counts.iter().max().unwrap() as f64;
            println!(
                "placement: {name:28} {at_once:2} at once: {:.3} hits, max/mean {:.2}",
                hits as f64 / (GROUPS * EACH) as f64,
                most / mean
            );
        }
    }
}

/// A chain as long as a prompt's of so many tokens.
fn chain(seed: u64, num_tokens: usize) -> Vec<Chunk> {
    let mut chain = PromptChain::new(&ChainRoot::new(ChainKind::TokenIds, "m"));
    chain.push_token_ids(&(0..num_tokens as u32).map(|id| id ^ (seed as u32) << 8).collect::<Vec<_>>());
    chain.chunks().to_vec()
}

fn held(chain: &[Chunk]) -> Vec<HeldChunk> {
    chain.iter().zip(1..).map(|(chunk, n)| HeldChunk { hash: chunk.hash, num_tokens: n * 64, tier: 0 }).collect()
}

fn pick() {
    let index = router::index::Index::new(usize::MAX);
    // Chunks as a hash function gives them, each worker's own, and a tenth that two have.
    const WORKERS: u64 = 100;
    const CHUNKS: u64 = 10_000_000;
    let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (number << 31);
    let started = Instant::now();
    let mut num_events = 0u64;
    for first in (0..CHUNKS).step_by(1000) {
        let chunk = |number: u64| HeldChunk { hash: hash(number), num_tokens: 64, tier: 0 };
        let chunks: Vec<HeldChunk> = (first..first + 1000).map(chunk).collect();
        let worker = (first / 1000 % WORKERS) as u16;
        index.store(worker, &chunks);
        index.store((worker + 1) % WORKERS as u16, &chunks[..100]);
        num_events += 1100;
    }
    let rate = num_events as f64 / started.elapsed().as_secs_f64();
    let entry = index.num_bytes() as f64 / index.len() as f64;
    println!(
        "index: {} chunks of {WORKERS} workers, {entry:.1} bytes each, {:.2} million events/s stored",
        index.len(),
        rate / 1e6
    );
    let started = Instant::now();
    let hashes: Vec<u64> = (0..1_000_000).map(hash).collect();
    for (number, hashes) in hashes.chunks(1000).enumerate() {
        index.remove((number as u64 % WORKERS) as u16, hashes);
    }
    println!("index: {:.2} million events/s removed", 1.0 / started.elapsed().as_secs_f64());
    drop(index);
    simulated::pick_among(1000, &chain(1, 100_000), held);
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name);
    for (name, bench) in [
        ("overhead", overhead as fn()),
        ("memory", memory),
        ("placement", placement),
        ("pick", pick),
        ("trace", simulated::trace),
        ("shared", simulated::shared),
        ("unequal", simulated::unequal),
    ] {
        if is_wanted(name) {
            bench();
        }
    }
}
