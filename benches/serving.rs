//! One engine serving many: `cargo bench --bench serving -- [batch|sim|cached|stalls|scrape]` (all without an argument).
//!
//! `batch`: 16 streams of unequal length on the CPU, beside the engine's own prefill speed and llama.cpp's server under the
//! same load in the same run. `sim`: the same shape on a simulated GPU against one at a time. `cached`: time to first token
//! of a prompt that is nearly all in the cache. `stalls`: what a long prompt does to running streams. `scrape`: rendering
//! `/metrics`.

mod measure;
mod peer;
#[path = "../tests/support/mod.rs"]
mod support;

use measure::median;
use peer::Peer;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};
use support::server::Server;

const THREADS: usize = 2;
const STREAMS: usize = 16;
const ROUNDS: usize = 3;

/// Token ids that are words, another run of them for each seed.
fn prompt(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| 1000 + ((i + seed * 131) * 7919 % 30_000) as u32).collect()
}

/// (prompt, answer) lengths of some requests: 32 to 152 and 128 to 368 tokens.
fn lengths(count: usize) -> Vec<(usize, usize)> {
    (0..count).map(|i| (32 + i * 7 % 16 * 8, 128 + i * 5 % 16 * 16)).collect()
}

fn body(prompt: &[u32], max_tokens: usize, stream: bool) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": stream })
}

fn cpu_server(flags: &[&str]) -> Server {
    let threads = THREADS.to_string();
    let common = ["--device", "cpu", "--threads", &threads, "--kv-cache-memory", "256MiB"];
    Server::start(&support::default_model(), &[&common[..], flags].concat())
}

/// Keeps as many streams going until all requests are answered: who has an answer sends the next. The seconds it took.
fn all_at_once(requests: &[(usize, usize)], work: impl Fn(usize, usize, usize) + Sync) -> f64 {
    let started = Instant::now();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..STREAMS {
            scope.spawn(|| {
                while let Some((seed, (prompt, answer))) = requests.iter().enumerate().nth(next.fetch_add(1, Relaxed)) {
                    work(seed, *prompt, *answer);
                }
            });
        }
    });
    started.elapsed().as_secs_f64()
}

/// Streams one answer; when its text arrived, piece by piece. A token that is no whole character brings no piece.
fn streamed(server: &Server, tokens: &[u32], answer: usize) -> Vec<Instant> {
    let stream = server.send("POST", "/v1/completions", "", &body(tokens, answer, true).to_string());
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.filter(|line| line.starts_with("data: {")).map(|_| Instant::now()).collect()
}

/// Tokens a second while all streams decode: from the last stream's first piece to the first stream's last. Each stream is
/// (its answer's tokens, its pieces); a piece stands for as many tokens as the stream's have on average.
fn decode_of_all(streams: &[(usize, Vec<Instant>)]) -> f64 {
    let from = *streams.iter().filter_map(|(_, pieces)| pieces.first()).max().unwrap();
    let to = *streams.iter().filter_map(|(_, pieces)| pieces.last()).min().unwrap();
    let within = |(tokens, pieces): &(usize, Vec<Instant>)| {
        let inside = pieces.iter().filter(|at| **at > from && **at <= to).count();
        inside as f64 * *tokens as f64 / pieces.len() as f64
    };
    streams.iter().map(within).sum::<f64>() / (to - from).as_secs_f64()
}

fn batch() {
    let server = cpu_server(&["--enable-prefix-caching", "false"]);
    let model = support::default_model();
    // llama.cpp divides the context over its slots.
    let peer = Peer::start("cpu", model.to_str().unwrap(), 512 * STREAMS, THREADS, STREAMS);
    let requests = lengths(STREAMS);
    let num_answer_tokens: usize = requests.iter().map(|(_, answer)| answer).sum();
    let num_prompt_tokens: usize = requests.iter().map(|(prompt, _)| prompt).sum();
    let (mut decode, mut prefill, mut ours, mut theirs) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let started = Instant::now();
        assert_eq!(server.post("/v1/completions", &body(&prompt(512, 99), 1, false)).status, 200);
        let prefill_per_s = 512.0 / started.elapsed().as_secs_f64();
        let streams = Mutex::new(Vec::new());
        let seconds = all_at_once(&requests, |seed, len, answer| {
            let pieces = streamed(&server, &prompt(len, seed), answer);
            streams.lock().unwrap().push((answer, pieces));
        });
        let decode_per_s = decode_of_all(&streams.into_inner().unwrap());
        let peer_seconds = all_at_once(&requests, |seed, len, answer| {
            let body = json!({ "prompt": prompt(len, seed), "n_predict": answer, "temperature": 0, "cache_prompt": false, "ignore_eos": true });
            let (status, answer_body) = peer.post("/completion", Some(&body)).unwrap();
            assert!(status == 200 && answer_body["tokens_predicted"] == answer, "{answer_body}");
        });
        let total = (num_answer_tokens + num_prompt_tokens) as f64;
        eprintln!(
            "round {round}: prefill {prefill_per_s:.0}, batched {decode_per_s:.0}, {seconds:.1} s, llama.cpp {peer_seconds:.1} s"
        );
        prefill.push(prefill_per_s);
        decode.push(decode_per_s);
        ours.push(total / seconds);
        theirs.push(total / peer_seconds);
    }
    let stats = server.get("/ready").json();
    let waste = stats["wasted_slot_steps"].as_f64().unwrap() / stats["held_slot_steps"].as_f64().unwrap();
    let (prefill, decode, ours, theirs) = (median(prefill), median(decode), median(ours), median(theirs));
    println!(
        "batch: cpu, {STREAMS} streams, {num_prompt_tokens} prompt and {num_answer_tokens} answer tokens, {THREADS} threads"
    );
    println!("  batched decode {decode:.0} tok/s, prefill {prefill:.0}: ratio {:.2}", decode / prefill);
    println!("  all tokens/s  pagoda {ours:.0}  llama.cpp {theirs:.0}  ratio {:.2}", ours / theirs);
    println!("  KV waste {:.1} % of held slots", waste * 100.0);
}

fn sim() {
    let server = Server::start_sim("h100", &["--max-num-seqs", "64"]);
    let post = |seed: usize, len: usize, answer: usize| {
        let text = format!("{seed:04}").repeat(len);
        let body = json!({ "prompt": text, "max_tokens": answer, "ignore_eos": true });
        assert_eq!(server.post("/v1/completions", &body).json()["usage"]["completion_tokens"], answer);
    };
    let requests = lengths(STREAMS);
    let together = all_at_once(&requests, post);
    let started = Instant::now();
    for (seed, (len, answer)) in requests.into_iter().enumerate() {
        post(seed + 100, len, answer);
    }
    let alone = started.elapsed().as_secs_f64();
    println!(
        "sim: h100, {STREAMS} streams at once {together:.2} s, one at a time {alone:.2} s: ratio {:.1}",
        alone / together
    );
}

/// Seconds to the first event of a stream.
fn ttft(server: &Server, prompt: &[u32]) -> f64 {
    let started = Instant::now();
    let stream = server.send("POST", "/v1/completions", "", &body(prompt, 1, true).to_string());
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    lines.find(|line| line.starts_with("data: {")).unwrap();
    started.elapsed().as_secs_f64()
}

fn cached() {
    let server = cpu_server(&[]);
    let (mut cold, mut warm) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let mut tokens = prompt(1024, round + 7);
        cold.push(ttft(&server, &tokens));
        // The first 921 tokens are as before.
        tokens[921..].reverse();
        warm.push(ttft(&server, &tokens));
    }
    let (cold, warm) = (median(cold), median(warm));
    println!("cached: 1,024 tokens, 90 % cached, TTFT {warm:.3} s, cold {cold:.3} s: ratio {:.3}", warm / cold);
}

/// Seconds between the tokens of some streams, each with the time at which it ended.
fn gaps(server: &Server, seed: usize) -> Vec<(Instant, f64)> {
    let mut body = body(&prompt(40, seed), 450, true);
    // With it every token is an event.
    body["logprobs"] = json!(0);
    let stream = server.send("POST", "/v1/completions", "", &body.to_string());
    let (mut gaps, mut last): (_, Option<Instant>) = (Vec::new(), None);
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        if line.starts_with("data: {") {
            let now = Instant::now();
            if let Some(last) = last {
                gaps.push((now, (now - last).as_secs_f64()));
            }
            last = Some(now);
        }
    }
    gaps
}

fn p99(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * 99 / 100]
}

fn stalls() {
    let server = cpu_server(&["--enable-prefix-caching", "false"]);
    // The engine measures its own prefill speed before it matters.
    server.post("/v1/completions", &body(&prompt(512, 1), 1, false));
    let (mut gap_list, mut window): (Vec<(Instant, f64)>, _) = (Vec::new(), None);
    std::thread::scope(|scope| {
        let streams: Vec<_> = (0..8)
            .map(|seed| {
                let server = &server;
                scope.spawn(move || gaps(server, seed * 3 + 1))
            })
            .collect();
        // Until the streams have their own prompts behind them.
        std::thread::sleep(Duration::from_secs(10));
        let started = Instant::now();
        server.post("/v1/completions", &body(&prompt(1990, 50), 1, false));
        window = Some((started, Instant::now()));
        gap_list = streams.into_iter().flat_map(|stream| stream.join().unwrap()).collect();
    });
    let (from, to) = window.unwrap();
    let warm = from - Duration::from_secs(3);
    let within = |from: Instant, to: Instant| {
        gap_list.iter().filter(|(at, _)| *at > from && *at <= to).map(|(_, gap)| *gap).collect::<Vec<f64>>()
    };
    let (quiet, busy) = (within(warm, from), within(from, to));
    println!(
        "stalls: 8 streams, p99 ITL {:.0} ms quiet ({} gaps), {:.0} ms while 1,990 tokens are prefilled ({} gaps, {:.1} s): ratio {:.2}",
        p99(quiet.clone()) * 1e3,
        quiet.len(),
        p99(busy.clone()) * 1e3,
        busy.len(),
        (to - from).as_secs_f64(),
        p99(busy) / p99(quiet)
    );
}

fn scrape() {
    let server = Server::start_sim("instant", &[]);
    server.post("/v1/completions", &json!({ "prompt": "a", "max_tokens": 8 }));
    let mut seconds: Vec<f64> = (0..200)
        .map(|_| {
            let started = Instant::now();
            assert_eq!(server.get("/metrics").status, 200);
            started.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!(
        "scrape: /metrics with its connection, median {:.2} ms, p99 {:.2} ms",
        seconds[100] * 1e3,
        seconds[197] * 1e3
    );
}

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    for (name, bench) in
        [("batch", batch as fn()), ("sim", sim), ("cached", cached), ("stalls", stalls), ("scrape", scrape)]
    {
        if wanted.is_empty() || wanted.iter().any(|word| word == name) {
            bench();
        }
    }
}
