//! Operating a server: metrics, the worker report, keys, TLS, traces, and connections that misbehave.

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc;
use support::route::{Cluster, profile};
use support::server::{PATIENCE, Server, read_answer};

/// Sends a request to any address of the server.
fn get(address: &str, path: &str, headers: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let answer = read_answer(&mut stream);
    (answer.status, answer.body)
}

/// Samples of a page of metrics by name and labels.
fn samples(text: &str) -> BTreeMap<String, f64> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[test]
fn metrics_have_vllm_s_names_labels_and_values() {
    let server = Server::start_sim("instant", &["--served-model-name", "m"]);
    let body = json!({ "prompt": "x".repeat(400), "max_tokens": 7 });
    for _ in 0..2 {
        assert_eq!(server.post("/v1/completions", &body).status, 200);
    }
    let page = server.get("/metrics");
    assert!(page.headers.contains("text/plain; version=0.0.4"), "{}", page.headers);
    let samples = samples(&page.body);
    let value = |name: &str| samples.get(&format!("{name}{{engine=\"0\",model_name=\"m\"}}")).copied();
    for (name, expected) in [
        ("vllm:num_requests_waiting", 0.0),
        ("vllm:num_requests_running", 0.0),
        ("vllm:kv_cache_usage_perc", 0.0),
        ("vllm:prefix_cache_queries_total", 200.0),
        // 100 tokens are six full blocks and some.
        ("vllm:prefix_cache_hits_total", 96.0),
        ("vllm:num_preemptions_total", 0.0),
        ("vllm:prompt_tokens_total", 200.0),
        ("pagoda_prefill_tokens_total", 104.0),
        ("vllm:generation_tokens_total", 14.0),
        ("vllm:time_to_first_token_seconds_count", 2.0),
        ("vllm:inter_token_latency_seconds_count", 12.0),
        ("vllm:request_time_per_output_token_seconds_count", 2.0),
        ("vllm:e2e_request_latency_seconds_count", 2.0),
        ("vllm:request_queue_time_seconds_count", 2.0),
        ("vllm:request_prefill_time_seconds_count", 2.0),
        ("vllm:request_decode_time_seconds_count", 2.0),
        ("vllm:request_inference_time_seconds_count", 2.0),
        ("vllm:request_prompt_tokens_sum", 200.0),
        ("vllm:request_generation_tokens_sum", 14.0),
        ("vllm:request_params_max_tokens_sum", 14.0),
        ("vllm:request_params_n_sum", 2.0),
        ("vllm:iteration_tokens_total_sum", 104.0 + 12.0),
        ("pagoda_kv_cached_blocks", 6.0),
        ("pagoda_kv_wasted_tokens", 0.0),
    ] {
        assert_eq!(value(name), Some(expected), "{name}");
    }
    let labelled = |wanted: &str| samples.iter().find(|(name, _)| name.contains(wanted)).map(|(_, value)| *value);
    assert_eq!(labelled("request_success_total{engine=\"0\",finished_reason=\"length\""), Some(2.0));
    let info = "vllm:cache_config_info{block_size=\"16\",engine=\"0\",model_name=\"m\",num_gpu_blocks=\"8192\"}";
    assert_eq!(samples.get(info), Some(&1.0));
    let bucket = "vllm:time_to_first_token_seconds_bucket{engine=\"0\",model_name=\"m\",le=\"2560\"}";
    assert_eq!(samples.get(bucket), Some(&2.0));
    assert!(page.body.contains("# TYPE vllm:prefix_cache_hits_total counter"), "Prometheus' classic text");
}

#[test]
fn a_cut_request_is_counted_as_aborted() {
    let server = Server::start_sim("h100", &[]);
    let body = json!({ "prompt": "x", "max_tokens": 2000, "stream": true }).to_string();
    let mut stream = server.send("POST", "/v1/completions", "", &body);
    stream.read_exact(&mut [0; 300]).unwrap();
    drop(stream);
    server.wait_for("the abort", || server.get("/metrics").body.contains("finished_reason=\"abort\""));
    assert_eq!(server.stat("num_used_blocks"), 0);
}

#[test]
fn the_report_is_on_the_internal_listener_alone() {
    let server = Server::start_sim("laptop", &["--served-model-name", "m", "other", "--max-queue", "9"]);
    server.post("/v1/completions", &json!({ "prompt": "x".repeat(400), "max_tokens": 3 }));
    let (status, text) = get(&server.internal, "/internal/v1/report", "");
    let report = protocol::WorkerReport::parse(text.as_bytes()).unwrap();
    assert_eq!((status, report.ready, report.models), (200, true, vec!["m".to_owned(), "other".to_owned()]));
    assert_eq!(report.device, "sim:laptop");
    assert_eq!((report.capacity.block_size, report.capacity.num_blocks, report.capacity.max_queue), (16, 1000, 9));
    assert_eq!((report.load.num_running, report.load.num_used_blocks), (0, 0));
    assert!((report.rates.bytes_per_token - 4.0).abs() < 1e-9);
    // A prompt token takes 1.2 ms on this profile, and a step 2 ms.
    assert!((600.0..900.0).contains(&report.rates.prefill_tokens_per_s), "{:?}", report.rates);
    assert!((0.04..0.08).contains(&report.rates.decode_step_s), "{:?}", report.rates);
    assert_eq!(report.fingerprint.len(), 64);
    assert_eq!(server.get("/internal/v1/report").status, 404, "clients do not reach it");
    assert_eq!(get(&server.internal, "/v1/models", "").0, 404, "nor the cluster the clients' door");
    let again = Server::start_sim("laptop", &[]);
    let other: Value = serde_json::from_str(&get(&again.internal, "/internal/v1/report", "").1).unwrap();
    assert_ne!(other["epoch"], report.epoch, "another start, another epoch");
}

#[test]
fn the_cluster_token_is_wanted_off_loopback_and_checked() {
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "secret-of-the-cluster\n").unwrap();
    let open = Command::new(env!("CARGO_BIN_EXE_pagoda"))
        .args(["serve", "--port", "0", "--device", "sim:instant", "--internal-listen", "0.0.0.0:0"])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&open.stderr).into_owned();
    assert!(!open.status.success() && message.contains("--cluster-token-file"), "{message}");
    let flags = ["--internal-listen", "0.0.0.0:0", "--cluster-token-file", token.to_str().unwrap()];
    let server = Server::start_sim("instant", &flags);
    let address = server.internal.replace("0.0.0.0", "127.0.0.1");
    let status = |headers: &str| get(&address, "/internal/v1/report", headers).0;
    assert_eq!(status(""), 401);
    assert_eq!(status("authorization: Bearer secret-of-the-cluste\r\n"), 401);
    assert_eq!(status("authorization: Bearer secret-of-the-cluster\r\n"), 200);
}

#[test]
fn keys_open_the_api_and_tell_whose_tokens_were_used() {
    let directory = tempfile::tempdir().unwrap();
    let keys = directory.path().join("keys");
    std::fs::write(&keys, "team-a sk-aaa\n").unwrap();
    let server = Server::start_sim("instant", &["--api-key", "sk-flag", "--api-key-file", keys.to_str().unwrap()]);
    let body = json!({ "prompt": "12345678", "max_tokens": 3 }).to_string();
    let ask = |headers: &str| server.request("POST", "/v1/completions", headers, &body);
    let refused = ask("");
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (401, &json!("invalid_api_key")));
    assert_eq!(ask("authorization: Bearer sk-bbb\r\n").status, 401);
    assert_eq!(ask("authorization: Bearer sk-aaa\r\n").status, 200);
    assert_eq!(ask("authorization: Bearer sk-flag\r\n").status, 200);
    for path in ["/v1/models", "/tokenize"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    let page = server.get("/metrics").body;
    for (key, kind, tokens) in [("team-a", "prompt", 2), ("team-a", "generation", 3), ("key-1", "generation", 3)] {
        let sample = format!("key=\"{key}\",kind=\"{kind}\"");
        let line = page.lines().find(|line| line.contains(&sample)).unwrap_or_else(|| panic!("{sample} in {page}"));
        assert!(line.ends_with(&format!(" {tokens}")), "{line}");
    }
    assert!(!page.contains("sk-"), "keys are not told");
    assert!(!server.log.lock().unwrap().contains("sk-"));
}

#[test]
fn keys_from_the_environment_are_taken_as_they_are_written() {
    let server = Server::start_sim_in(&[("PAGODA_API_KEY", "0123 sk,x"), ("PAGODA_PORT", "tcp://10.0.0.1:8000")]);
    let status =
        |key: &str| server.request("GET", "/v1/models", &format!("authorization: Bearer {key}\r\n"), "").status;
    assert_eq!(["0123", "sk,x", "123", "sk", "x"].map(status), [200, 200, 401, 401, 401]);
}

#[test]
fn an_empty_list_of_keys_in_the_environment_does_not_open_the_server() {
    let output = Command::new(env!("CARGO_BIN_EXE_pagoda"))
        .args(["serve", "--port", "0", "--device", "sim:instant"])
        .env("PAGODA_API_KEY", " ")
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("PAGODA_API_KEY is set and empty"), "{message}");
}

#[test]
fn large_bodies_share_memory_and_small_ones_do_not_wait_for_them() {
    let server = Server::start_sim("instant", &["--max-body-bytes", "1MiB"]);
    // Four claim a megabyte each and send nothing of it; the fifth has to wait, and is told so.
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1048576\r\n\r\n";
    let claims: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(head.as_bytes()).unwrap();
            stream
        })
        .collect();
    std::thread::sleep(std::time::Duration::from_millis(300));
    let small = json!({ "prompt": "a", "max_tokens": 2 });
    assert_eq!(server.post("/v1/completions", &small).status, 200);
    let large = json!({ "prompt": "a".repeat(100_000), "max_tokens": 2 });
    let told = server.post("/v1/completions", &large);
    assert!(told.status == 503 && told.body.contains("too many large request bodies"), "{}", told.body);
    drop(claims);
    server.wait_for("the shares", || server.post("/v1/completions", &large).status == 200);
}

#[test]
fn tls_is_served_with_the_certificate_that_is_given() {
    let directory = tempfile::tempdir().unwrap();
    let signed = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (certificate, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    std::fs::write(&certificate, signed.cert.pem()).unwrap();
    std::fs::write(&key, signed.signing_key.serialize_pem()).unwrap();
    let paths = [&certificate, &key].map(|path| path.to_str().unwrap().to_owned());
    let profile = "sim:instant";
    let server =
        Server::start_listening(&["--device", profile, "--ssl-certfile", &paths[0], "--ssl-keyfile", &paths[1]]);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(signed.cert.der().clone()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let mut session = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut socket = server.connect();
    let mut stream = rustls::Stream::new(&mut session, &mut socket);
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    // Plain HTTP at the same door is no request.
    let mut plain = server.connect();
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut bytes = Vec::new();
    drop(plain.read_to_end(&mut bytes));
    assert!(!bytes.starts_with(b"HTTP/1.1 200"));
    let wrong = Command::new(env!("CARGO_BIN_EXE_pagoda"))
        .args(["serve", "--port", "0", "--device", profile, "--ssl-certfile", &paths[1], "--ssl-keyfile", &paths[1]])
        .output()
        .unwrap();
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(!wrong.status.success() && message.contains("key.pem"), "{message}");
}

/// An OTLP collector: sends the bodies that it gets.
fn collector() -> (String, mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let (sender, bodies) = mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let sender = sender.clone();
            std::thread::spawn(move || collect(stream, &sender));
        }
    });
    (endpoint, bodies)
}

fn collect(mut stream: TcpStream, bodies: &mpsc::Sender<Vec<u8>>) {
    let mut received = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(len) = stream.read(&mut buffer) {
        if len == 0 {
            return;
        }
        received.extend_from_slice(&buffer[..len]);
        let Some(end) = received.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&received[..end]).to_lowercase();
        let len: usize = head.split("content-length: ").nth(1).unwrap().split("\r\n").next().unwrap().parse().unwrap();
        if received.len() >= end + 4 + len {
            drop(bodies.send(received[end + 4..end + 4 + len].to_vec()));
            received.clear();
            drop(stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"));
        }
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

#[test]
fn spans_of_requests_join_the_caller_s_trace_and_hold_no_text() {
    let (endpoint, bodies) = collector();
    let server = Server::start_sim("instant", &["--otlp-traces-endpoint", &endpoint, "--log-format", "json"]);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let headers = format!("traceparent: 00-{trace}-b7ad6b7169203331-01\r\nx-request-id: my-request\r\n");
    let body = json!({ "prompt": "a secret prompt", "max_tokens": 4, "stream": true }).to_string();
    let answer = server.request("POST", "/v1/completions", &headers, &body);
    assert!(answer.headers.contains("x-request-id: my-request"), "{}", answer.headers);
    assert!(server.get("/health").headers.contains("x-request-id: req-"), "one is made where none is given");
    let mut exported = Vec::new();
    while !contains(&exported, b"my-request") {
        exported.extend(bodies.recv_timeout(PATIENCE).expect("no span was exported"));
    }
    let id: Vec<u8> = (0..16).map(|i| u8::from_str_radix(&trace[2 * i..2 * i + 2], 16).unwrap()).collect();
    assert!(contains(&exported, &id), "the caller's trace id");
    assert!(contains(&exported, b"POST /v1/completions") && contains(&exported, b"gen_ai.usage.completion_tokens"));
    assert!(!contains(&exported, b"secret"), "no text leaves");
    let log = server.log.lock().unwrap().clone();
    assert!(!log.contains("secret"), "{log}");
    assert!(log.lines().filter(|line| line.starts_with('{')).all(|line| serde_json::from_str::<Value>(line).is_ok()));
}

#[test]
fn a_router_s_span_is_the_child_of_the_client_s_and_the_parent_of_the_engine_s() {
    let (endpoint, bodies) = collector();
    let flags = ["--otlp-traces-endpoint", &endpoint];
    let mut cluster = Cluster::start(0, &profile(1.0, 0.0, 100));
    cluster.engines.push(cluster.engine(&flags));
    cluster.write();
    let route = cluster.route(&flags);
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let headers = format!("traceparent: 00-{trace}-00f067aa0ba902b7-01\r\nx-request-id: routed\r\n");
    let body = json!({ "model": "m", "prompt": "a secret prompt", "max_tokens": 4, "stream": true }).to_string();
    assert_eq!(route.request("POST", "/v1/completions", &headers, &body).status, 200);
    let mut exported: Vec<Vec<u8>> = Vec::new();
    let id: Vec<u8> = (0..16).map(|i| u8::from_str_radix(&trace[2 * i..2 * i + 2], 16).unwrap()).collect();
    // The router's export and the engine's; of a span: tag 0a and its trace id, tag 12 and its own, tag 22 and its parent's.
    let spans = |exported: &[Vec<u8>]| {
        let of = |body: &Vec<u8>| {
            let at = body.windows(16).position(|window| window == id)?;
            let parent = at + 26 + body[at + 26..].windows(2).position(|tag| tag == [0x22, 8])? + 2;
            Some((body[at + 18..at + 26].to_vec(), body[parent..parent + 8].to_vec()))
        };
        exported.iter().filter_map(of).collect::<Vec<_>>()
    };
    while spans(&exported).len() < 2 {
        exported.push(bodies.recv_timeout(PATIENCE).expect("no span was exported"));
    }
    let client = u64::from_str_radix("00f067aa0ba902b7", 16).unwrap().to_be_bytes().to_vec();
    let mut both = spans(&exported);
    both.sort_by_key(|(_, parent)| *parent != client);
    assert_eq!(both[0].1, client, "the router's is the client's child");
    assert_eq!(both[1].1, both[0].0, "the engine's is the router's child");
    let all = exported.concat();
    assert!(contains(&all, b"tries") && contains(&all, b"reason") && !contains(&all, b"secret"));
}

#[test]
fn more_answers_than_the_engine_holds_are_refused_for_good() {
    let server = Server::start_sim("instant", &["--max-num-seqs", "8", "--max-queue", "0"]);
    let refused = server.post("/v1/completions", &json!({ "prompt": "a", "n": 10 }));
    assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("n")), "{}", refused.body);
    assert!(refused.body.contains("10 answers") && refused.body.contains("at most 8"), "{}", refused.body);
}

#[test]
fn headers_that_are_too_many_or_too_long_are_refused() {
    let server = Server::start_sim("instant", &[]);
    let many: String = (0..200).map(|i| format!("x-{i}: 1\r\n")).collect();
    assert_eq!(server.request("GET", "/health", &many, "").status, 431);
    let long = format!("x-long: {}\r\n", "y".repeat(300 << 10));
    let mut stream = server.connect();
    drop(stream.write_all(format!("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{long}\r\n").as_bytes()));
    let mut answer = Vec::new();
    drop(stream.read_to_end(&mut answer));
    // The rest of the headers may reset the connection before the refusal is read.
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(server.get("/health").status, 200);
}
