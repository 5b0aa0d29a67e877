//! Clients: so many connections that are kept, as fast as they can or at a rate.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

pub struct Load {
    port: u16,
    bytes: usize,
    connections: usize,
}

/// A connection that is kept.
struct Client {
    reader: BufReader<TcpStream>,
}

impl Client {
    fn connect(port: u16) -> Option<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        Some(Self { reader: BufReader::new(stream) })
    }

    /// Sends a request and reads its answer; whether that was one.
    fn ask(&mut self, content: &str) -> Option<()> {
        let body = format!(r#"{{"model":"m","max_tokens":1,"messages":[{{"role":"user","content":"{content}"}}]}}"#);
        let head = format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        self.reader.get_mut().write_all([head.as_bytes(), body.as_bytes()].concat().as_slice()).ok()?;
        let (mut line, mut len, mut is_ok, mut chunked) = (String::new(), 0usize, false, false);
        loop {
            line.clear();
            self.reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
            let lower = line.to_ascii_lowercase();
            is_ok |= lower.starts_with("http/1.1 200");
            chunked |= lower.starts_with("transfer-encoding: chunked");
            if let Some(value) = lower.strip_prefix("content-length:") {
                len = value.trim().parse().ok()?;
            }
            if line == "\r\n" {
                break;
            }
        }
        if !chunked {
            let mut body = vec![0; len];
            self.reader.read_exact(&mut body).ok()?;
            return is_ok.then_some(());
        }
        loop {
            line.clear();
            self.reader.read_line(&mut line).ok()?;
            len = usize::from_str_radix(line.trim(), 16).ok()?;
            let mut part = vec![0; len + 2];
            self.reader.read_exact(&mut part).ok()?;
            if len == 0 {
                return is_ok.then_some(());
            }
        }
    }
}

impl Load {
    pub fn new(port: u16, bytes: usize, connections: usize) -> Self {
        Self { port, bytes, connections }
    }

    /// A prompt that differs from all others from its beginning on.
    fn content(&self, number: usize, seed: usize) -> String {
        let words = format!("{:016x} ", (number * 31 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        words.repeat(self.bytes / words.len())
    }

    pub fn try_once(&self) -> bool {
        Client::connect(self.port).and_then(|mut client| client.ask("hello")).is_some()
    }

    /// So many requests as fast as the connections go; the seconds.
    pub fn closed(&self, count: usize, seed: usize) -> f64 {
        let started = Instant::now();
        each(self.port, self.connections, count, |client, number| {
            client.ask(&self.content(number, seed << 32)).expect("an answer");
        });
        started.elapsed().as_secs_f64()
    }

    /// So many requests at a rate, each at its time; the seconds that each took.
    pub fn open(&self, rate: f64, count: usize) -> Vec<f64> {
        let (taken, started) = (Mutex::new(Vec::new()), Instant::now());
        each(self.port, self.connections, count, |client, number| {
            let due = started + Duration::from_secs_f64(number as f64 / rate);
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let content = self.content(number, 99);
            let began = Instant::now();
            client.ask(&content).expect("an answer");
            taken.lock().unwrap().push(began.elapsed().as_secs_f64());
        });
        taken.into_inner().unwrap()
    }
}

/// Does something with each number, on so many connections that are kept.
fn each(port: u16, connections: usize, count: usize, work: impl Fn(&mut Client, usize) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(|| {
                let mut client = Client::connect(port).unwrap();
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= count {
                        return;
                    }
                    work(&mut client, number);
                }
            });
        }
    });
}

/// Requests of groups that share 4 KB, group by group in turns.
pub fn groups(port: u16, groups: usize, turns: usize, at_once: usize) {
    each(port, at_once, groups * turns, |client, number| {
        let (group, turn) = (number % groups, number / groups);
        let shared = format!("group-{group} shares this. ").repeat(190);
        client.ask(&format!("{shared} turn {turn} of it")).expect("an answer");
    });
}
