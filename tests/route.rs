//! The router as clients and operators meet it: models, errors, keys, tenants, explanations, other servers behind it, and a
//! file of workers that changes under way.

mod support;

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use support::route::{Cluster, Route, assert_whole, chat, profile, read_stream};
use support::server::{PATIENCE, Server, events};

fn user(text: &str) -> Value {
    json!({ "model": "m", "max_tokens": 3, "messages": [{ "role": "user", "content": text }] })
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn the_engines_api_is_the_routers() {
    let cluster = Cluster::start(2, &profile(0.0, 0.0, 1000));
    let route = cluster.route(&[]);
    // Whole and streamed, chat and text, with what the router does not know passed on.
    let answer = route.post("/v1/chat/completions", &user("Hello"));
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert!(answer.headers.contains("x-request-id: req-") && answer.headers.contains("application/json"));
    assert!(!answer.headers.contains("x-pagoda"), "{}", answer.headers);
    let text =
        json!({ "model": "m", "prompt": "a", "max_tokens": 4, "stream": true, "echo": true, "logprobs": 2, "seed": 1 });
    let (routed, direct) = (route.post("/v1/completions", &text), cluster.engines[0].post("/v1/completions", &text));
    let strip = |body: &str| {
        let (mut chunks, done) = events(body);
        chunks.iter_mut().for_each(|chunk| {
            chunk["id"].take();
            chunk["created"].take();
        });
        (chunks, done)
    };
    assert_eq!(strip(&routed.body), strip(&direct.body));
    assert!(!routed.body.contains("pagoda"), "{}", routed.body);
    assert_eq!(route.post("/tokenize", &json!({ "prompt": "abcdefgh" })).json()["count"], 2);
    assert_eq!(route.get("/v1/models").json()["data"][0]["id"], "m");
    assert_eq!(route.get("/v1/models/m").status, 200);
    // A worker's own refusal is the answer, and no fault.
    let wrong = route.post("/v1/chat/completions", &json!({ "model": "m", "messages": [] }));
    assert!(wrong.status == 400 && wrong.body.contains("must not be empty"), "{}", wrong.body);
    let wrong = route.post(
        "/v1/chat/completions",
        &json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }], "temperature": "hot" }),
    );
    assert!(
        wrong.status == 400 && wrong.body.contains("`temperature`"),
        "{}",
        &wrong.body[..wrong.body.len().min(300)]
    );
    // What is no stream is none, whatever the body says; a time that the client gave is over for all workers.
    assert_eq!(route.post("/tokenize", &json!({ "prompt": "abcdefgh", "stream": true })).json()["count"], 2);
    let late = json!({ "model": "m", "prompt": "a", "max_tokens": 5000, "timeout": 0.000001 });
    let late = route.post("/v1/completions", &late);
    assert!(late.status == 504 && late.body.contains("deadline_exceeded"), "{}: {}", late.status, late.body);
    assert_eq!(route.metric("pagoda_router_retries_total", &[]), 0.0);
    // The router's own.
    let wrong =
        route.post("/v1/chat/completions", &json!({ "model": "x", "messages": [{ "role": "user", "content": "a" }] }));
    assert!(wrong.status == 404 && wrong.body.contains("served here: m"), "{}", wrong.body);
    let wrong = route.request("POST", "/v1/completions", "", "{\"prompt\": ");
    assert!(wrong.status == 400 && wrong.body.contains("line 1"), "{}", wrong.body);
    assert_eq!(route.get("/nowhere").status, 404);
    assert_eq!(route.metric("pagoda_router_circuit_opened_total", &[]), 0.0);
}

#[test]
fn bodies_over_the_limit_are_refused_before_they_are_read() {
    let cluster = Cluster::start(1, &profile(0.0, 0.0, 1000));
    let route = cluster.route(&["--max-body-bytes", "10K"]);
    assert_eq!(route.post("/v1/chat/completions", &user(&"a".repeat(9_000))).status, 200);
    let refused = route.post("/v1/chat/completions", &user(&"a".repeat(11_000)));
    assert!(refused.status == 413 && refused.body.contains("10240 bytes"), "{}", refused.body);
    let chunked = format!("2f00\r\n{}\r\n0\r\n\r\n", " ".repeat(0x2f00));
    let mut stream = std::net::TcpStream::connect(&route.address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n";
    stream.write_all(format!("{head}{chunked}").as_bytes()).unwrap();
    assert_eq!(support::server::read_answer(&mut stream).status, 413);
}

#[test]
fn tenants_do_not_find_each_others_prompts() {
    let cluster = Cluster::start(1, &profile(0.0, 0.0, 1000));
    let keys = cluster.directory.path().join("keys");
    std::fs::write(&keys, "alice ka\nbob kb # a comment\n").unwrap();
    let flags = ["--api-key-file", keys.to_str().unwrap()];
    let route = cluster.route(&flags);
    let text = "A prompt that two tenants have, and that is long enough for some blocks. ".repeat(4);
    let ask = |route: &Route, key: &str, body: &Value| {
        route.request("POST", "/v1/chat/completions", &format!("authorization: Bearer {key}\r\n"), &body.to_string())
    };
    assert_eq!(route.post("/v1/chat/completions", &user(&text)).status, 401);
    assert_eq!(route.get("/v1/models").status, 401);
    assert_eq!(ask(&route, "kc", &user(&text)).status, 401);
    assert_eq!(cached(&ask(&route, "ka", &user(&text)).json()), 0);
    assert!(cached(&ask(&route, "ka", &user(&text)).json()) > 0);
    assert_eq!(cached(&ask(&route, "kb", &user(&text)).json()), 0, "bob's own");
    let mut forged = user(&text);
    forged["cache_salt"] = json!("tenant 5 alice ");
    assert_eq!(cached(&ask(&route, "kb", &forged).json()), 0);
    forged["cache_salt"] = json!("another");
    forged["pagoda"] = json!({ "cache_salt": "tenant 5 alice ", "resume": [{ "token_ids": [1], "begun": true }] });
    assert_eq!(cached(&ask(&route, "kb", &forged).json()), 0);
    // Where they are to share, they do.
    let shared = cluster.route(&[&flags[..], &["--share-prefixes"]].concat());
    let other = format!("{text} Shared.");
    assert_eq!(cached(&ask(&shared, "ka", &user(&other)).json()), 0);
    assert!(cached(&ask(&shared, "kb", &user(&other)).json()) > 0);
}

#[test]
fn a_decision_is_explained_to_operators_and_to_clients_where_that_is_wanted() {
    let cluster = Cluster::start(2, &profile(0.0, 0.0, 1000));
    let route = cluster.route(&["--explain"]);
    let body = user(&"Explain this at length. ".repeat(20));
    assert_eq!(route.post("/v1/chat/completions", &body).status, 200);
    route.wait_for("the chunks", || route.metric("pagoda_router_index_chunks", &[]) > 1.0);
    let answer = route.request("POST", "/v1/chat/completions", "x-pagoda-explain: 1\r\n", &body.to_string());
    let line = answer.headers.lines().find_map(|line| line.strip_prefix("x-pagoda-explain: ")).unwrap();
    let explained: Value = serde_json::from_str(line).unwrap();
    assert_eq!(explained["winner"], explained["scores"][0]["worker"]);
    assert!(explained["scores"][0]["held_tokens"].as_u64().unwrap() > 50, "{explained}");
    let mut child = Command::new(env!("CARGO_BIN_EXE_pagoda"))
        .args(["explain", "--router", &route.internal])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(body.to_string().as_bytes()).unwrap();
    let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    assert!(text.contains("-> ") && text.contains("predicted-ttft") && text.contains("holds"), "{text}");
    let silent = cluster.route(&[]);
    let answer = silent.request("POST", "/v1/chat/completions", "x-pagoda-explain: 1\r\n", &body.to_string());
    assert!(!answer.headers.contains("x-pagoda"), "{}", answer.headers);
}

#[test]
fn other_servers_of_the_api_are_workers_too() {
    let cluster = Cluster::start(1, &profile(0.0, 0.0, 1000));
    let foreign = Server::start_sim("instant", &["--served-model-name", "m", "--api-key", "secret"]);
    let key = cluster.directory.path().join("key");
    std::fs::write(&key, "secret\n").unwrap();
    cluster.write_text(&format!(
        "[[worker]]\nname = \"own\"\nurl = \"http://{}\"\n[[worker]]\nname = \"foreign\"\nopenai = \"http://{}\"\napi_key_file = {key:?}\n",
        cluster.engines[0].internal, foreign.address
    ));
    let route = Route::start(&cluster.workers_file(), 2, &["--policy", "round-robin"]);
    for number in 0..4 {
        let stream = route.send("POST", "/v1/chat/completions", "", &chat(number, 20).to_string());
        assert_whole(&read_stream(stream), number, 20);
    }
    let sent = |worker: &str| route.metric("pagoda_router_sent_total", &[&format!("worker=\"{worker}\"")]);
    assert_eq!((sent("own"), sent("foreign")), (2.0, 2.0));
    // What it holds is guessed from what was sent to it.
    let exact = Route::start(&cluster.workers_file(), 2, &[]);
    let body = user(&"Where was I? ".repeat(40));
    let first = exact.post("/v1/chat/completions", &body);
    assert_eq!(first.status, 200);
    (0..5).for_each(|_| assert!(cached(&exact.post("/v1/chat/completions", &body).json()) > 50));
}

#[test]
fn the_file_of_workers_is_followed() {
    let mut cluster = Cluster::start(2, &profile(5.0, 0.0, 1000));
    let route = cluster.route(&[]);
    // A stream runs on while its worker is taken out of the file, and one more comes.
    let stream = route.send("POST", "/v1/chat/completions", "", &chat(1, 200).to_string());
    cluster.engines.push(cluster.engine(&[]));
    let taken_out = cluster.engines.remove(0);
    cluster.write();
    route.wait_for("the change", || route.log.lock().unwrap().contains("has changed"));
    route.wait_ready(2);
    assert_whole(&read_stream(stream), 1, 200);
    drop(taken_out);
    // A file that cannot be read changes nothing.
    cluster.write_text("[[worker]]\nurl = \"nonsense\"\n");
    route.wait_for("the complaint", || route.log.lock().unwrap().contains("stay as they are"));
    assert_eq!((route.num_ready(), route.post("/v1/chat/completions", &user("a")).status), (2, 200));
    cluster.write_text("");
    route.wait_for("nobody", || route.num_ready() == 0);
    let refused = route.post("/v1/chat/completions", &user("a"));
    assert!(refused.status == 503 && refused.body.contains("there are none"), "{}", refused.body);
}

#[test]
fn prompts_that_begin_alike_go_together_and_the_rest_spreads() {
    let cluster = Cluster::start(8, &profile(0.0, 0.02, 4000));
    let route = cluster.route(&[]);
    // One at a time: where policies that know only load send everything to one worker.
    let (groups, each) = (24, 6);
    let mut hits = 0;
    for turn in 0..each {
        for group in 0..groups {
            let body = user(&format!("{}{turn}", format!("Group {group} shares this. ").repeat(60)));
            hits += usize::from(cached(&route.post("/v1/chat/completions", &body).json()) > 250);
        }
    }
    assert!(hits * 100 >= groups * (each - 1) * 95, "{hits} hits");
    let sent: Vec<f64> =
        (0..8).map(|worker| route.metric("pagoda_router_sent_total", &[&format!("worker=\"{worker}\"")])).collect();
    let mean = sent.iter().sum::<f64>() / 8.0;
    let most = sent.iter().copied().fold(0.0, f64::max);
    assert!(most <= mean * 1.34, "{sent:?}");
    let (predicted, real) = (
        route.metric("pagoda_router_predicted_hit_tokens_total", &[]),
        route.metric("pagoda_router_hit_tokens_total", &[]),
    );
    assert!(predicted <= real * 1.05 && predicted > real * 0.7, "{predicted} {real}");
    assert!(!route.log.lock().unwrap().contains("holds other prompts"));
}

#[test]
fn wrong_settings_are_refused_with_what_is_right() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("workers.toml");
    std::fs::write(&file, "").unwrap();
    let path = file.to_str().unwrap();
    for (flags, words) in [
        (vec!["--workers", "/nowhere.toml"], "/nowhere.toml"),
        (vec!["--workers", path, "--scorer", "x=1"], "there are prefix-cache"),
        (vec!["--workers", path, "--max-tries", "0"], "--max-tries 0"),
        (vec!["--workers", path, "--internal-listen", "0.0.0.0:0"], "--cluster-token-file"),
        (vec!["--workers", path, "--policy", "best"], "possible values: pagoda"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
        let output = command.args(["route", "--port", "0"]).args(&flags).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && text.contains(words), "{flags:?}: {text}");
    }
}
