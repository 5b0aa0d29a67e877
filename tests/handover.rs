//! An engine's side of routing: streams that are cut at any event and continued on another engine, and what engines tell of
//! the prompts they hold.

mod support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use protocol::handover::{Delivery, HAND_OFF, Handover, Progress};
use protocol::openai::RoutedRequest;
use protocol::worker_event::{EventDecoder, WorkerEvent};
use serde_json::{Value, json};
use support::default_model;
use support::server::{Server, events, read_answer};
use support::tiny_model::Tiny;

/// A simulated engine with the tokeniser and template of the default model.
fn start(profile: &str, flags: &[&str]) -> (tempfile::TempDir, Server) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("profile.toml");
    std::fs::write(&path, format!("{profile}\nmodel = {:?}\n", default_model())).unwrap();
    let server = Server::start_sim(path.to_str().unwrap(), flags);
    (directory, server)
}

const INSTANT: &str = "name = \"instant\"\nstep_ms = 0.0\ndecode_ms = 0.0\ndecode_ms_per_sequence = 0.0\n\
    prefill_ms_per_token = 0.0\nkv_blocks = 1000\nmax_model_len = 8192";

/// Sends a request by the internal listener; the answer is to be read from the stream.
fn send(server: &Server, path: &str, body: &Value, handover: &Handover) -> TcpStream {
    let body = String::from_utf8(handover.added_to(body.to_string().as_bytes())).unwrap();
    support::server::send(&server.internal, "POST", &format!("/internal/v1/{path}"), "", &body)
}

/// A stream's events: what each delivers, and its data.
fn read(stream: &mut TcpStream) -> Vec<(Option<String>, Option<String>)> {
    let answer = read_answer(stream);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let line = |event: &str, prefix: &str| {
        event.lines().find_map(|line| line.strip_prefix(prefix)).map(|text| text.trim_start().to_owned())
    };
    answer.body.split_terminator("\n\n").map(|event| (line(event, ":"), line(event, "data:"))).collect()
}

/// What a stream tells of each answer: its text, and how often it ended.
fn told(all: &[(Option<String>, Option<String>)]) -> BTreeMap<u64, (String, usize)> {
    let mut told: BTreeMap<u64, (String, usize)> = BTreeMap::new();
    for (_, data) in all {
        let Some(chunk) = data.as_deref().filter(|data| *data != "[DONE]") else { continue };
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        for choice in chunk["choices"].as_array().unwrap_or_else(|| panic!("{chunk}")) {
            let (text, ends) = told.entry(choice["index"].as_u64().unwrap()).or_default();
            text.push_str(choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default());
            *ends += usize::from(!choice["finish_reason"].is_null());
        }
    }
    told
}

/// Cuts a stream after every event, continues it on another engine, and compares the whole.
fn cut_everywhere(path: &str, body: &Value, num_answers: usize) {
    let ((_a, first), (_b, second)) = (start(INSTANT, &[]), start(INSTANT, &[]));
    let begun = Handover { id: "id-1".into(), created: 7, seed: Some(11), ..Default::default() };
    let whole = read(&mut send(&first, path, body, &begun));
    let expected = told(&whole);
    assert_eq!(whole.last().unwrap().1.as_deref(), Some("[DONE]"));
    assert!(expected.len() == num_answers && expected.values().all(|(_, ends)| *ends == 1), "{expected:?}");
    let usage = |all: &[(Option<String>, Option<String>)]| {
        let chunk: Value = serde_json::from_str(all[all.len() - 2].1.as_deref().unwrap()).unwrap();
        (chunk["usage"]["completion_tokens"].clone(), chunk["id"].clone(), chunk["created"].clone())
    };
    for cut in 0..whole.len() {
        let mut resume = vec![Progress::default(); num_answers];
        for (comment, _) in &whole[..cut] {
            if let Some(delivery) = comment.as_deref().and_then(Delivery::parse) {
                resume[delivery.index].note(&delivery);
            }
        }
        let rest = read(&mut send(&second, path, body, &Handover { resume, ..begun.clone() }));
        let joined: Vec<_> = whole[..cut].iter().chain(&rest).cloned().collect();
        assert_eq!(told(&joined), expected, "cut after {cut} of {} events", whole.len());
        let roles = |all: &[(Option<String>, Option<String>)]| {
            all.iter().filter(|(_, data)| data.as_ref().is_some_and(|data| data.contains("\"role\""))).count()
        };
        assert_eq!(roles(&joined), roles(&whole), "cut after {cut}");
        if cut + 2 < whole.len() {
            assert_eq!(usage(&rest), usage(&whole));
        }
    }
}

#[test]
fn a_stream_is_continued_after_any_event_with_every_token_once() {
    let chat = json!({
        "messages": [{ "role": "user", "content": "Tell me something." }], "max_tokens": 40, "temperature": 1.0,
        "repetition_penalty": 1.3, "stream": true, "stream_options": { "include_usage": true },
    });
    cut_everywhere("chat/completions", &chat, 1);
}

#[test]
fn answers_side_by_side_and_echoed_prompts_are_continued() {
    let completion = json!({
        "prompt": "Once upon a time", "max_tokens": 12, "n": 2, "echo": true, "temperature": 1.0, "stream": true,
        "logprobs": 1, "stream_options": { "include_usage": true },
    });
    cut_everywhere("completions", &completion, 2);
}

#[test]
fn a_stop_text_across_the_seam_is_found() {
    // The text without a stop tells what to stop at: some letters in its middle, which lie across tokens.
    let (_directory, server) = start(INSTANT, &[]);
    let mut chat = json!({
        "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 60, "temperature": 1.0, "seed": 3,
        "stream": true, "stream_options": { "include_usage": true },
    });
    let free = told(&read(&mut send(&server, "chat/completions", &chat, &Handover::default())));
    let letters: Vec<char> = free[&0].0.chars().collect();
    assert!(free[&0].0.chars().any(|letter| letter.len_utf8() > 1), "no letter of several bytes: {}", free[&0].0);
    let stop: String = letters[letters.len() / 2..letters.len() / 2 + 9].iter().collect();
    chat["stop"] = json!([stop]);
    cut_everywhere("chat/completions", &chat, 1);
}

#[test]
fn a_drain_hands_streams_to_who_can_continue_them() {
    let slow = INSTANT.replace("decode_ms = 0.0", "decode_ms = 20.0");
    let (_directory, mut server) = start(&slow, &[]);
    let body = json!({ "prompt": "a", "max_tokens": 2000, "stream": true, "ignore_eos": true });
    let mut stream = send(&server, "completions", &body, &Handover::default());
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    let started = Instant::now();
    server.terminate();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains(&format!(": {HAND_OFF}\n\n")) && !rest.contains("[DONE]"), "{rest}");
    assert!(server.wait().success() && started.elapsed() < Duration::from_secs(10));
}

#[test]
fn only_the_internal_listener_hears_of_handovers() {
    let (_directory, server) = start(INSTANT, &[]);
    let handover = Handover {
        id: "forged".into(),
        resume: vec![Progress { token_ids: vec![5], begun: true, ..Default::default() }],
        ..Default::default()
    };
    let body = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 3, "stream": true });
    let body = String::from_utf8(handover.added_to(body.to_string().as_bytes())).unwrap();
    let answer = server.request("POST", "/v1/chat/completions", "", &body);
    assert!(!answer.body.contains("forged") && !answer.body.contains(": pagoda"), "{}", answer.body);
    assert!(events(&answer.body).1 && answer.body.contains("\"role\""));
    // What no engine can have done is refused.
    let chat = json!({ "messages": [{ "role": "user", "content": "a" }], "max_tokens": 3, "stream": true });
    let refused = |progress: Progress, body: &Value| {
        let handover = Handover { resume: vec![progress], ..Default::default() };
        let answer = read_answer(&mut send(&server, "chat/completions", body, &handover));
        assert_eq!(answer.status, 400, "{}", answer.body);
        answer.body
    };
    let of = |token_ids: &[u32], text_bytes: usize| Progress {
        token_ids: token_ids.into(),
        text_bytes,
        ..Default::default()
    };
    assert!(refused(of(&[u32::MAX], 0), &chat).contains("generated"));
    assert!(refused(of(&[], usize::MAX), &chat).contains("text without tokens"));
    let mut whole = chat.clone();
    whole["stream"] = json!(false);
    assert!(refused(of(&[5], 0), &whole).contains("pagoda.resume"));
    assert_eq!(server.get("/health").status, 200);
    // What is no handover is refused by name.
    let body = json!({ "prompt": "a", "pagoda": { "resume": 3 } });
    let mut stream = support::server::send(&server.internal, "POST", "/internal/v1/completions", "", &body.to_string());
    let answer = read_answer(&mut stream);
    assert!(answer.status == 400 && answer.body.contains("`pagoda`"), "{}", answer.body);
}

/// What an engine says that it holds, followed.
struct Follower {
    stream: TcpStream,
    decoder: EventDecoder,
    held: BTreeMap<u64, u32>,
    sequence: Option<u64>,
}

impl Follower {
    fn connect(server: &Server) -> Self {
        let mut stream = TcpStream::connect(&server.internal).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        // Of HTTP/1.0, so that the body is not in chunks.
        stream.write_all(b"GET /internal/v1/events HTTP/1.0\r\nhost: x\r\n\r\n").unwrap();
        let (mut head, mut byte) = (Vec::new(), [0]);
        while !head.ends_with(b"\r\n\r\n") {
            if stream.read(&mut byte).is_ok_and(|read| read == 1) {
                head.push(byte[0]);
            }
        }
        assert!(head.starts_with(b"HTTP/1.0 200") || head.starts_with(b"HTTP/1.1 200"));
        Self { stream, decoder: EventDecoder::default(), held: BTreeMap::new(), sequence: None }
    }

    /// Takes in what is told until something holds.
    fn until(&mut self, what: &str, done: impl Fn(&BTreeMap<u64, u32>) -> bool) {
        let (started, mut buffer) = (Instant::now(), vec![0; 1 << 16]);
        loop {
            assert!(started.elapsed() < support::server::PATIENCE, "{what}: {:?}", self.held);
            if let Ok(read) = self.stream.read(&mut buffer) {
                self.decoder.push(&buffer[..read]);
            }
            while let Some(event) = self.decoder.next_event().unwrap() {
                self.take(event);
            }
            if self.sequence.is_some() && done(&self.held) {
                return;
            }
        }
    }

    /// Takes in all that is told of what has been done.
    fn settle(&mut self) {
        let until = Instant::now() + Duration::from_millis(120);
        self.until("some time", |_| Instant::now() > until);
    }

    fn take(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::Hello { sequence, report, .. } => {
                assert!(report.ready && self.sequence.is_none());
                self.sequence = Some(sequence);
            }
            WorkerEvent::Snapshot(held) => self.held.extend(held.iter().map(|chunk| (chunk.hash, chunk.num_tokens))),
            WorkerEvent::Change { sequence, removed, stored } => {
                assert_eq!(Some(sequence), self.sequence.map(|before| before + 1));
                self.sequence = Some(sequence);
                self.held.retain(|hash, _| !removed.contains(hash));
                self.held.extend(stored.iter().map(|chunk| (chunk.hash, chunk.num_tokens)));
            }
            WorkerEvent::SnapshotEnd | WorkerEvent::Report(_) => {}
        }
    }

    /// Tokens of a request's prompt that are said to be held.
    fn predicted(&self, body: &Value) -> u32 {
        let text = body.to_string();
        let request = RoutedRequest::parse(text.as_bytes(), true).unwrap();
        let chain = request.chain("m", &request.cache_salt);
        chain.chunks().iter().map_while(|chunk| self.held.get(&chunk.hash)).copied().last().unwrap_or(0)
    }
}

/// Chats of several turns; of each turn, what was predicted and what was found.
fn chats(server: &Server, follower: &mut Follower, num_chats: usize, turns: usize) -> Vec<(u32, u64)> {
    let mut found = Vec::new();
    for chat in 0..num_chats {
        let long = "You are an assistant who answers at length, with examples. ".repeat(chat % 5);
        let mut messages = vec![json!({ "role": "system", "content": format!("{long}You help {chat}.") })];
        for turn in 0..turns {
            let question =
                format!("Question {turn} of chat {chat}: what is {}?\n", "why ".repeat(turn * 13 + chat % 7));
            messages.push(json!({ "role": "user", "content": question }));
            let body = json!({ "messages": messages, "model": "m", "max_tokens": 20 + 7 * turn, "temperature": 1.0,
                "seed": chat, "ignore_eos": chat % 2 == 0, "stop": if chat % 3 == 0 { json!(["e"]) } else { json!([]) } });
            let predicted = follower.predicted(&body);
            let answer = server.post("/v1/chat/completions", &body).json();
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
            found.push((predicted, cached));
            messages.push(json!({ "role": "assistant", "content": answer["choices"][0]["message"]["content"] }));
            let next = json!({ "messages": messages, "model": "m" });
            let before = predicted;
            follower.until("the answer", |held| {
                let text = body.to_string();
                let chain = RoutedRequest::parse(text.as_bytes(), true).unwrap().chain("m", "");
                chain.chunks().iter().all(|chunk| held.contains_key(&chunk.hash))
            });
            assert!(follower.predicted(&next) >= before);
        }
    }
    found
}

#[test]
fn what_is_told_of_chats_is_what_is_found() {
    let (_directory, server) = start(INSTANT, &["--served-model-name", "m"]);
    let mut follower = Follower::connect(&server);
    let found = chats(&server, &mut follower, 25, 8);
    // Of an answer as little is promised as its text gives when it is tokenised again: random tokens are others then.
    let over = found.iter().filter(|(predicted, cached)| u64::from(*predicted) > cached + 16).count();
    assert!(over * 100 <= found.len(), "{over} of {} turns promise over a block too much: {found:?}", found.len());
    let short = found.iter().map(|(predicted, cached)| cached.saturating_sub(u64::from(*predicted))).max();
    assert!(short < Some(64), "no more than a chunk and an answer are not known of: {found:?}");
    assert!(found.iter().filter(|(_, cached)| *cached > 100).count() > 120, "later turns find the earlier ones");
}

/// Templates that do to a conversation what real ones do, and what then is known of less.
const TEMPLATES: [(&str, &str); 4] = [
    ("as it is", "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"),
    ("trims", "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<assistant>"),
    (
        "strips reasoning",
        "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}<assistant>",
    ),
    (
        "moves the system to the end",
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<system>{{ messages[0].content }}<assistant>",
    ),
];

#[test]
fn templates_that_change_what_was_sent_are_known_for_less_and_never_for_what_is_not_held() {
    let mut promised = Vec::new();
    for (what, template) in TEMPLATES {
        let (directory, model) = Tiny { template: Some(template), ..Tiny::default() }.write();
        let path = directory.path().join("profile.toml");
        std::fs::write(&path, format!("{INSTANT}\nmodel = {model:?}\n")).unwrap();
        let server = Server::start_sim(path.to_str().unwrap(), &["--served-model-name", "m"]);
        let (mut follower, mut sum) = (Follower::connect(&server), 0);
        for chat in 0..4 {
            let mut messages =
                vec![json!({ "role": "system", "content": format!("You help number {chat}, and take your time. ") })];
            for turn in 0..5 {
                messages
                    .push(json!({ "role": "user", "content": format!(" Question {turn}, with spaces around it? ") }));
                let body = json!({ "messages": messages, "model": "m", "max_tokens": 6, "ignore_eos": true });
                follower.settle();
                let predicted = follower.predicted(&body);
                let answer = server.post("/v1/chat/completions", &body).json();
                let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
                assert!(
                    u64::from(predicted) <= cached + 16,
                    "{what}: turn {turn} promises {predicted}, finds {cached}"
                );
                sum += predicted;
                let content = format!("<think>thoughts of turn {turn}</think>The answer {turn}, at some length.");
                messages.push(json!({ "role": "assistant", "content": content }));
            }
        }
        promised.push(sum);
    }
    assert!(promised[0] > 1000, "{promised:?}");
    assert!(promised[1..].iter().all(|less| *less < promised[0] / 2), "{promised:?}");
}

#[test]
fn what_leaves_the_pool_is_withdrawn() {
    let small = INSTANT.replace("kv_blocks = 1000", "kv_blocks = 60");
    let (_directory, server) = start(&small, &["--served-model-name", "m"]);
    let mut follower = Follower::connect(&server);
    let body = |number: usize| {
        let words = format!("word{number} ").repeat(60);
        json!({ "model": "m", "messages": [{ "role": "user", "content": words }], "max_tokens": 4 })
    };
    for number in 0..12 {
        assert_eq!(server.post("/v1/chat/completions", &body(number)).status, 200);
        follower.until("the prompt", |_| true);
    }
    let started = Instant::now();
    while follower.predicted(&body(11)) == 0 || follower.predicted(&body(0)) > 0 {
        assert!(started.elapsed() < support::server::PATIENCE, "{:?}", follower.held);
        follower.until("a change", |_| true);
    }
    // What else the last answer changed.
    follower.settle();
    assert!((10..40).contains(&follower.held.len()), "{:?}", follower.held);
    // A later reader is told the same.
    let mut later = Follower::connect(&server);
    later.until("the snapshot", |held| !held.is_empty());
    assert_eq!(later.held, follower.held);
}
