//! A tier that is slow, hangs, resets, answers garbage or is gone; a service that is killed; a disk that is full: no request
//! fails, nothing that was called stored is lost, and the counters tell.

mod support;

use bytes::Bytes;
use cache_tier::remote::{RemoteLimits, RemoteStore, TcpConnector};
use cache_tier::{DiskConfig, DiskStore, Store};
use protocol::{
    BlockHash, BlockIdentity, BlockKey, KvFrame, Lookup, ModelFingerprint, NumericsClass, PutOutcome, PutReason, Salt,
};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::cache_service::CacheService;
use support::server::Server;

/// How a tier answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It takes the connection and says nothing.
    Hangs,
    /// It closes the connection in the middle of an answer.
    Resets,
    /// It says yes to every look-up and then sends what is no block.
    Garbage,
    /// It says yes to every look-up and then sends a byte a second.
    Slow,
    /// Its address takes no connection.
    Gone,
}

/// A tier that fails in one way; `None` for the listener where it takes no connection.
fn faulty_tier(fault: Fault) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    if fault == Fault::Gone {
        return url;
    }
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || misbehave(stream, fault));
        }
    });
    url
}

fn misbehave(mut stream: TcpStream, fault: Fault) {
    let mut buffer = vec![0; 1 << 20];
    while let Ok(len) = stream.read(&mut buffer)
        && len > 0
    {
        let is_lookup = buffer[..len].starts_with(b"POST /kv/v1/lookup");
        let answer: &[u8] = match fault {
            Fault::Hangs | Fault::Gone => return std::thread::sleep(Duration::from_secs(30)),
            Fault::Resets => b"HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n{\"num",
            Fault::Garbage | Fault::Slow if is_lookup => {
                b"HTTP/1.1 200 OK\r\ncontent-length: 17\r\n\r\n{\"num_blocks\":99}"
            }
            Fault::Garbage => b"HTTP/1.1 200 OK\r\ncontent-length: 24\r\n\r\nxxxxxxxxxxxxxxxxxxxxxxxx",
            Fault::Slow => b"HTTP/1.1 200 OK\r\ncontent-length: 400000\r\n\r\n",
        };
        if stream.write_all(answer).is_err() || fault == Fault::Resets {
            return;
        }
        while fault == Fault::Slow && !is_lookup && stream.write_all(&[0]).is_ok() {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
}

fn count(page: &str, name: &str, labels: &[&str]) -> f64 {
    let lines = page.lines().filter(|line| line.starts_with(name) && labels.iter().all(|label| line.contains(label)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
}

#[test]
fn no_request_fails_and_no_step_stalls_whatever_the_tier_does() {
    for fault in [Fault::Hangs, Fault::Resets, Fault::Garbage, Fault::Slow, Fault::Gone] {
        let url = faulty_tier(fault);
        let server = Server::start_sim("laptop", &["--kv-tier", &url, "--kv-drain-timeout", "1"]);
        let body =
            |seed: usize| json!({ "prompt": format!("{seed:04}").repeat(100), "max_tokens": 8, "ignore_eos": true });
        // A running stream, whose steps must not wait.
        let stream = server.send(
            "POST",
            "/v1/completions",
            "",
            &json!({
                "prompt": "four".repeat(4), "max_tokens": 40, "ignore_eos": true, "stream": true,
            })
            .to_string(),
        );
        let started = Instant::now();
        for seed in 0..6 {
            assert_eq!(server.post("/v1/completions", &body(seed)).status, 200, "{fault:?}");
        }
        let seconds = started.elapsed().as_secs_f64();
        // Alone they take some 0.5 s each, held back no longer than their 0.12 s of prefill; a deadline of the client is 1 s.
        assert!(seconds < 10.0, "{fault:?}: {seconds} s");
        let mut streamed = String::new();
        { stream }.read_to_string(&mut streamed).unwrap();
        assert!(streamed.contains("[DONE]"), "{fault:?}");
        let page = server.get("/metrics").body;
        let longest = longest_gap_bucket(&page);
        assert!(longest <= 1.0, "{fault:?}: a token came {longest} s after the last");
        let failed = server.log.lock().unwrap().matches("the KV tier failed").count();
        let late = count(&page, "pagoda_kv_loads_total", &["late"]);
        assert!(failed > 0 || late > 0.0, "{fault:?}: nothing tells of it\n{page}");
        assert_eq!(count(&page, "vllm:external_prefix_cache_hits_total", &[]), 0.0);
        assert!(count(&page, "vllm:external_prefix_cache_queries_total", &[]) > 0.0);
        // The end is not held up either.
        let mut server = server;
        server.terminate();
        let started = Instant::now();
        assert!(server.wait().success() && started.elapsed() < Duration::from_secs(8), "{fault:?}");
    }
}

/// The upper bound of the highest bucket of token gaps that holds any.
fn longest_gap_bucket(page: &str) -> f64 {
    let name = "vllm:inter_token_latency_seconds_bucket";
    let buckets = page.lines().filter(|line| line.starts_with(name)).map(|line| {
        let bound = line.split("le=\"").nth(1).unwrap().split('"').next().unwrap();
        (bound.parse().unwrap_or(f64::INFINITY), line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
    });
    let buckets: Vec<(f64, f64)> = buckets.collect();
    let all = buckets.last().unwrap().1;
    buckets.iter().find(|(_, below)| *below == all).unwrap().0
}

fn identity(number: u32) -> BlockIdentity {
    let parent = BlockHash::root(&Salt { adapter: None, cache_salt: number.to_string() });
    let token_ids: Box<[u32]> = (number..number + 16).collect();
    let key = BlockKey { model: ModelFingerprint::from_bytes([7; 32]), block: parent.child(&token_ids) };
    BlockIdentity { key, parent, token_ids }
}

/// Bytes that only this block has.
fn payload(number: u32, len: usize) -> Bytes {
    (0..len as u32).map(|i| (number.wrapping_mul(2_654_435_761).wrapping_add(i * i) >> 13) as u8).collect()
}

fn frame(number: u32, len: usize) -> KvFrame {
    KvFrame::new(identity(number), NumericsClass::new("test"), payload(number, len))
}

fn client(address: &str) -> RemoteStore {
    RemoteStore::new(Arc::new(TcpConnector(address.to_owned())), None, RemoteLimits::default())
}

const LEN: usize = 20_000;

/// Puts blocks until the service is gone; those that it called stored.
async fn put_until_killed(address: &str, first: u32) -> Vec<u32> {
    let store = client(address);
    let mut stored = Vec::new();
    for batch in (first..first + 4000).collect::<Vec<u32>>().chunks(4) {
        let frames = batch.iter().map(|&number| frame(number, LEN)).collect();
        let outcomes = store.put(frames, PutReason::Drain).await;
        if outcomes.contains(&PutOutcome::Busy) {
            break;
        }
        stored.extend(batch.iter().zip(outcomes).filter(|(_, o)| *o == PutOutcome::Stored).map(|(number, _)| *number));
    }
    stored
}

#[tokio::test]
async fn what_was_called_stored_survives_a_kill_at_any_moment() {
    let rounds = if std::env::var_os("PAGODA_TEST_ALL").is_some() { 200 } else { 10 };
    let directory = tempfile::tempdir().unwrap();
    let (mut all, mut state) = (HashSet::new(), 7u64);
    for round in 0..rounds {
        // Every tenth round begins anew, so that the files stay small.
        if round % 10 == 0 {
            std::fs::remove_dir_all(directory.path()).unwrap();
            all.clear();
        }
        let mut service = CacheService::start(directory.path(), &["--capacity", "1GiB"]);
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let moment = Duration::from_millis(5 + (state >> 33) % 120);
        let address = service.address.clone();
        let first = round * 4000;
        let puts = tokio::spawn(async move { put_until_killed(&address, first).await });
        tokio::time::sleep(moment).await;
        service.child.kill().unwrap();
        service.child.wait().unwrap();
        all.extend(puts.await.unwrap());
        let config = DiskConfig { directory: directory.path().to_owned(), capacity_bytes: 1 << 30 };
        let store = DiskStore::open(config).unwrap();
        let report = store.verify();
        assert_eq!(report.damaged, 0, "round {round}: {:?}", report.problems);
        for &number in &all {
            let found = store.get(&[identity(number).key]).await.remove(0).hit();
            let frame = found.unwrap_or_else(|| panic!("round {round}: block {number} is lost"));
            assert_eq!(frame.open(&identity(number), LEN).unwrap(), payload(number, LEN));
        }
    }
    assert!(!all.is_empty(), "nothing was stored");
}

#[test]
fn a_full_disk_makes_a_smaller_cache() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    // A file system of its own, of 6 MiB, in a mount namespace of its own.
    let script = format!(
        "mount -t tmpfs -o size=6m none '{path}' && exec '{}' serve --device sim:instant --port 0 --kv-disk '{path}/kv' --kv-disk-bytes 1GiB",
        env!("CARGO_BIN_EXE_pagoda")
    );
    let probe = Command::new("unshare").args(["-rm", "true"]).status();
    assert!(probe.is_ok_and(|status| status.success()), "this test needs `unshare -rm` (Debian: util-linux)");
    let server = Server::start_by(Command::new("unshare").args(["-rm", "sh", "-c", &script]));
    server.wait_for("ready", || server.get("/ready").status == 200);
    let ask = |seed: usize| {
        let body = json!({ "prompt": format!("{seed:04}").repeat(2000), "max_tokens": 1 });
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    };
    // Twice each, so that their blocks are written through: 125 of them for each prompt.
    for seed in 0..150 {
        ask(seed);
        ask(seed);
    }
    let page = || server.get("/metrics").body;
    server.wait_for("stored blocks", || count(&page(), "pagoda_kv_tier_puts_total", &["disk", "stored"]) > 2000.0);
    let used = count(&page(), "pagoda_kv_tier_used_bytes", &["disk"]);
    assert!(used < 6.0 * 1024.0 * 1024.0, "{used}");
    assert!(server.log.lock().unwrap().contains("stays smaller than its cap"), "{}", server.log.lock().unwrap());
    assert_eq!(server.get("/ready").status, 200);
}

#[test]
fn a_directory_that_cannot_be_used_is_a_clear_error() {
    let directory = tempfile::tempdir().unwrap();
    let service = CacheService::start(directory.path(), &[]);
    let refused = |flags: &[&str]| -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_pagoda")).args(flags).output().unwrap();
        assert!(!output.status.success(), "{flags:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let path = directory.path().to_str().unwrap();
    let error = refused(&["serve", "--device", "sim:instant", "--port", "0", "--kv-disk", path]);
    assert!(error.contains(path) && error.contains("in use by another process"), "{error}");
    let error = refused(&["cache", "verify", path]);
    assert!(error.contains("in use by another process"), "{error}");
    drop(service);
    let error = refused(&["cache", "serve", "--listen", "0.0.0.0:0", "--dir", path]);
    assert!(error.contains("--cluster-token-file"), "{error}");
    let error = refused(&["serve", "--device", "sim:instant", "--port", "0", "--kv-tier", "tier:80"]);
    assert!(error.contains("--kv-tier") && error.contains("http://HOST:PORT"), "{error}");
    let error = refused(&["cache", "stats", "/nowhere"]);
    assert!(error.contains("/nowhere is no directory"), "{error}");
    let error = refused(&["cache", "stats", env!("CARGO_MANIFEST_DIR")]);
    assert!(error.contains("holds no KV blocks"), "{error}");
    let flags = ["--kv-host-bytes", "1MiB", "--enable-prefix-caching", "false"];
    let serve = |flags: &[&str]| refused(&[&["serve", "--device", "sim:instant", "--port", "0"], flags].concat());
    let error = serve(&flags);
    assert!(error.contains("prefix caching finds"), "{error}");
    for (flags, missing) in [
        (["--kv-disk-bytes", "1GiB"], "--kv-disk, which is not given"),
        (["--kv-tier-cafile", "ca.pem"], "--kv-tier, which is not given"),
        (["--kv-compression", "zstd"], "neither is given"),
    ] {
        let error = serve(&flags);
        assert!(error.contains(missing), "{error}");
    }
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let inside = file.join("kv");
    let error = refused(&["cache", "serve", "--listen", "127.0.0.1:0", "--dir", inside.to_str().unwrap()]);
    assert!(error.contains("file/kv"), "{error}");
}

#[test]
fn an_operator_sees_what_is_there() {
    let directory = tempfile::tempdir().unwrap();
    let service = CacheService::start(directory.path(), &["--capacity", "64MiB"]);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let store = client(&service.address);
    let outcomes = runtime.block_on(store.put((0..20).map(|number| frame(number, LEN)).collect(), PutReason::Drain));
    assert_eq!(outcomes, [PutOutcome::Stored; 20]);
    let say = |command: &str, target: &str| -> String {
        let output = Command::new(env!("CARGO_BIN_EXE_pagoda")).args(["cache", command, target]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let url = service.url();
    assert!(say("stats", &url).contains("blocks     20"), "{}", say("stats", &url));
    assert!(say("verify", &url).starts_with("20 blocks"), "{}", say("verify", &url));
    assert!(say("compact", &url).starts_with("0 blocks moved"));
    service.stop();
    let path = directory.path().to_str().unwrap();
    assert!(say("stats", path).contains("blocks     20"));
    assert!(
        say("verify", path).contains("20 blocks (394.84 KiB) in 1 segments are whole, 0 were damaged"),
        "{}",
        say("verify", path)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_serves_its_pool_and_refuses_other_models_and_strangers() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let server = Server::start_sim("instant", &["--cluster-token-file", token.to_str().unwrap()]);
    let text = "abcd".repeat(50);
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": text, "max_tokens": 1 })).status, 200);
    let connector = || Arc::new(TcpConnector(server.internal.clone()));
    let store = RemoteStore::new(connector(), Some("secret"), RemoteLimits::default());
    let report = internal(&server, "GET", "/internal/v1/report", "authorization: Bearer secret\r\n");
    let model = model_of(&report);
    let tokens = vec![u32::from_le_bytes(*b"abcd"); 48];
    let blocks = BlockHash::root(&Salt::default()).chain(&tokens, 16);
    let keys: Vec<BlockKey> = blocks.iter().map(|&block| BlockKey { model, block }).collect();
    assert_eq!(store.lookup(&keys).await.num_blocks, 3);
    let found = store.get(&keys).await;
    for (index, lookup) in found.into_iter().enumerate() {
        let Lookup::Hit(frame) = lookup else { panic!("block {index}") };
        let parent = if index == 0 { BlockHash::root(&Salt::default()) } else { blocks[index - 1] };
        let identity = BlockIdentity { key: keys[index], parent, token_ids: tokens[..16].into() };
        assert_eq!(frame.open(&identity, 64).unwrap().len(), 64);
    }
    // Without tiers it takes nothing.
    assert_eq!(store.put(vec![frame(1, 64)], PutReason::Handoff).await, [PutOutcome::Refused]);
    let foreign = vec![identity(1).key];
    assert!(store.lookup(&foreign).await.busy, "refused, and not asked again for a while");
    let stranger = RemoteStore::new(connector(), None, RemoteLimits::default());
    assert!(stranger.lookup(&keys).await.busy);
    let answer = internal(&server, "POST", "/kv/v1/lookup", "");
    assert!(answer.contains("401"), "{answer}");
    let answer = internal(&server, "POST", "/kv/v1/lookup", "authorization: Bearer secret\r\n");
    assert!(answer.contains("400") && answer.contains("should have"), "{answer}");
    let answer = internal(&server, "GET", "/kv/v1/get", "authorization: Bearer secret\r\n");
    assert!(answer.contains("426") && answer.contains("upgraded to pagoda-kv"), "{answer}");
    // A connection for blocks refuses as well as a lookup does.
    let stream = RemoteStore::new(connector(), Some("secret"), RemoteLimits::default());
    assert_eq!(stream.get(&keys[..1]).await.len(), 1);
    assert_eq!(stream.get(&[identity(1).key]).await, [Lookup::Busy], "of another model");
    assert!(stream.lookup(&keys).await.busy, "it was refused, and is not asked again for a while");
}

fn internal(server: &Server, method: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(&server.internal).unwrap();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn model_of(report: &str) -> ModelFingerprint {
    let report: Value = serde_json::from_str(report.split_once("\r\n\r\n").unwrap().1).unwrap();
    let hex = report["fingerprint"].as_str().unwrap();
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap();
    }
    ModelFingerprint::from_bytes(bytes)
}
