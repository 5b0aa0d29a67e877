//! The router over real simulated engines to which everything happens: killed, hung, drained, gone and back, restarted empty,
//! flapping, talking garbage. Each stream comes whole: every token once.

mod support;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use serde_json::json;
use support::route::{Cluster, Route, Streamed, assert_all_whole, chat, profile, read_for, signal, streams};

fn p99_gap(all: &[Streamed]) -> Duration {
    let mut gaps: Vec<Duration> = all.iter().map(|streamed| streamed.gap).collect();
    gaps.sort_unstable();
    gaps[(gaps.len() * 99).div_ceil(100) - 1]
}

#[test]
fn a_killed_worker_breaks_no_stream() {
    let mut cluster = Cluster::start(8, &profile(20.0, 0.05, 2000));
    let route = cluster.route(&[]);
    let kills = if std::env::var("PAGODA_TEST_ALL").is_ok() { 100 } else { 5 };
    for kill in 0..kills {
        let victim = kill % 8;
        let all = streams(&route, 64, 60, || {
            std::thread::sleep(Duration::from_millis(150 + 97 * (kill as u64 % 9)));
            signal(cluster.engines[victim].pid(), "KILL");
        });
        assert_all_whole(&all, 60);
        assert!(p99_gap(&all) < Duration::from_secs(2), "kill {kill}: {:?}", p99_gap(&all));
        assert_eq!(route.num_ready(), 7);
        cluster.revive(victim);
        let revived = Instant::now();
        route.wait_ready(8);
        assert!(revived.elapsed() < Duration::from_secs(2), "{:?}", revived.elapsed());
    }
    assert!(route.metric("pagoda_router_continuations_total", &["broken"]) > kills as f64);
    assert_eq!(route.metric("pagoda_router_broken_streams_total", &[]), 0.0);
    assert_eq!(route.metric("pagoda_router_requests_running", &[]), 0.0, "nothing is left over");
}

#[test]
fn a_hung_worker_is_left_and_taken_back() {
    let cluster = Cluster::start(2, &profile(20.0, 0.05, 2000));
    let route = cluster.route(&[]);
    let victim = cluster.engines[0].pid();
    let all = streams(&route, 12, 80, || {
        std::thread::sleep(Duration::from_millis(400));
        signal(victim, "STOP");
    });
    assert_all_whole(&all, 80);
    assert!(all.iter().map(|streamed| streamed.gap).max() < Some(Duration::from_secs(8)), "{all:?}");
    // What it had under way it is told to drop once it hears again; and it gets traffic.
    signal(victim, "CONT");
    route.wait_ready(2);
    route.wait_for("the streams that it had", || cluster.engines[0].stat("num_running") == 0);
    assert_all_whole(&streams(&route, 8, 10, || {}), 10);
}

#[test]
fn a_drained_worker_hands_its_streams_over() {
    let mut cluster = Cluster::start(3, &profile(20.0, 0.05, 2000));
    let route = cluster.route(&[]);
    let all = streams(&route, 24, 100, || {
        std::thread::sleep(Duration::from_millis(500));
        cluster.engines[1].terminate();
        let started = Instant::now();
        assert!(cluster.engines[1].wait().success() && started.elapsed() < Duration::from_secs(5), "it does not wait");
    });
    assert_all_whole(&all, 100);
    assert!(route.metric("pagoda_router_continuations_total", &["hand-off"]) > 0.0);
    assert_eq!(route.metric("pagoda_router_circuit_opened_total", &[]), 0.0, "that is no fault");
}

#[test]
fn all_workers_gone_is_said_at_once_and_their_return_is_used() {
    let mut cluster = Cluster::start(2, &profile(10.0, 0.05, 2000));
    let route = cluster.route(&[]);
    let all = streams(&route, 4, 150, || {
        std::thread::sleep(Duration::from_millis(300));
        cluster.engines.iter().for_each(|engine| signal(engine.pid(), "KILL"));
        let started = Instant::now();
        route.wait_for("nobody", || route.num_ready() == 0);
        let refused = route.post("/v1/chat/completions", &chat(9, 5));
        assert_eq!(refused.status, 503, "{}", refused.body);
        assert!(refused.headers.contains("retry-after") && refused.body.contains("no worker takes requests of `m`"));
        assert!(started.elapsed() < Duration::from_secs(3));
        cluster.revive(0);
        cluster.revive(1);
    });
    // What ran waited for them.
    assert_all_whole(&all, 150);
    route.wait_ready(2);
    assert_all_whole(&streams(&route, 4, 10, || {}), 10);
}

#[test]
fn a_worker_that_restarts_holds_nothing_and_is_known_for_it() {
    let mut cluster = Cluster::start(1, &profile(0.0, 0.0, 2000));
    let route = cluster.route(&[]);
    let body = chat(1, 4);
    let held = || {
        let request = body.to_string();
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_pagoda"))
            .args(["explain", "--json", "--router", &route.internal])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(request.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        answer["scores"][0]["held_tokens"].as_u64()
    };
    assert_eq!(held(), Some(0));
    assert_eq!(route.post("/v1/chat/completions", &body).status, 200);
    route.wait_for("the prompt to be known", || held() > Some(50));
    signal(cluster.engines[0].pid(), "KILL");
    route.wait_ready(0);
    cluster.revive(0);
    route.wait_ready(1);
    // What was sent of late is expected there for some seconds more.
    route.wait_for("nothing", || held() == Some(0));
}

/// What answers each connection with the same bytes, or with nothing, or not at all.
fn odd_server(answer: Option<&'static [u8]>) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let serve = move || {
        let mut kept = Vec::new();
        for stream in listener.incoming().take(10_000) {
            let Ok(mut stream) = stream else { continue };
            let mut buffer = [0; 1024];
            match answer {
                None => kept.push(stream),
                Some(bytes) => {
                    drop(stream.read(&mut buffer));
                    drop(stream.write_all(bytes));
                }
            }
        }
    };
    (address, std::thread::spawn(serve))
}

#[test]
fn workers_that_talk_nonsense_cost_no_request() {
    let cluster = Cluster::start(1, &profile(5.0, 0.0, 2000));
    let answers: [Option<&'static [u8]>; 5] = [
        None,
        Some(b""),
        Some(b"\x16\x03\x01 not http at all"),
        Some(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n\xff\xff\xff\xff\x00garbage"),
        Some(b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n"),
    ];
    let mut file = format!("[[worker]]\nname = \"good\"\nurl = \"http://{}\"\n", cluster.engines[0].internal);
    let mut servers = Vec::new();
    for (number, answer) in answers.into_iter().enumerate() {
        for kind in ["url", "openai"] {
            let (address, thread) = odd_server(answer);
            file.push_str(&format!(
                "[[worker]]\nname = \"{kind}-{number}\"\n{kind} = \"http://{address}\"\nmodels = [\"m\"]\n"
            ));
            servers.push(thread);
        }
    }
    cluster.write_text(&file);
    let route = cluster.route(&[]);
    assert_all_whole(&streams(&route, 16, 20, || {}), 20);
    assert_eq!(route.num_ready(), 1, "none of them is ever ready");
}

#[test]
fn a_worker_that_breaks_after_the_head_is_left_before_anything_is_told() {
    // It says that it is a server of the API, and then breaks every answer: at once, in the head, in the body.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let Ok(mut stream) = stream else { continue };
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                let read = stream.read(&mut buffer).unwrap_or(0);
                let text = String::from_utf8_lossy(&buffer[..read]);
                let answer = if text.starts_with("GET /v1/models") {
                    "HTTP/1.1 200 OK\r\ncontent-length: 25\r\n\r\n{\"data\":[{\"id\":   \"m\"}]}\n"
                } else if text.starts_with("GET") {
                    "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
                } else {
                    ["", "HTTP/1.1 200 OK\r\ncontent-", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
                        [number % 3]
                };
                drop(stream.write_all(answer.as_bytes()));
            });
        }
    });
    let cluster = Cluster::start(1, &profile(5.0, 0.0, 2000));
    let file = format!(
        "[[worker]]\nname = \"good\"\nurl = \"http://{}\"\n[[worker]]\nname = \"bad\"\nopenai = \"http://{address}\"\n",
        cluster.engines[0].internal
    );
    cluster.write_text(&file);
    let route = Route::start(&cluster.workers_file(), 2, &["--policy", "round-robin"]);
    for _ in 0..6 {
        assert_all_whole(&streams(&route, 4, 10, || {}), 10);
    }
    assert!(route.metric("pagoda_router_retries_total", &[]) > 0.0);
    let whole = route.post("/v1/completions", &json!({ "model": "m", "prompt": "a", "max_tokens": 3 }));
    assert_eq!(whole.status, 200, "{}", whole.body);
}

#[test]
fn a_flapping_worker_breaks_no_stream() {
    let mut cluster = Cluster::start(2, &profile(10.0, 0.05, 2000));
    let route = cluster.route(&[]);
    let all = streams(&route, 16, 300, || {
        for _ in 0..4 {
            std::thread::sleep(Duration::from_millis(300));
            signal(cluster.engines[0].pid(), "KILL");
            std::thread::sleep(Duration::from_millis(50));
            cluster.revive(0);
        }
    });
    assert_all_whole(&all, 300);
}

#[test]
fn a_client_that_goes_is_no_load_for_anybody() {
    let cluster = Cluster::start(1, &profile(10.0, 0.05, 2000));
    let route = cluster.route(&[]);
    let engine = &cluster.engines[0];
    let mut all: Vec<_> =
        (0..8).map(|number| route.send("POST", "/v1/chat/completions", "", &chat(number, 2000).to_string())).collect();
    engine.wait_for("the streams", || engine.stat("num_running") == 8);
    let text = read_for(&mut all[0], Duration::from_millis(200));
    assert!(text.contains("data: ") && !text.contains(": pagoda"), "{text}");
    drop(all);
    let started = Instant::now();
    engine.wait_for("their end", || engine.stat("num_running") == 0);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    route.wait_for("their end", || route.metric("pagoda_router_requests_running", &[]) == 0.0);
    assert_eq!(route.metric("pagoda_router_circuit_opened_total", &[]), 0.0);
}

#[test]
fn a_silent_worker_gets_a_rival() {
    // Two engines; the one that is chosen first is stopped before it answers.
    let cluster = Cluster::start(2, &profile(5.0, 0.05, 2000));
    let route = cluster.route(&["--hedge-after", "200"]);
    signal(cluster.engines[0].pid(), "STOP");
    let started = Instant::now();
    let all = streams(&route, 6, 20, || {});
    assert_all_whole(&all, 20);
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    signal(cluster.engines[0].pid(), "CONT");
    route.wait_ready(2);
}

#[test]
fn a_router_that_restarts_knows_what_its_workers_hold() {
    let cluster = Cluster::start(3, &profile(0.0, 0.2, 2000));
    let (first, second) = (cluster.route(&[]), cluster.route(&[]));
    let cached = |route: &Route, number: usize| {
        let mut body = chat(number, 3);
        body["stream"] = json!(false);
        body.as_object_mut().unwrap().remove("stream_options");
        let answer = route.post("/v1/chat/completions", &body).json();
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    (0..12).for_each(|number| assert_eq!(cached(&first, number), 0));
    second.wait_for("all chunks", || second.metric("pagoda_router_index_chunks", &[]) >= 24.0);
    // Another router, which placed none of them, and one that begins now, find them where they are.
    assert!((0..12).all(|number| cached(&second, number) > 50));
    drop((first, second));
    let third = cluster.route(&[]);
    assert!((0..12).all(|number| cached(&third, number) > 50));
}
