//! What requests may ask of the choice of tokens, over HTTP on the tiny model: several answers, log probabilities,
//! penalties, ends, prefix caching, deadlines.

mod support;

use serde_json::{Value, json};
use std::collections::HashSet;
use support::server::{Server, events, read_answer};
use support::tiny_model::Tiny;
use tempfile::TempDir;

const EOS: usize = 257;

fn tiny_server() -> (TempDir, Server) {
    let (directory, path) = Tiny::default().write();
    let server = Server::start(&path, &["--device", "cpu", "--kv-cache-memory", "8MiB"]);
    (directory, server)
}

/// A completion of `abc` with these fields.
fn complete(server: &Server, fields: Value) -> Value {
    let mut body = json!({ "prompt": "abc", "max_tokens": 8, "temperature": 0, "ignore_eos": true });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let answer = server.post("/v1/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.json()
}

fn text(answer: &Value, choice: usize) -> String {
    answer["choices"][choice]["text"].as_str().unwrap().to_owned()
}

fn floats(list: &Value) -> Vec<Option<f64>> {
    list.as_array().unwrap().iter().map(Value::as_f64).collect()
}

#[test]
fn several_answers_are_each_what_their_seed_and_index_say() {
    let (_directory, server) = tiny_server();
    let fields = json!({ "n": 3, "temperature": 1, "seed": 5, "max_tokens": 20 });
    let answer = complete(&server, fields.clone());
    let texts: Vec<String> = (0..3).map(|choice| text(&answer, choice)).collect();
    assert_eq!(texts.iter().collect::<HashSet<_>>().len(), 3, "{texts:?}");
    assert_eq!(answer["usage"]["completion_tokens"], 60);
    assert_eq!(text(&complete(&server, json!({ "temperature": 1, "seed": 5, "max_tokens": 20 })), 0), texts[0]);
    let mut body = json!({ "prompt": "abc", "ignore_eos": true, "stream": true });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let (chunks, done) = events(&server.post("/v1/completions", &body).body);
    let streamed = |index: usize| -> String {
        let choices = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == index);
        choices.map(|choice| choice["text"].as_str().unwrap()).collect()
    };
    assert!(done && (0..3).all(|index| streamed(index) == texts[index]), "{chunks:?}");
    let ends = chunks.iter().filter(|chunk| !chunk["choices"][0]["finish_reason"].is_null()).count();
    assert_eq!(ends, 3);
}

#[test]
fn the_best_are_those_with_the_highest_mean_log_probability() {
    let (_directory, server) = tiny_server();
    let all = complete(&server, json!({ "n": 4, "temperature": 1.3, "seed": 9, "logprobs": 0 }));
    let mean = |choice: &Value| {
        let logprobs = floats(&choice["logprobs"]["token_logprobs"]);
        logprobs.iter().flatten().sum::<f64>() / logprobs.len() as f64
    };
    let choices = all["choices"].as_array().unwrap();
    let best = choices.iter().max_by(|a, b| mean(a).total_cmp(&mean(b))).unwrap();
    let answer = complete(&server, json!({ "best_of": 4, "temperature": 1.3, "seed": 9 }));
    assert_eq!((answer["choices"].as_array().unwrap().len(), &answer["choices"][0]["text"]), (1, &best["text"]));
    assert_eq!((&answer["choices"][0]["logprobs"], &answer["usage"]["completion_tokens"]), (&Value::Null, &json!(32)));
}

#[test]
fn chat_log_probabilities_are_of_each_token_whole_and_streamed() {
    let (_directory, server) = tiny_server();
    let body = |stream: bool| {
        json!({
            "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 6, "temperature": 0, "ignore_eos": true,
            "logprobs": true, "top_logprobs": 3, "stream": stream,
        })
    };
    let whole = server.post("/v1/chat/completions", &body(false)).json();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 6);
    for entry in &content {
        let top = entry["top_logprobs"].as_array().unwrap();
        let values: Vec<f64> = top.iter().map(|top| top["logprob"].as_f64().unwrap()).collect();
        assert!(values.len() == 3 && values.is_sorted_by(|a, b| a >= b) && values[0] < 0.0, "{entry}");
        assert_eq!(
            (&top[0]["token"], &top[0]["bytes"]),
            (&entry["token"], &entry["bytes"]),
            "greedy takes the likeliest"
        );
        assert_eq!(entry["bytes"].as_array().unwrap().len(), 1, "a byte a token");
    }
    let (chunks, _) = events(&server.post("/v1/chat/completions", &body(true)).body);
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed, content);
}

#[test]
fn an_echo_has_the_prompt_s_log_probabilities_too() {
    let (_directory, server) = tiny_server();
    let fragment = complete(&server, json!({ "logprobs": 1, "max_tokens": 1, "logit_bias": { "195": 100 } }));
    let lists = &fragment["choices"][0]["logprobs"];
    assert_eq!(lists["tokens"][0], "bytes:\\xc3", "half a character has a name of its own");
    assert_eq!(lists["top_logprobs"][0]["bytes:\\xc3"], lists["token_logprobs"][0], "written the same in both places");
    let answer = complete(&server, json!({ "echo": true, "logprobs": 2, "max_tokens": 3 }));
    assert!(text(&answer, 0).starts_with("abc"));
    let lists = &answer["choices"][0]["logprobs"];
    assert_eq!(lists["tokens"].as_array().unwrap()[..3], [json!("a"), json!("b"), json!("c")]);
    assert_eq!(lists["text_offset"], json!([0, 1, 2, 3, 4, 5]));
    let logprobs = floats(&lists["token_logprobs"]);
    assert!(logprobs[0].is_none() && logprobs[1..].iter().all(|logprob| logprob.unwrap() < 0.0), "{logprobs:?}");
    // The same asked in another way: "c" is forced after "ab", and log probabilities are told as before the bias.
    let forced =
        complete(&server, json!({ "prompt": "ab", "logprobs": 0, "max_tokens": 1, "logit_bias": { "99": 100 } }));
    assert_eq!(text(&forced, 0), "c");
    let expected = floats(&forced["choices"][0]["logprobs"]["token_logprobs"])[0].unwrap();
    assert!((logprobs[2].unwrap() - expected).abs() < 1e-3, "{logprobs:?} {expected}");
    let (chunks, _) = events(
        &server
            .post("/v1/completions", &json!({ "prompt": "abc", "echo": true, "max_tokens": 2, "stream": true }))
            .body,
    );
    assert_eq!(chunks[0]["choices"][0]["text"], "abc");
}

#[test]
fn prompt_log_probabilities_compute_the_whole_prompt() {
    let (_directory, server) = tiny_server();
    let prompt = "a prompt that is longer than two blocks of sixteen tokens";
    let ask = || complete(&server, json!({ "prompt": prompt, "prompt_logprobs": 1, "max_tokens": 1 }));
    let (first, second) = (ask(), ask());
    let list = first["choices"][0]["prompt_logprobs"].as_array().unwrap();
    assert_eq!((list.len(), &list[0]), (prompt.len(), &Value::Null));
    for (entry, byte) in list[1..].iter().zip(&prompt.as_bytes()[1..]) {
        let own = &entry[byte.to_string()];
        assert_eq!(own["decoded_token"], char::from(*byte).to_string());
        assert!(own["logprob"].as_f64().unwrap() < 0.0 && own["rank"].as_u64().unwrap() >= 1);
        let ranks = entry.as_object().unwrap().values().filter(|value| value["rank"] == 1).count();
        assert_eq!(ranks, 1, "{entry}");
    }
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "the cache is passed by");
    assert_eq!(first["choices"][0]["prompt_logprobs"], second["choices"][0]["prompt_logprobs"]);
    let streamed = json!({ "prompt": prompt, "prompt_logprobs": 1, "stream": true });
    assert_eq!(server.post("/v1/completions", &streamed).json()["error"]["param"], "prompt_logprobs");
}

#[test]
fn biases_and_penalties_change_the_choice() {
    let (_directory, server) = tiny_server();
    let only_a = complete(&server, json!({ "logit_bias": { "65": 100 } }));
    assert_eq!(text(&only_a, 0), "AAAAAAAA");
    // Each "A" costs 2, so a bias of 8 is used up after some.
    let fields = json!({ "logit_bias": { "65": 8, "66": 7 }, "frequency_penalty": 2 });
    let mixed = text(&complete(&server, fields), 0);
    assert!(mixed.contains('A') && mixed.contains('B') && !mixed.contains("AAA"), "{mixed}");
    let greedy = text(&complete(&server, json!({ "max_tokens": 40 })), 0);
    let distinct = |text: &str| text.chars().collect::<HashSet<_>>().len();
    let penalised =
        text(&complete(&server, json!({ "max_tokens": 40, "repetition_penalty": 5, "presence_penalty": 2 })), 0);
    assert!(distinct(&penalised) > distinct(&greedy), "{penalised:?} {greedy:?}");
}

#[test]
fn ends_come_not_before_min_tokens_and_stop_texts_may_stay() {
    let (_directory, server) = tiny_server();
    let ending = |fields: Value| {
        let mut all = json!({ "ignore_eos": false, "logit_bias": { EOS.to_string(): 100 } });
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = complete(&server, all);
        (answer["usage"]["completion_tokens"].as_u64().unwrap(), answer["choices"][0]["finish_reason"].clone())
    };
    assert_eq!(ending(json!({})), (1, json!("stop")));
    assert_eq!(ending(json!({ "min_tokens": 5 })), (6, json!("stop")));
    assert_eq!(ending(json!({ "ignore_eos": true })), (8, json!("length")));
    let stopped = |fields: Value| {
        let mut all = json!({ "logit_bias": { "65": 100 }, "stop": "AA" });
        all.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        text(&complete(&server, all), 0)
    };
    assert_eq!(stopped(json!({})), "");
    assert_eq!(stopped(json!({ "include_stop_str_in_output": true })), "AA");
    assert_eq!(stopped(json!({ "min_tokens": 3, "include_stop_str_in_output": true })), "AAAAA");
    assert_eq!(stopped(json!({ "stop": null, "stop_token_ids": [65] })), "");
}

#[test]
fn a_prompt_that_begins_like_an_earlier_one_is_not_computed_again() {
    let (_directory, server) = tiny_server();
    let prompt = "the same beginning of several blocks, ".repeat(3);
    let cached = |fields: Value| {
        let answer = complete(&server, fields);
        (answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap(), text(&answer, 0))
    };
    let (none, cold) = cached(json!({ "prompt": prompt }));
    let (all, warm) = cached(json!({ "prompt": prompt }));
    assert_eq!((none, all, &cold), (0, 112, &warm), "114 tokens are seven full blocks");
    assert_eq!(cached(json!({ "prompt": format!("{prompt}and more") })).0, 112);
    assert_eq!(cached(json!({ "prompt": prompt, "cache_salt": "tenant" })).0, 0, "salts keep apart");
    assert_eq!(cached(json!({ "prompt": prompt, "cache_salt": "tenant" })).0, 112);
    assert_eq!(server.stat("num_used_blocks"), 0);
    let several = complete(&server, json!({ "prompt": format!("{prompt} of several"), "n": 4, "cache_salt": "other" }));
    assert_eq!(several["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "the first computes it");
    // The server's own count: three of four answers found the seven blocks of the first.
    let metrics = server.get("/metrics").body;
    let hits = metrics.lines().find(|line| line.starts_with("vllm:prefix_cache_hits_total")).unwrap();
    assert!(hits.ends_with(&format!(" {}", 112 * 3 + 112 * 3)), "{hits}");
}

#[test]
fn without_prefix_caching_every_prompt_is_computed() {
    let (_directory, path) = Tiny::default().write();
    let server =
        Server::start(&path, &["--device", "cpu", "--kv-cache-memory", "8MiB", "--enable-prefix-caching", "false"]);
    for _ in 0..2 {
        let answer = complete(&server, json!({ "prompt": "x".repeat(100) }));
        assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    }
    assert_eq!(server.stat("num_cached_blocks"), 0);
}

#[test]
fn a_request_that_takes_too_long_fails_and_frees_its_blocks() {
    let model = support::default_model();
    let server = Server::start(&model, &["--device", "cpu", "--kv-cache-memory", "64MiB", "--max-request-time", "0.6"]);
    let body = |fields: Value| {
        let mut body = json!({ "prompt": "Once", "max_tokens": 1500, "ignore_eos": true });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        body
    };
    let late = server.post("/v1/completions", &body(json!({ "timeout": 0.3 })));
    assert_eq!((late.status, &late.json()["error"]["code"]), (504, &json!("deadline_exceeded")));
    assert!(late.body.contains("within 0.3 s"), "{}", late.body);
    let maximum = server.post("/v1/completions", &body(json!({ "timeout": 60 })));
    assert!(maximum.status == 504 && maximum.body.contains("within 0.6 s"), "{}", maximum.body);
    let mut stream = server.send("POST", "/v1/completions", "", &body(json!({ "stream": true })).to_string());
    let streamed = read_answer(&mut stream).body;
    assert!(streamed.contains("\"deadline_exceeded\"") && !streamed.contains("[DONE]"), "{streamed}");
    server.wait_for("the baseline", || server.stat("num_used_blocks") == 0);
}

#[test]
fn extreme_numbers_are_refused_or_harmless() {
    let (_directory, server) = tiny_server();
    let greedy = text(&complete(&server, json!({})), 0);
    for fields in [json!({ "temperature": 1e-40 }), json!({ "temperature": 1, "top_p": 1e-300 })] {
        assert_eq!(text(&complete(&server, fields.clone()), 0), greedy, "{fields}");
    }
    let refused = |fields: Value| {
        let mut body = json!({ "prompt": "abc" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = server.post("/v1/completions", &body);
        assert_eq!(answer.status, 400, "{fields}: {}", answer.body);
        answer.json()["error"]["param"].as_str().unwrap().to_owned()
    };
    for (param, value) in [("timeout", 1e300), ("timeout", 1e19), ("temperature", 1e30), ("repetition_penalty", 1e-40)]
    {
        assert_eq!(refused(json!({ param: value })), param);
    }
    complete(&server, json!({ "n": 2, "logprobs": 20, "prompt_logprobs": 20 }));
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": vec![1; 100_000], "n": 128 })).status, 400);
}

#[test]
fn a_request_that_can_never_fit_is_refused_with_the_numbers() {
    let (_directory, path) = Tiny::default().write();
    let server = Server::start(&path, &["--device", "cpu", "--kv-cache-memory", "16KiB"]);
    // 64 tokens fit, so the longest sequence is cut to them.
    let refused = server.post("/v1/completions", &json!({ "prompt": "a".repeat(60), "max_tokens": 5 }));
    assert_eq!(refused.status, 400);
    assert!(["64", "60", "5"].iter().all(|number| refused.body.contains(number)), "{}", refused.body);
    assert_eq!(server.post("/v1/completions", &json!({ "prompt": "a".repeat(60), "max_tokens": 4 })).status, 200);
}

#[test]
fn what_a_request_leaves_out_is_as_the_model_recommends() {
    // Of the likeliest token alone: draws are all the same.
    let (_directory, path) = Tiny { number: Some(("general.sampling.top_k", 1)), ..Default::default() }.write();
    let flags = ["--device", "cpu", "--kv-cache-memory", "8MiB"];
    let drawn = |server: &Server, fields: &Value| -> HashSet<String> {
        let draw = |seed: u64| {
            let mut body = json!({ "prompt": "abc", "max_tokens": 12, "ignore_eos": true, "seed": seed });
            body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            text(&server.post("/v1/completions", &body).json(), 0)
        };
        (1..5).map(draw).collect()
    };
    let server = Server::start(&path, &flags);
    assert_eq!(drawn(&server, &json!({})).len(), 1);
    assert_eq!(drawn(&server, &json!({ "top_k": null })).len(), 1);
    assert_eq!(drawn(&server, &json!({ "top_k": -1 })).len(), 4, "a request's own word goes first");
    for none in ["none", "vllm"] {
        let server = Server::start(&path, &[&flags[..], &["--generation-config", none]].concat());
        assert_eq!(drawn(&server, &json!({})).len(), 4, "{none}");
    }
}
