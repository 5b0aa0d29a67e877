//! The router over two real engines on the CPU: killed, hung and drained in the middle of streams with characters of several
//! bytes and a stop text across the seam. What comes is what one engine yields that nothing happens to.

mod support;

use serde_json::{Value, json};
use support::route::{Route, Streamed, read_stream, signal};
use support::server::Server;
use support::tiny_model::Tiny;

const ANSWER: usize = 420;

fn body(number: usize, stop: Option<&str>) -> Value {
    let prompt: Vec<usize> = (0..40).map(|at| (at * 37 + number * 101) % 256).collect();
    json!({
        "model": "m", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "repetition_penalty": 1.2, "ignore_eos": true,
        "stream": true, "stop": stop.map(|stop| vec![stop]), "stream_options": { "include_usage": true },
    })
}

/// Streams of which some are on each engine when one is disturbed.
fn streams(route: &Route, bodies: &[Value], disturb: impl FnOnce()) -> Vec<Streamed> {
    std::thread::scope(|scope| {
        let read = |body: &Value| {
            let stream = route.send("POST", "/v1/completions", "", &body.to_string());
            scope.spawn(move || read_stream(stream))
        };
        let reads: Vec<_> = bodies.iter().map(read).collect();
        disturb();
        reads.into_iter().map(|read| read.join().unwrap()).collect()
    })
}

#[test]
fn what_comes_is_what_an_undisturbed_engine_yields() {
    let (directory, path) = Tiny::default().write();
    let flags = ["--served-model-name", "m", "--device", "cpu", "--threads", "1", "--kv-cache-memory", "8MiB"];
    let alone = Server::start(&path, &flags);
    let undisturbed = |body: &Value| read_stream(alone.send("POST", "/v1/completions", "", &body.to_string()));
    // A stop that the text without one has in its last third, across some tokens.
    let mut bodies: Vec<Value> = (0..8).map(|number| body(number, None)).collect();
    for (number, body) in bodies.iter_mut().enumerate().filter(|(number, _)| number % 2 == 1) {
        let text = undisturbed(body).text;
        let letters: Vec<char> = text.chars().collect();
        let from = letters.len() * 3 / 4;
        let stop: String = letters[from..(from + 12).min(letters.len())].iter().collect();
        *body = self::body(number, Some(&stop));
    }
    let expected: Vec<Streamed> = bodies.iter().map(undisturbed).collect();
    assert!(expected.iter().any(|streamed| streamed.text.chars().any(|letter| letter.len_utf8() > 1)));
    let mut num_continued = 0.0;
    for disturbance in ["KILL", "STOP", "TERM"] {
        let engines = [Server::start(&path, &flags), Server::start(&path, &flags)];
        let file = directory.path().join(format!("{disturbance}.toml"));
        let entry = |engine: &Server| format!("[[worker]]\nurl = \"http://{}\"\n", engine.internal);
        std::fs::write(&file, engines.iter().map(entry).collect::<String>()).unwrap();
        let route = Route::start(&file, 2, &["--policy", "round-robin"]);
        let all = streams(&route, &bodies, || {
            engines[0].wait_for("streams", || engines[0].stat("num_running") >= 2 && engines[0].stat("num_steps") > 60);
            signal(engines[0].pid(), disturbance);
        });
        for (number, (streamed, expected)) in all.iter().zip(&expected).enumerate() {
            let of = |streamed: &Streamed| {
                (
                    streamed.text.clone(),
                    streamed.ends,
                    streamed.done,
                    streamed.completion_tokens,
                    streamed.error.clone(),
                )
            };
            assert_eq!(of(streamed), of(expected), "stream {number}, {disturbance}");
        }
        num_continued += route.metric("pagoda_router_continuations_total", &[]);
        if disturbance == "STOP" {
            signal(engines[0].pid(), "CONT");
        }
    }
    assert!(num_continued >= 3.0, "{num_continued} streams were continued");
}
