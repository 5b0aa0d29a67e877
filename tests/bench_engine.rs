//! `pagoda bench engine`: its JSON on the CPU and on the software GPU, and what it refuses.

mod support;

use serde_json::Value;
use std::process::{Command, Output};
use support::tiny_model::Tiny;

fn bench(flags: &[&str]) -> Output {
    bench_of("1,3", flags)
}

fn bench_of(batch_sizes: &str, flags: &[&str]) -> Output {
    let short = ["bench", "engine", "--prompt-lens", "8,40", "--decode-tokens", "4", "--rounds", "1"];
    let short = [&short[..], &["--batch-sizes", batch_sizes]].concat();
    Command::new(env!("CARGO_BIN_EXE_pagoda")).args(short).args(flags).output().unwrap()
}

#[test]
fn speeds_are_told_by_length_and_by_sequences_with_the_kernels_of_a_gpu() {
    let (_directory, path) = Tiny::default().write();
    let mut devices = vec!["cpu".to_owned()];
    devices.extend(support::software_vulkan());
    for device in devices {
        let flags = ["--json", "--device", &device, "--model", path.to_str().unwrap(), "--kv-cache-memory", "4M"];
        let output = bench(&flags);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        for (kind, counts) in [("prefill", [8, 40]), ("decode", [1, 3])] {
            let speeds = report[kind].as_array().unwrap();
            let found: Vec<u64> = speeds.iter().map(|speed| speed["count"].as_u64().unwrap()).collect();
            assert_eq!(found, counts, "{device} {kind}");
            assert!(speeds.iter().all(|speed| speed["tokens_per_s"].as_f64() > Some(0.0)), "{report}");
        }
        assert!(report["copy_gb_per_s"].as_f64() > Some(0.0) && report["dot_gmac_per_s"][1].as_f64() > Some(0.0));
        let kernels = report["kernels_of_a_decode_step"].as_array().unwrap();
        if device == "cpu" {
            assert!(kernels.is_empty() && report["dispatches_a_decode_step"] == 0);
            continue;
        }
        let dispatches: u64 = kernels.iter().map(|kernel| kernel["dispatches"].as_u64().unwrap()).sum();
        assert_eq!(report["dispatches_a_decode_step"], dispatches, "{report}");
        let share: f64 = kernels.iter().map(|kernel| kernel["share"].as_f64().unwrap()).sum();
        assert!(
            (share - 1.0).abs() < 1e-6 && kernels.iter().all(|kernel| kernel["ms"].as_f64() > Some(0.0)),
            "{report}"
        );
    }
}

#[test]
fn what_does_not_fit_is_refused_with_its_numbers() {
    let (_directory, path) = Tiny::default().write();
    let model = ["--device", "cpu", "--model", path.to_str().unwrap()];
    for (flags, words) in [
        (&["--max-model-len", "32"][..], "40 tokens"),
        (&["--max-num-batched-tokens", "2"][..], "--max-num-batched-tokens"),
        (&["--kv-cache-memory", "10K"][..], "longest sequence has 32"),
    ] {
        let output = bench(&[&model[..], flags].concat());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(words) && !error.contains("panicked"), "{flags:?}: {error}");
    }
}

/// A server of llama.cpp's kind: ready at once; as fast as a prompt is long, and as many requests run at once.
const FAKE_PEER: &str = r#"#!/usr/bin/env python3
import http.server, json, sys, threading, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if arguments["-c"] != "168":
    sys.exit("a context of " + arguments["-c"])
running, most = 0, 0
lock = threading.Lock()
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = len(asked["prompt"])
        assert not asked["cache_prompt"] and asked["n_predict"] in (1, 4), asked
        global running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        time.sleep(0.5)
        with lock:
            at_once, running = most, running - 1
            if running == 0:
                most = 0
        self.answer(json.dumps({"timings": {"prompt_per_second": prompt * 1.0, "predicted_per_second": at_once * 1.0}}).encode())
    def log_message(self, *arguments):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(arguments["--port"])), Handler).serve_forever()
"#;

#[cfg(unix)]
#[test]
fn a_peer_is_measured_in_the_same_rounds() {
    use std::os::unix::fs::PermissionsExt;
    let (directory, path) = Tiny::default().write();
    let program = directory.path().join("llama-server");
    std::fs::write(&program, FAKE_PEER).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let peer = ["--device", "cpu", "--model", path.to_str().unwrap(), "--peer", program.to_str().unwrap()];
    let output = bench(&[&peer[..], &["--json", "--peer-args", "--flash-attn on"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for (kind, expected) in [
        ("prefill", [8.0, 40.0]),
        // As many as run beside each, of each.
        ("decode", [1.0, 9.0]),
    ] {
        let speeds: Vec<f64> =
            report[kind].as_array().unwrap().iter().map(|speed| speed["peer_tokens_per_s"].as_f64().unwrap()).collect();
        assert_eq!(speeds, expected, "{kind}");
    }
    // One that ends is quoted.
    let output = bench_of("1", &peer);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("ended") && error.contains("a context of 56"), "{error}");
}
