//! The HTTP API of a real server process on the tiny model: answers, streams, every error, disconnects, drain, failure.

mod support;

use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::Command;
use support::server::{Server, events, read_answer};
use support::tiny_model::{CONTEXT, Tiny};
use tempfile::TempDir;

const SMALL_KV: [&str; 4] = ["--device", "cpu", "--kv-cache-memory", "8MiB"];

fn tiny_server(flags: &[&str]) -> (TempDir, Server) {
    let (directory, path) = Tiny::default().write();
    let server = Server::start(&path, &[&SMALL_KV[..], flags].concat());
    (directory, server)
}

/// A server of the default model, whose tokens take tens of milliseconds: for tests of what happens under way.
fn slow_server(flags: &[&str]) -> Server {
    Server::start(&support::default_model(), &[&["--device", "cpu", "--kv-cache-memory", "64MiB"], flags].concat())
}

/// A simulated device: the laptop's profile with `changes`, and these faults.
fn sim_profile(changes: &str, faults: &str) -> (TempDir, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("test.toml");
    let text = format!(
        "name = 'test'\nstep_ms = 0.0\n{changes}\ndecode_ms_per_sequence = 0.0\nprefill_ms_per_token = 0.0\n\
         kv_blocks = 256\nmax_model_len = 4096\n[faults]\n{faults}\n"
    );
    std::fs::write(&path, text).unwrap();
    (directory, path.to_str().unwrap().to_owned())
}

fn chat(fields: Value) -> Value {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 8, "temperature": 0 });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[test]
fn whole_and_streamed_answers_are_the_same() {
    let (_directory, server) = tiny_server(&[]);
    let whole = server.post("/v1/chat/completions", &chat(json!({ "ignore_eos": true }))).json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "tiny");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    // "<user>Hello<assistant>" in bytes.
    let usage = |cached: u64| {
        let details = json!({ "cached_tokens": cached });
        json!({ "prompt_tokens": 22, "completion_tokens": 8, "total_tokens": 30, "prompt_tokens_details": details })
    };
    assert_eq!(whole["usage"], usage(0));
    let options = json!({ "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true } });
    let (chunks, done) = events(&server.post("/v1/chat/completions", &chat(options)).body);
    assert!(done);
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let last = &chunks[chunks.len() - 1];
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &usage(16)), "the prompt is in the cache");
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
    assert!(chunks.iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
}

#[test]
fn text_and_token_prompts_agree_and_tokenize_round_trips() {
    let (_directory, server) = tiny_server(&[]);
    let tokens = server.post("/tokenize", &json!({ "prompt": "héllo" })).json();
    assert_eq!((tokens["count"].as_u64(), tokens["max_model_len"].as_u64()), (Some(6), Some(u64::from(CONTEXT))));
    let text = server.post("/detokenize", &json!({ "tokens": tokens["tokens"] })).json();
    assert_eq!(text, json!({ "prompt": "héllo" }));
    let complete = |prompt: &Value| {
        let body = json!({ "prompt": prompt, "max_tokens": 6, "temperature": 0, "model": "tiny", "ignore_eos": true });
        server.post("/v1/completions", &body).json()["choices"].clone()
    };
    assert_eq!(complete(&json!("héllo")), complete(&tokens["tokens"]));
    let templated = server.post("/tokenize", &json!({ "messages": [{ "role": "user", "content": "Hello" }] })).json();
    assert_eq!(templated["count"], 22);
    let bare = json!({ "messages": [{ "role": "user", "content": "Hello" }], "add_generation_prompt": false });
    assert_eq!(server.post("/tokenize", &bare).json()["count"], 11);
}

#[test]
fn a_seed_repeats_and_another_differs() {
    let (_directory, server) = tiny_server(&[]);
    let text = |seed: u64| {
        let body = chat(json!({ "temperature": 1.5, "seed": seed, "max_tokens": 24, "ignore_eos": true }));
        server.post("/v1/chat/completions", &body).json()["choices"][0]["message"]["content"].clone()
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn a_stop_text_ends_the_answer() {
    let (_directory, server) = tiny_server(&[]);
    let body = json!({ "prompt": "abc", "max_tokens": 60, "temperature": 1, "seed": 4, "ignore_eos": true });
    let whole = server.post("/v1/completions", &body).json()["choices"][0]["text"].as_str().unwrap().to_owned();
    let middle: String = whole.chars().skip(20).take(3).collect();
    let mut stopped = body.clone();
    stopped["stop"] = json!([middle]);
    let answer = server.post("/v1/completions", &stopped).json();
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(answer["choices"][0]["text"].as_str().unwrap(), &whole[..whole.find(&middle).unwrap()]);
}

#[test]
fn every_bad_request_gets_openai_s_error_object() {
    let (_directory, server) = tiny_server(&["--max-body-bytes", "4KiB"]);
    let check = |status: u16, path: &str, body: &str, words: &[&str], param: Value, code: Value| {
        let answer = server.request("POST", path, "content-type: application/json\r\n", body);
        assert_eq!(answer.status, status, "{path} {body}: {}", answer.body);
        let error = &answer.json()["error"];
        let message = error["message"].as_str().unwrap();
        assert!(words.iter().all(|word| message.contains(word)), "{message:?} lacks one of {words:?}");
        assert_eq!((&error["param"], &error["code"]), (&param, &code), "{message}");
        assert_eq!(error["type"], if status < 500 { "invalid_request_error" } else { "server_error" });
    };
    let (chat_path, text_path) = ("/v1/chat/completions", "/v1/completions");
    let null = Value::Null;
    check(400, chat_path, "{\"messages\": [", &["not valid JSON", "line 1"], null.clone(), json!("invalid_json"));
    check(400, chat_path, "[]", &["JSON object"], json!("body"), null.clone());
    check(
        400,
        chat_path,
        &chat(json!({ "temperature": "hot" })).to_string(),
        &["a number", "hot"],
        json!("temperature"),
        null.clone(),
    );
    check(
        400,
        chat_path,
        &chat(json!({ "messages": [] })).to_string(),
        &["must not be empty"],
        json!("messages"),
        null.clone(),
    );
    let logprobs = chat(json!({ "logprobs": true, "top_logprobs": 21 })).to_string();
    check(400, chat_path, &logprobs, &["asks for 21", "at most 20"], json!("top_logprobs"), null.clone());
    let bias = chat(json!({ "logit_bias": { "9999": 1 } })).to_string();
    check(400, chat_path, &bias, &["9999", "outside the vocabulary"], json!("logit_bias"), null.clone());
    check(
        404,
        chat_path,
        &chat(json!({ "model": "gpt-9" })).to_string(),
        &["gpt-9", "tiny"],
        json!("model"),
        json!("model_not_found"),
    );
    let long = json!({ "prompt": "a".repeat(600), "max_tokens": 5 }).to_string();
    check(400, text_path, &long, &["512", "600", "5"], json!("max_tokens"), json!("context_length_exceeded"));
    let huge = json!({ "prompt": "a".repeat(3900) }).to_string();
    check(400, text_path, &huge, &["3900 bytes", "512"], json!("prompt"), json!("context_length_exceeded"));
    let many = json!({ "prompt": "a", "stop_token_ids": vec![0; 200] }).to_string();
    check(400, text_path, &many, &["200", "128"], json!("stop_token_ids"), null.clone());
    let stop = json!({ "prompt": "a", "stop": "a".repeat(2000) }).to_string();
    check(400, text_path, &stop, &["2000", "1024"], json!("stop"), null.clone());
    check(400, text_path, &json!({ "prompt": "" }).to_string(), &["empty"], json!("prompt"), null.clone());
    check(400, text_path, &json!({ "prompt": [7, 260] }).to_string(), &["260"], json!("prompt"), null.clone());
    check(400, text_path, &json!({ "prompt": 5 }).to_string(), &["string or an array"], json!("prompt"), null.clone());
    check(
        413,
        text_path,
        &json!({ "prompt": "a".repeat(5000) }).to_string(),
        &["4096 bytes"],
        null.clone(),
        json!("body_too_large"),
    );
    check(400, "/detokenize", &json!({ "tokens": [999] }).to_string(), &["999", "260"], json!("tokens"), null.clone());
    check(404, "/v1/embeddings", "{}", &["POST /v1/embeddings"], null.clone(), null.clone());
    assert_eq!(server.get(chat_path).status, 405);
    assert_eq!(server.get("/v1/models/tiny").json()["max_model_len"], CONTEXT);
    assert_eq!(server.get("/v1/models/other").status, 404);
    assert_eq!(server.get("/v1/models/%FF").json()["error"]["type"], "invalid_request_error");
    assert_eq!(server.post(chat_path, &chat(json!({}))).status, 200, "the server goes on");
}

#[test]
fn a_client_that_disconnects_frees_its_blocks() {
    let server = slow_server(&[]);
    let body = chat(json!({ "max_tokens": 450, "ignore_eos": true, "stream": true })).to_string();
    let mut streams: Vec<_> = (0..4).map(|_| server.send("POST", "/v1/chat/completions", "", &body)).collect();
    for stream in &mut streams {
        stream.read_exact(&mut [0; 400]).unwrap();
    }
    server.wait_for("four running requests", || server.stat("num_running") == 4);
    assert!(server.stat("num_used_blocks") > 0);
    let steps = server.stat("num_steps");
    drop(streams);
    server.wait_for("the baseline", || server.stat("num_used_blocks") == 0);
    // The step under way, and a few while the kernel and the HTTP server notice; finishing would have taken hundreds.
    let more = server.stat("num_steps") - steps;
    assert!(more <= 5, "{more} steps after the disconnect");
    assert_eq!(server.post("/v1/chat/completions", &chat(json!({}))).status, 200);
}

#[test]
fn more_requests_than_the_pool_holds_all_finish() {
    let (_directory, path) = Tiny::default().write();
    // 20 blocks: one such request needs 8, so two run and the others wait.
    let server = Server::start(&path, &["--device", "cpu", "--kv-cache-memory", "160KiB", "--max-model-len", "200"]);
    let body = chat(json!({ "max_tokens": 100, "ignore_eos": true })).to_string();
    let mut streams: Vec<_> = (0..9).map(|_| server.send("POST", "/v1/chat/completions", "", &body)).collect();
    let texts: Vec<Value> = streams.iter_mut().map(|stream| read_answer(stream).json()["choices"].clone()).collect();
    assert!(texts.iter().all(|text| text == &texts[0]), "the same request gives the same answer beside any others");
    assert_eq!(texts[0][0]["finish_reason"], "length");
    let refused = server.post("/v1/chat/completions", &chat(json!({ "max_tokens": 190 })));
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert_eq!(server.stat("num_used_blocks"), 0);
}

/// Many clients at once, a third of which go away in mid-stream; `--all` runs it thirty times as long.
#[test]
fn random_traffic_with_disconnects_leaves_nothing_behind() {
    let (_directory, server) = tiny_server(&["--max-num-seqs", "8"]);
    let all = std::env::var("PAGODA_TEST_ALL").is_ok_and(|value| value == "1");
    let per_client = if all { 1500 } else { 50 };
    let finished: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4u32)
            .map(|client| {
                scope.spawn({
                    let server = &server;
                    move || (0..per_client).filter(|&i| one_of_many(server, client * 7919 + i)).count()
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().unwrap()).sum()
    });
    assert!(finished as u32 > per_client * 2, "{finished} answers");
    server.wait_for("the baseline", || server.stat("num_used_blocks") + server.stat("num_running") == 0);
}

/// Sends a request of a random length; true when its answer was read to the end.
fn one_of_many(server: &Server, draw: u32) -> bool {
    let draw = draw.wrapping_mul(2_654_435_761) >> 8;
    let fields = json!({
        "messages": [{ "role": "user", "content": "x".repeat(1 + draw as usize % 120) }],
        "max_tokens": 1 + draw % 90, "temperature": draw % 2, "stream": true, "ignore_eos": true,
    });
    let mut stream = server.send("POST", "/v1/chat/completions", "", &chat(fields).to_string());
    if draw.is_multiple_of(3) {
        drop(stream.read_exact(&mut [0; 150]));
        return false;
    }
    let answer = read_answer(&mut stream);
    assert!(answer.status == 200 && answer.body.contains("[DONE]"), "{}: {}", answer.status, answer.body);
    true
}

#[test]
fn a_full_queue_is_429_with_retry_after() {
    let server = slow_server(&["--max-queue", "1", "--max-num-seqs", "1"]);
    let body = chat(json!({ "max_tokens": 450, "ignore_eos": true, "stream": true })).to_string();
    let streams: Vec<_> = (0..2).map(|_| server.send("POST", "/v1/chat/completions", "", &body)).collect();
    server.wait_for("a running and a waiting request", || server.stat("num_running") + server.stat("num_waiting") == 2);
    let refused = server.post("/v1/chat/completions", &chat(json!({})));
    assert_eq!((refused.status, refused.headers.contains("retry-after: 1")), (429, true), "{}", refused.body);
    assert_eq!(refused.json()["error"]["type"], "rate_limit_error");
    drop(streams);
}

#[test]
fn sigterm_finishes_streams_refuses_new_requests_and_exits_0() {
    let mut server = slow_server(&[]);
    let body = chat(json!({ "max_tokens": 150, "ignore_eos": true, "stream": true })).to_string();
    let mut stream = server.send("POST", "/v1/chat/completions", "", &body);
    let mut first = [0; 200];
    stream.read_exact(&mut first).unwrap();
    // A connection that is open before the signal, used after it.
    let mut idle = server.connect();
    idle.write_all(b"GET /ready HTTP/1.1\r\nhost: x\r\n").unwrap();
    server.terminate();
    server.wait_for("the drain", || server.log.lock().unwrap().contains("stopping"));
    let mut cluster = std::net::TcpStream::connect(&server.internal).unwrap();
    cluster.write_all(b"GET /ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let told = read_answer(&mut cluster);
    assert!(told.status == 503 && told.body.contains("draining"), "{}", told.body);
    drop(idle.write_all(b"connection: close\r\n\r\n"));
    let mut answer = String::new();
    drop(idle.read_to_string(&mut answer));
    assert!(answer.is_empty() || answer.contains("503"), "{answer}");
    server.wait_for("a closed door", || std::net::TcpStream::connect(&server.address).is_err());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]") && rest.contains("\"finish_reason\":\"length\""), "the stream was cut: {rest}");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn the_shutdown_timeout_cuts_a_stream_that_does_not_end() {
    let mut server = slow_server(&["--shutdown-timeout", "0"]);
    let body = chat(json!({ "max_tokens": 450, "ignore_eos": true, "stream": true })).to_string();
    let mut stream = server.send("POST", "/v1/chat/completions", "", &body);
    stream.read_exact(&mut [0; 200]).unwrap();
    server.terminate();
    assert_eq!(server.wait().code(), Some(0));
    let mut rest = String::new();
    drop(stream.read_to_string(&mut rest));
    assert!(!rest.contains("[DONE]"), "the stream was not cut");
}

#[test]
fn cors_is_for_the_allowed_origins_alone() {
    let (_directory, server) = tiny_server(&["--allowed-origins", "http://a.example,http://b.example"]);
    let preflight = |origin: &str| {
        let headers = format!("origin: {origin}\r\naccess-control-request-method: POST\r\n");
        server.request("OPTIONS", "/v1/chat/completions", &headers, "").headers
    };
    assert!(preflight("http://b.example").contains("access-control-allow-origin: http://b.example"));
    assert!(!preflight("http://c.example").contains("access-control-allow-origin"));
    let (_directory, closed) = tiny_server(&[]);
    let headers = closed.request("GET", "/v1/models", "origin: http://a.example\r\n", "").headers;
    assert!(!headers.contains("access-control"), "{headers}");
    // A page may send a simple request without asking first: it must not run.
    let refused = closed.request("POST", "/v1/completions", "origin: http://a.example\r\n", "{\"prompt\":\"x\"}");
    assert_eq!(refused.status, 403, "{}", refused.body);
    let allowed = server.request("POST", "/v1/completions", "origin: http://a.example\r\n", "{\"prompt\":\"x\"}");
    assert_eq!(allowed.status, 200, "{}", allowed.body);
    let echoed = closed.request("GET", "/health", "x-request-id: abc-1\r\n", "").headers;
    assert!(echoed.contains("x-request-id: abc-1"), "{echoed}");
}

#[test]
fn settings_come_from_the_file_the_environment_and_flags() {
    let (directory, path) = Tiny::default().write();
    std::fs::write(directory.path().join("pagoda.toml"), "served_model_name = ['of-file']\nmax_model_len = 100\n")
        .unwrap();
    let server = Server::start_with(&path, &SMALL_KV, |command| {
        command.current_dir(directory.path()).env("PAGODA_MAX_MODEL_LEN", "90");
    });
    let models = server.get("/v1/models").json();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("of-file"), &json!(90)));
    std::fs::write(directory.path().join("pagoda.toml"), "no_such_key = 1\n").unwrap();
    let output =
        Command::new(env!("CARGO_BIN_EXE_pagoda")).arg("serve").current_dir(directory.path()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("no_such_key") && error.contains("pagoda.toml"), "{error}");
}

/// A directory whose `kernel` replaces the built-in one.
fn broken_kernel(kernel: &str) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(
        directory.path().join(format!("{kernel}.wgsl")),
        "@compute @workgroup_size(1) fn main() { broken(); }",
    )
    .unwrap();
    let path = directory.path().to_owned();
    (directory, path)
}

#[test]
fn a_device_that_fails_under_way_is_an_error_event_and_exit_70() {
    let (_directory, profile) = sim_profile("decode_ms = 5.0", "die_after_tokens = 60");
    let mut server = Server::start_sim(&profile, &[]);
    let body = chat(json!({ "max_tokens": 450, "stream": true })).to_string();
    let mut streams = [0, 1].map(|_| server.send("POST", "/v1/chat/completions", "", &body));
    for stream in &mut streams {
        let mut rest = String::new();
        drop(stream.read_to_string(&mut rest));
        assert!(rest.contains("\"error\"") && rest.contains("simulated, after 60 tokens"), "no error event: {rest}");
        assert!(!rest.contains("[DONE]"), "{rest}");
    }
    assert_eq!(server.wait().code(), Some(70), "{}", server.log.lock().unwrap());
}

#[test]
fn a_kernel_that_does_not_compile_keeps_the_server_from_starting() {
    let Some(device) = support::software_vulkan() else { return };
    let (_directory, model) = Tiny::default().write();
    let (_kernels, kernels) = broken_kernel("rms_norm");
    let mut server = Server::start_with(&model, &["--device", &device], |command| {
        command.env("PAGODA_SHADER_DIR", &kernels);
    });
    assert_eq!(server.wait().code(), Some(1));
    server.wait_for("the reason", || {
        let log = server.log.lock().unwrap();
        log.contains("rms_norm") && log.contains("broken")
    });
}

#[test]
fn the_openai_client_is_served() {
    let (_directory, server) = tiny_server(&[]);
    let output = Command::new(support::python_with_openai())
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/clients/openai_client.py"))
        .arg(format!("http://{}/v1", server.address))
        .output()
        .unwrap();
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{error}");
    assert!(out.contains("13 checks passed"), "{out}");
}
