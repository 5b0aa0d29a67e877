//! llama.cpp's server as the peer of a bench: started on a free port, killed when dropped.

use serde_json::Value;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::server::{PATIENCE, read_answer};

pub struct Peer {
    child: Child,
    port: u16,
}

impl Peer {
    /// `context` tokens in all, over `parallel` slots; as many threads for prompts as for answers.
    pub fn start(mode: &str, model: &str, context: usize, threads: usize, parallel: usize) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let numbers = [context, threads, parallel].map(|number| number.to_string());
        let child = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/peers/llama-server"))
            .args([mode, model, &port.to_string()])
            .args(["-c", &numbers[0], "-t", &numbers[1], "-tb", &numbers[1], "--parallel", &numbers[2]])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let peer = Self { child, port };
        let started = Instant::now();
        while peer.post("/health", None).is_none_or(|(status, _)| status != 200) {
            assert!(started.elapsed() < 5 * PATIENCE, "llama-server does not start");
            std::thread::sleep(Duration::from_millis(50));
        }
        peer
    }

    /// Status and JSON of an answer; a GET without a body.
    pub fn post(&self, path: &str, body: Option<&Value>) -> Option<(u16, Value)> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let (method, body) = body.map_or(("GET", String::new()), |body| ("POST", body.to_string()));
        let len = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n",
        );
        std::io::Write::write_all(&mut stream, format!("{head}{body}").as_bytes()).ok()?;
        let answer = read_answer(&mut stream);
        Some((answer.status, serde_json::from_str(&answer.body).unwrap_or(Value::Null)))
    }

    /// Its process.
    #[allow(dead_code, reason = "one of the benches that share this file measures memory")]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
