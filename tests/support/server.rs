//! A real `pagoda serve` process on a free port, and raw HTTP to it.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longest wait for anything here: only a hang takes as long.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Server {
    child: Child,
    pub address: String,
    /// Where the cluster is served.
    pub internal: String,
    pub log: Arc<Mutex<String>>,
}

/// An answer: status, headers as text, body.
pub struct Answer {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

impl Server {
    /// Starts a server and waits until it is ready.
    pub fn start(model: &Path, flags: &[&str]) -> Self {
        let server = Self::start_with(model, flags, |_| {});
        server.wait_for("ready", || server.get("/ready").status == 200);
        server
    }

    /// Starts a server of a simulated device and waits until it is ready.
    pub fn start_sim(profile: &str, flags: &[&str]) -> Self {
        let device = format!("sim:{profile}");
        let server = Self::start_as(&[&["--device", &device], flags].concat(), |_| {});
        server.wait_for("ready", || server.get("/ready").status == 200);
        server
    }

    /// Starts a simulated server with these variables in its environment.
    pub fn start_sim_in(environment: &[(&str, &str)]) -> Self {
        let server = Self::start_as(&["--device", "sim:instant"], |command| {
            command.envs(environment.iter().copied());
        });
        server.wait_for("ready", || server.get("/ready").status == 200);
        server
    }

    /// Starts a server with these flags and waits until it listens.
    pub fn start_listening(flags: &[&str]) -> Self {
        Self::start_as(flags, |_| {})
    }

    /// Starts a server with more settings of its process; waits until it listens.
    pub fn start_with(model: &Path, flags: &[&str], configure: impl Fn(&mut Command)) -> Self {
        let model = model.to_str().unwrap();
        Self::start_as(&[&["--model", model], flags].concat(), configure)
    }

    fn start_as(flags: &[&str], configure: impl Fn(&mut Command)) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
        command.args(["serve", "--port", "0"]).args(flags);
        configure(&mut command);
        Self::start_by(&mut command)
    }

    /// Starts a server by a command of the test's own; waits until it listens.
    pub fn start_by(command: &mut Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (sink, stderr) = (Arc::clone(&log), child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let mut log = sink.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        let mut server = Self { child, address: String::new(), internal: String::new(), log };
        let started = Instant::now();
        (server.address, server.internal) = loop {
            let log = strip_colours(&server.log.lock().unwrap());
            let after = |before: String| log.split_once(&before)?.1.split([' ', '"', '\n']).next().map(str::to_owned);
            let word = |name: &str| after(format!(" {name}=")).or_else(|| after(format!("\"{name}\":\"")));
            if let (Some(address), Some(internal)) = (word("address"), word("internal")) {
                break (address, internal);
            }
            assert!(started.elapsed() < PATIENCE, "the server does not listen: {log}");
            std::thread::sleep(Duration::from_millis(10));
        };
        server
    }

    pub fn wait_for(&self, what: &str, done: impl Fn() -> bool) {
        let started = Instant::now();
        while !done() {
            assert!(started.elapsed() < PATIENCE, "{what} did not come: {}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request and leaves the answer to be read from the stream.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
        send(&self.address, method, path, headers, body)
    }

    pub fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Answer {
        read_answer(&mut self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "content-type: application/json\r\n", &body.to_string())
    }

    /// A number of `/ready`.
    pub fn stat(&self, name: &str) -> u64 {
        self.get("/ready").json()[name].as_u64().unwrap()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn terminate(&self) {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(status.success());
    }

    pub fn wait(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "the server does not exit: {}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn strip_colours(text: &str) -> String {
    let mut plain = String::new();
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        if letter == '\u{1b}' {
            letters.by_ref().find(|&end| end == 'm');
        } else {
            plain.push(letter);
        }
    }
    plain
}

/// Sends a request to an address and leaves the answer to be read from the stream.
pub fn send(address: &str, method: &str, path: &str, headers: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let len = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {len}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    // The server may refuse before it has read all of a body.
    drop(stream.write_all(body.as_bytes()));
    stream
}

/// Listens on a port of its own and answers each connection on a thread; returns the URL.
pub fn listen(answer: impl Fn(TcpStream) -> std::io::Result<()> + Send + Sync + 'static) -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            // A client that goes away is no failure of ours.
            std::thread::spawn(move || drop(answer(stream)));
        }
    });
    url
}

/// Reads an answer to its end; a chunked body is joined.
pub fn read_answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // A reset after the answer (the server refused the rest of a body) does not undo what was read.
    drop(stream.read_to_end(&mut bytes));
    let text = String::from_utf8(bytes).unwrap();
    let (headers, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
    let body =
        if headers.to_lowercase().contains("transfer-encoding: chunked") { joined(body) } else { body.to_owned() };
    Answer { status, headers: headers.to_lowercase(), body }
}

fn joined(mut chunks: &str) -> String {
    let mut body = String::new();
    while let Some((len, rest)) = chunks.split_once("\r\n") {
        let len = usize::from_str_radix(len.trim(), 16).unwrap_or(0);
        if len == 0 {
            break;
        }
        body.push_str(&rest[..len]);
        chunks = rest[len..].strip_prefix("\r\n").unwrap_or("");
    }
    body
}

/// The JSON of each `data:` line but `[DONE]`, and whether that came last.
pub fn events(body: &str) -> (Vec<Value>, bool) {
    let lines: Vec<&str> = body.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let done = lines.last() == Some(&"[DONE]");
    (lines.iter().filter(|line| **line != "[DONE]").map(|line| serde_json::from_str(line).unwrap()).collect(), done)
}
