//! A real `pagoda route` process over real simulated engines, and streams read from it.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::server::{Answer, PATIENCE, Server, read_answer, send};

/// Engines of one profile, and the file that names them.
pub struct Cluster {
    pub directory: tempfile::TempDir,
    pub engines: Vec<Server>,
    profile: PathBuf,
}

/// A simulated engine of some speed.
pub fn profile(decode_ms: f64, prefill_ms_per_token: f64, kv_blocks: usize) -> String {
    format!(
        "name = \"s\"\nstep_ms = 0.0\ndecode_ms = {decode_ms}\ndecode_ms_per_sequence = 0.0\n\
         prefill_ms_per_token = {prefill_ms_per_token}\nkv_blocks = {kv_blocks}\nmax_model_len = 32768\n"
    )
}

impl Cluster {
    /// So many engines of a profile.
    pub fn start(count: usize, profile: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("profile.toml");
        std::fs::write(&path, profile).unwrap();
        let mut cluster = Self { directory, engines: Vec::new(), profile: path };
        cluster.engines = (0..count).map(|_| cluster.engine(&[])).collect();
        cluster.write();
        cluster
    }

    /// One more engine of the same profile.
    pub fn engine(&self, flags: &[&str]) -> Server {
        let path = self.profile.to_str().unwrap();
        Server::start_sim(path, &[&["--served-model-name", "m"], flags].concat())
    }

    /// Starts an engine anew, at the same addresses.
    pub fn revive(&mut self, index: usize) {
        let (address, internal) = (self.engines[index].address.clone(), self.engines[index].internal.clone());
        let port = address.rsplit_once(':').unwrap().1;
        let path = self.profile.to_str().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
        command.args(["serve", "--device", &format!("sim:{path}"), "--port", port, "--internal-listen", &internal]);
        command.args(["--served-model-name", "m"]);
        self.engines[index] = Server::start_by(&mut command);
    }

    pub fn workers_file(&self) -> PathBuf {
        self.directory.path().join("workers.toml")
    }

    /// Writes the file of workers.
    pub fn write(&self) {
        let entry = |(index, engine): (usize, &Server)| {
            format!("[[worker]]\nname = \"{index}\"\nurl = \"http://{}\"\n", engine.internal)
        };
        self.write_text(&self.engines.iter().enumerate().map(entry).collect::<String>());
    }

    pub fn write_text(&self, text: &str) {
        // Whole at once: a reader never sees half of it.
        let new = self.directory.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.workers_file()).unwrap();
    }

    pub fn route(&self, flags: &[&str]) -> Route {
        Route::start(&self.workers_file(), self.engines.len(), flags)
    }
}

/// A router.
pub struct Route {
    pub child: Child,
    pub address: String,
    pub internal: String,
    pub log: Arc<Mutex<String>>,
}

impl Route {
    /// Starts a router and waits until so many workers are ready.
    pub fn start(workers: &Path, ready: usize, flags: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
        command.args(["route", "--port", "0", "--log-format", "json", "--workers"]).arg(workers).args(flags);
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let (mut address, mut internal, mut before) = (None, None, String::new());
        while address.is_none() || internal.is_none() {
            let line = lines.next().unwrap_or_else(|| panic!("the router ended: {before}")).unwrap();
            let word = |name: &str| {
                let rest = line.split_once(&format!("\"{name}\":\""))?.1;
                rest.split('"').next().map(str::to_owned)
            };
            address = address.or_else(|| word("address"));
            internal = internal.or_else(|| word("internal"));
            before.push_str(&line);
        }
        let log = Arc::new(Mutex::new(before));
        let sink = Arc::clone(&log);
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| sink.lock().unwrap().push_str(&(line + "\n")));
        });
        let route = Self { child, address: address.unwrap(), internal: internal.unwrap(), log };
        route.wait_ready(ready);
        route
    }

    pub fn wait_ready(&self, count: usize) {
        self.wait_for(&format!("{count} ready workers"), || self.num_ready() == count);
    }

    pub fn num_ready(&self) -> usize {
        self.get("/ready").json()["num_ready"].as_u64().unwrap() as usize
    }

    pub fn wait_for(&self, what: &str, done: impl Fn() -> bool) {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < PATIENCE, "{what} did not come: {}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        send(&self.address, method, path, headers, body)
    }

    pub fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        read_answer(&mut self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", "")
    }

    /// Asks at the operators' door.
    pub fn request_internal(&self, path: &str, headers: &str) -> Answer {
        read_answer(&mut send(&self.internal, "GET", path, headers, ""))
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "", &body.to_string())
    }

    /// A sum of `/metrics` over all series of a name with these words in their labels.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let page = self.get("/metrics").body;
        let is_it = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{']))
                && labels.iter().all(|label| line.contains(label))
        };
        page.lines().filter(is_it).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// What came of a stream.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Streamed {
    pub text: String,
    pub ids: Vec<String>,
    pub roles: usize,
    pub ends: usize,
    pub done: bool,
    pub error: Option<String>,
    pub completion_tokens: Option<u64>,
    /// Longest silence after the first token.
    pub gap: Duration,
}

/// A chat of so many tokens whose text depends on number and seed alone.
pub fn chat(number: usize, max_tokens: usize) -> Value {
    json!({
        "model": "m", "stream": true, "max_tokens": max_tokens, "seed": number, "temperature": 1.0, "ignore_eos": true,
        "stream_options": { "include_usage": true },
        "messages": [{ "role": "user", "content": format!("Question {number}, which is a long one. ").repeat(8) }],
    })
}

/// Reads a stream to its end.
pub fn read_stream(stream: TcpStream) -> Streamed {
    let mut streamed = Streamed::default();
    let mut last = None;
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            streamed.done = true;
            continue;
        }
        let chunk: Value = serde_json::from_str(data).unwrap_or_else(|error| panic!("{error}: {data}"));
        if let Some(message) = chunk["error"]["message"].as_str() {
            streamed.error = Some(message.to_owned());
            continue;
        }
        let id = chunk["id"].as_str().unwrap().to_owned();
        if !streamed.ids.contains(&id) {
            streamed.ids.push(id);
        }
        streamed.completion_tokens = streamed.completion_tokens.or(chunk["usage"]["completion_tokens"].as_u64());
        let Some(choice) = chunk["choices"].get(0) else { continue };
        streamed.roles += usize::from(!choice["delta"]["role"].is_null());
        streamed.ends += usize::from(!choice["finish_reason"].is_null());
        let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
        if !text.is_empty() {
            let now = Instant::now();
            if let Some(last) = last.replace(now) {
                streamed.gap = streamed.gap.max(now - last);
            }
            streamed.text.push_str(text);
        }
    }
    streamed
}

/// What a chat is answered by an engine that nothing happens to.
pub fn undisturbed(number: usize, max_tokens: usize) -> String {
    thread_local! {
        static ENGINE: std::cell::OnceCell<Server> = const { std::cell::OnceCell::new() };
    }
    ENGINE.with(|engine| {
        let engine = engine.get_or_init(|| Server::start_sim("instant", &["--served-model-name", "m"]));
        let body = chat(number, max_tokens).to_string();
        read_stream(engine.send("POST", "/v1/chat/completions", "", &body)).text
    })
}

/// Whether a stream came whole: every token once, one beginning, one end.
pub fn assert_whole(streamed: &Streamed, number: usize, max_tokens: usize) {
    assert_eq!(streamed.error, None, "stream {number}");
    assert_eq!(streamed.text, undisturbed(number, max_tokens), "stream {number}");
    let shape = (streamed.roles, streamed.ends, streamed.done, streamed.ids.len(), streamed.completion_tokens);
    assert_eq!(shape, (1, 1, true, 1, Some(max_tokens as u64)), "stream {number}");
}

/// Starts so many streams; `disturb` is called while they run.
pub fn streams(route: &Route, count: usize, max_tokens: usize, disturb: impl FnOnce()) -> Vec<Streamed> {
    std::thread::scope(|scope| {
        let reads: Vec<_> = (0..count)
            .map(|number| {
                let stream = route.send("POST", "/v1/chat/completions", "", &chat(number, max_tokens).to_string());
                scope.spawn(move || read_stream(stream))
            })
            .collect();
        disturb();
        reads.into_iter().map(|read| read.join().unwrap()).collect()
    })
}

/// Whether all of them came whole.
pub fn assert_all_whole(all: &[Streamed], max_tokens: usize) {
    all.iter().enumerate().for_each(|(number, streamed)| assert_whole(streamed, number, max_tokens));
}

/// Reads what comes until the other end closes, or for so long.
pub fn read_for(stream: &mut TcpStream, time: Duration) -> String {
    stream.set_read_timeout(Some(time)).unwrap();
    let (mut bytes, mut buffer, started) = (Vec::new(), [0; 4096], Instant::now());
    while started.elapsed() < time {
        match stream.read(&mut buffer) {
            Ok(read) if read > 0 => bytes.extend_from_slice(&buffer[..read]),
            _ => break,
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends a signal to a process.
pub fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([&format!("-{name}"), &pid.to_string()]).status().unwrap();
    assert!(status.success());
}
