//! Pagoda beside llama.cpp's server, in one run: prefill, decode, memory and time to ready, as ratios.
//!
//! `cargo bench --bench engine -- [vulkan|cpu]` (both without an argument). Same model, threads, context length and token
//! ids on both sides, no prompt cache; rounds alternate and the median counts, since machines are noisy. Pagoda is timed
//! by its client, HTTP included; llama.cpp by its own `timings`.

mod peer;
#[path = "../tests/support/mod.rs"]
mod support;

use peer::Peer;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::time::Instant;
use support::server::Server;

const PREFILL_TOKENS: usize = 512;
const DECODE_TOKENS: usize = 48;
const DECODE_PROMPT_TOKENS: usize = 16;
const CONTEXT: usize = 2048;
const THREADS: usize = 2;
const ROUNDS: usize = 3;

/// Token ids that are words, the same for both.
fn prompt(len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 1000 + i * 7919 % 30_000).collect()
}

#[derive(Clone, Copy, Debug)]
struct Speeds {
    prefill: f64,
    decode: f64,
}

fn median(rounds: &[Speeds]) -> Speeds {
    let middle = |speed: fn(&Speeds) -> f64| {
        let mut sorted: Vec<f64> = rounds.iter().map(speed).collect();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    Speeds { prefill: middle(|speeds| speeds.prefill), decode: middle(|speeds| speeds.decode) }
}

fn pagoda_round(server: &Server) -> Speeds {
    let body = |len, max_tokens, stream| json!({ "prompt": prompt(len), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": stream });
    let started = Instant::now();
    let answer = server.post("/v1/completions", &body(PREFILL_TOKENS, 1, false));
    let prefill = PREFILL_TOKENS as f64 / started.elapsed().as_secs_f64();
    assert_eq!(answer.json()["usage"]["prompt_tokens"], PREFILL_TOKENS);
    let stream =
        server.send("POST", "/v1/completions", "", &body(DECODE_PROMPT_TOKENS, DECODE_TOKENS, true).to_string());
    // A token that is no whole character brings no event, so time runs from the first event to the end, over all tokens
    // but the first.
    let (mut first, mut last) = (None, Instant::now());
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        if line.starts_with("data: {") {
            last = Instant::now();
            first.get_or_insert(last);
        }
    }
    let decode = (DECODE_TOKENS - 1) as f64 / (last - first.unwrap()).as_secs_f64();
    Speeds { prefill, decode }
}

fn peer_round(peer: &Peer) -> Speeds {
    let timings = |len: usize, predict: usize| {
        let body = json!({ "prompt": prompt(len), "n_predict": predict, "temperature": 0, "cache_prompt": false, "ignore_eos": true });
        let (status, answer) = peer.post("/completion", Some(&body)).unwrap();
        assert_eq!(status, 200, "{answer}");
        answer["timings"].clone()
    };
    let prefill = timings(PREFILL_TOKENS, 1)["prompt_per_second"].as_f64().unwrap();
    let decode = timings(DECODE_PROMPT_TOKENS, DECODE_TOKENS)["predicted_per_second"].as_f64().unwrap();
    Speeds { prefill, decode }
}

/// `VmHWM` of a process, MiB.
fn peak_memory_mib(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<f64>().unwrap() / 1024.0
}

fn compare(mode: &str, device: &str) {
    let model = support::default_model();
    let threads = THREADS.to_string();
    let context = CONTEXT.to_string();
    let flags = [
        "--device",
        device,
        "--threads",
        &threads,
        "--max-model-len",
        &context,
        "--kv-cache-memory",
        "64MiB",
        "--enable-prefix-caching",
        "false",
    ];
    let started = Instant::now();
    let server = Server::start(&model, &flags);
    let ready_s = started.elapsed().as_secs_f64();
    let peer = Peer::start(mode, model.to_str().unwrap(), CONTEXT, THREADS, 1);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        ours.push(pagoda_round(&server));
        theirs.push(peer_round(&peer));
        eprintln!("round {round}: pagoda {:?}, llama.cpp {:?}", ours[round], theirs[round]);
    }
    let (ours, theirs) = (median(&ours), median(&theirs));
    println!(
        "{mode}: {PREFILL_TOKENS} tokens of prefill, {DECODE_TOKENS} of decode, {THREADS} threads, context {CONTEXT}"
    );
    println!(
        "  prefill tok/s  pagoda {:8.1}  llama.cpp {:8.1}  ratio {:6.2}",
        ours.prefill,
        theirs.prefill,
        ours.prefill / theirs.prefill
    );
    println!(
        "  decode  tok/s  pagoda {:8.1}  llama.cpp {:8.1}  ratio {:6.2}",
        ours.decode,
        theirs.decode,
        ours.decode / theirs.decode
    );
    let file_mib = model.metadata().unwrap().len() as f64 / f64::from(1 << 20);
    println!(
        "  peak memory MiB  pagoda {:.0} (file {file_mib:.0}, KV pool 64; bound {:.0})  llama.cpp {:.0}",
        peak_memory_mib(server.pid()),
        file_mib * 1.5 + 64.0 + 300.0,
        peak_memory_mib(peer.pid())
    );
    println!("  ready after {ready_s:.2} s");
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let runs = |mode: &str| wanted.is_empty() || wanted.iter().any(|word| word == mode);
    if runs("cpu") {
        compare("cpu", "cpu");
    }
    if runs("vulkan") {
        compare("vulkan", &support::software_vulkan().expect("a software Vulkan adapter"));
    }
}
