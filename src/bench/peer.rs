//! llama.cpp's server beside our engine in `pagoda bench engine --peer`: started on a free port, asked for what we measured of
//! ourselves, killed when dropped.
//!
//! Its numbers are its own `timings`: without HTTP, as ours are here.

use std::io::{Read, Seek};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};

/// How long it may take to load a model, and to answer.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long a question of its health may take.
const HEALTH: Duration = Duration::from_secs(2);
/// What of its complaints is shown.
const SHOWN_BYTES: usize = 1200;

/// What it is started with.
pub(super) struct PeerSettings<'a> {
    pub(super) program: &'a Path,
    pub(super) arguments: &'a [String],
    pub(super) model: PathBuf,
    pub(super) device: &'a str,
    pub(super) threads: usize,
    /// Longest sequence.
    pub(super) context: usize,
    /// Sequences at once.
    pub(super) parallel: usize,
}

pub(super) struct Peer {
    child: Child,
    complaints: std::fs::File,
    address: String,
    agent: ureq::Agent,
}

impl Peer {
    /// Starts it and waits until it has the model.
    ///
    /// # Errors
    /// When it cannot be started or does not get ready: its last words.
    pub(super) fn start(settings: &PeerSettings<'_>) -> Result<Self> {
        let program = settings.program;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let complaints = tempfile::tempfile().context("a file for the peer's complaints")?;
        let numbers = [settings.context * settings.parallel, settings.threads, settings.parallel, usize::from(port)];
        let [context, threads, parallel, port_flag] = numbers.map(|number| number.to_string());
        let mut command = Command::new(program);
        command.arg("-m").arg(&settings.model);
        command.args(["-c", &context, "-t", &threads, "-tb", &threads, "--parallel", &parallel]);
        command.args(["--host", "127.0.0.1", "--port", &port_flag]);
        match settings.device.strip_prefix("vulkan:") {
            _ if settings.device == engine::device::CPU => command.args(["-ngl", "0", "--device", "none"]),
            // A software adapter it takes only when it is named.
            Some(index) if std::env::var_os("GGML_VK_VISIBLE_DEVICES").is_none() => {
                command.args(["-ngl", "99"]).env("GGML_VK_VISIBLE_DEVICES", index)
            }
            _ => command.args(["-ngl", "99"]),
        };
        let arguments = settings.arguments.iter().filter(|argument| !argument.is_empty());
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(complaints.try_clone()?);
        let child = command.spawn().with_context(|| format!("--peer {}", program.display()))?;
        let agent: ureq::Agent =
            ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).http_status_as_error(false).build().into();
        let mut peer = Self { child, complaints, address: format!("http://127.0.0.1:{port}"), agent };
        let started = Instant::now();
        loop {
            let is_ready = peer.is_ready();
            // Whoever else answers on its port is not the peer.
            if let Some(status) = peer.child.try_wait()? {
                bail!("--peer {} ended ({status}): {}", program.display(), peer.last_words());
            }
            if is_ready {
                return Ok(peer);
            }
            if started.elapsed() > PATIENCE {
                bail!("--peer {} is not ready after {PATIENCE:?}: {}", program.display(), peer.last_words());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn is_ready(&self) -> bool {
        let asked = self.agent.get(format!("{}/health", self.address)).config().timeout_global(Some(HEALTH)).build();
        asked.call().is_ok_and(|answer| answer.status() == 200)
    }

    fn last_words(&mut self) -> String {
        let mut said = Vec::new();
        // Without them the message is shorter.
        drop(self.complaints.rewind().and_then(|()| self.complaints.read_to_end(&mut said)));
        String::from_utf8_lossy(&said[said.len().saturating_sub(SHOWN_BYTES)..]).trim().to_owned()
    }

    /// Tokens a second of prefill of this prompt.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn prefill(&self, prompt: &[u32]) -> Result<f64> {
        self.timing(prompt, 1, "prompt_per_second")
    }

    /// Tokens a second of decode, over all these prompts at once.
    ///
    /// # Errors
    /// When it does not answer.
    pub(super) fn decode(&self, prompts: &[Vec<u32>], num_tokens: usize) -> Result<f64> {
        std::thread::scope(|scope| {
            let asked: Vec<_> = prompts
                .iter()
                .map(|prompt| scope.spawn(move || self.timing(prompt, num_tokens, "predicted_per_second")))
                .collect();
            let answer = |thread: std::thread::ScopedJoinHandle<'_, Result<f64>>| {
                thread.join().unwrap_or_else(|_| Err(anyhow!("the peer's client panicked")))
            };
            asked.into_iter().map(answer).sum()
        })
    }

    fn timing(&self, prompt: &[u32], num_tokens: usize, name: &str) -> Result<f64> {
        let body = json!({
            "prompt": prompt, "n_predict": num_tokens, "temperature": 0, "cache_prompt": false, "ignore_eos": true,
        });
        let mut answer = self.agent.post(format!("{}/completion", self.address)).send_json(&body)?;
        let status = answer.status();
        let text = answer.body_mut().read_to_string()?;
        let json: Value = serde_json::from_str(&text).unwrap_or(Value::Null);
        json["timings"][name].as_f64().with_context(|| format!("the peer answers {status} without timings: {text}"))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
