//! What the tiers are worth: `cargo bench --bench tiers -- [prefix|fits|exceeds|codec]` (all without an argument).
//!
//! `prefix`: time to the first token of a 1,024-token prompt whose blocks are on disk, against computing it, on the CPU and on
//! the software GPU. `fits`: a load whose prompts stay in the pool, with tiers and without, in turns. `exceeds`: one whose
//! prompts do not. `codec`: how small real KV blocks pack, and how fast.

mod measure;
#[path = "../tests/support/mod.rs"]
mod support;

use engine::batch::Choice;
use engine::kv::BLOCK_SIZE;
use measure::median;
use protocol::codec::Codec;
use serde_json::json;
use std::io::{BufRead, BufReader};
use std::time::Instant;
use support::driver::{Fed, on_cpu};
use support::server::Server;

const ROUNDS: usize = 3;
const PAIRS: usize = 20;

/// Token ids that are words, another run of them for each seed.
fn prompt(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| 1000 + ((i + seed * 131) * 7919 % 30_000) as u32).collect()
}

/// Seconds to the first token of an answer of `answer` tokens, and to its end.
fn timed(server: &Server, prompt: &[u32], answer: usize) -> (f64, f64) {
    let body = json!({ "prompt": prompt, "max_tokens": answer, "temperature": 0, "ignore_eos": true, "stream": true });
    let started = Instant::now();
    let stream = server.send("POST", "/v1/completions", "", &body.to_string());
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.find(|line| line.starts_with("data: {")).unwrap();
    let first = started.elapsed().as_secs_f64();
    assert!(lines.any(|line| line == "data: [DONE]"));
    (first, started.elapsed().as_secs_f64())
}

fn start(device: &str, pool: &str, flags: &[&str]) -> Server {
    let common = ["--device", device, "--kv-cache-memory", pool, "--max-model-len", "2048"];
    Server::start(&support::default_model(), &[&common[..], flags].concat())
}

fn prefix() {
    let gpu = support::software_vulkan().expect("a software Vulkan adapter");
    for device in ["cpu", &gpu] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = directory.path().to_str().unwrap();
        let flags = ["--kv-disk", disk, "--kv-disk-bytes", "1GiB"];
        let mut server = start(device, "128MiB", &flags);
        timed(&server, &prompt(64, 99), 1);
        let cold: Vec<f64> = (0..ROUNDS).map(|seed| timed(&server, &prompt(1025, seed), 1).0).collect();
        server.terminate();
        server.wait();
        let server = start(device, "128MiB", &flags);
        timed(&server, &prompt(64, 98), 1);
        let warm: Vec<f64> = (0..ROUNDS).map(|seed| timed(&server, &prompt(1025, seed), 1).0).collect();
        let (cold, warm) = (median(cold), median(warm));
        println!(
            "prefix: {device}, 1,024 tokens: from disk {warm:.3} s, computed {cold:.3} s: ratio {:.3}",
            warm / cold
        );
    }
}

/// Seconds of a round of requests on each server, in turns.
fn turns(with: &Server, without: &Server, prompts: usize, rounds: usize) -> (Vec<f64>, Vec<f64>) {
    let round = |server: &Server| -> f64 { (0..prompts).map(|seed| timed(server, &prompt(256, seed), 8).1).sum() };
    // Both have seen every prompt, and those with tiers have put them down.
    for server in [with, without] {
        round(server);
        round(server);
    }
    let (mut a, mut b) = (Vec::new(), Vec::new());
    for index in 0..rounds {
        if index % 2 == 0 {
            a.push(round(with));
            b.push(round(without));
        } else {
            b.push(round(without));
            a.push(round(with));
        }
    }
    (a, b)
}

fn report(what: &str, with: Vec<f64>, without: Vec<f64>) {
    let ratios = with.iter().zip(&without).map(|(with, without)| with / without).collect();
    let ratio = median(ratios);
    let (with, without, pairs) = (median(with.clone()), median(without), with.len());
    println!(
        "{what}: cpu, {pairs} pairs of rounds, with tiers {with:.3} s, without {without:.3} s: median ratio {ratio:.3}"
    );
}

fn fits() {
    let with = start("cpu", "64MiB", &["--kv-host-bytes", "256MiB"]);
    let without = start("cpu", "64MiB", &[]);
    let (a, b) = turns(&with, &without, 4, PAIRS);
    report("fits (4 prompts of 256 tokens, a pool of 2,900)", a, b);
}

fn exceeds() {
    let with = start("cpu", "48MiB", &["--kv-host-bytes", "256MiB"]);
    let without = start("cpu", "48MiB", &[]);
    let (a, b) = turns(&with, &without, 16, 3);
    report("exceeds (16 prompts of 256 tokens, a pool of 2,180)", a, b);
}

fn codec() {
    let mut runner = on_cpu(&support::default_model(), 1024);
    let tokens = prompt(512, 3);
    Fed::in_order(512).feed(runner.as_mut(), &tokens, false, Choice::Greedy);
    let block_ids: Vec<u32> = (0..(tokens.len() / BLOCK_SIZE) as u32).collect();
    runner.copy_blocks(&block_ids, &[]).unwrap();
    let payloads = runner.copied_out().unwrap();
    let bytes: usize = payloads.iter().map(|payload| payload.len()).sum();
    let started = Instant::now();
    let packed: Vec<_> = payloads.iter().map(|payload| Codec::Zstd.pack(payload).unwrap()).collect();
    let packing = bytes as f64 / started.elapsed().as_secs_f64() / 1e6;
    let started = Instant::now();
    for (packed, payload) in packed.iter().zip(&payloads) {
        assert_eq!(Codec::Zstd.unpack(packed, payload.len()).unwrap(), payload);
    }
    let unpacking = bytes as f64 / started.elapsed().as_secs_f64() / 1e6;
    let part = packed.iter().map(|packed| packed.len()).sum::<usize>() as f64 / bytes as f64;
    println!(
        "codec: zstd on {} blocks of SmolLM2: {part:.3} of the size, packs {packing:.0} MB/s, unpacks {unpacking:.0}",
        payloads.len()
    );
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let parts: [(&str, fn()); 4] = [("codec", codec), ("prefix", prefix), ("exceeds", exceeds), ("fits", fits)];
    for (_, part) in parts.iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|wanted| wanted == name)) {
        part();
    }
}
