//! `pagoda pull` against a local fake of the Hugging Face hub: resumption, a wrong checksum, 401, no source at all.

mod support;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use support::server::listen;

/// What the fake hub serves and what it was asked.
struct Hub {
    file: Vec<u8>,
    status: u16,
    /// The first download ends after this many bytes.
    cut_at: Mutex<Option<usize>>,
    /// First byte of each download that was asked for.
    starts: Mutex<Vec<usize>>,
}

impl Hub {
    fn start(file: Vec<u8>, status: u16, cut_at: Option<usize>) -> (Arc<Self>, String) {
        let hub = Arc::new(Self { file, status, cut_at: Mutex::new(cut_at), starts: Mutex::default() });
        let served = Arc::clone(&hub);
        let address = listen(move |stream| served.answer(stream));
        (hub, address)
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let (mut range, mut any) = (None, false);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line)? == 0 || line == "\r\n" {
                    break;
                }
                any = true;
                if let Some(bytes) = line.to_lowercase().strip_prefix("range: bytes=") {
                    range = Some(bytes.trim().to_owned());
                }
            }
            if !any {
                return Ok(());
            }
            if self.status != 200 {
                return write!(stream, "HTTP/1.1 {} No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n", self.status);
            }
            let range = range.expect("the client asks for a range");
            let (first, last) = range.split_once('-').unwrap();
            let first: usize = first.parse().unwrap();
            let end = last.parse().map_or(self.file.len(), |last: usize| (last + 1).min(self.file.len()));
            write!(
                stream,
                "HTTP/1.1 206 Partial\r\nx-repo-commit: c0ffee\r\netag: \"abc\"\r\naccept-ranges: bytes\r\ncontent-length: {}\r\ncontent-range: bytes {first}-{}/{}\r\n\r\n",
                end - first,
                end - 1,
                self.file.len()
            )?;
            let mut stop = end;
            if last.is_empty() {
                self.starts.lock().unwrap().push(first);
                stop = self.cut_at.lock().unwrap().take().unwrap_or(end);
            }
            stream.write_all(&self.file[first..stop])?;
            if stop < end {
                return stream.shutdown(std::net::Shutdown::Both);
            }
        }
    }
}

/// Runs `pagoda pull` into an empty cache with `hub` as the hub and no Python to fall back on.
fn pull(hub: &str, directory: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagoda"))
        .arg("pull")
        .env("HF_ENDPOINT", hub)
        .env("HF_HOME", directory.join("hf"))
        .env("PAGODA_MODELS", directory.join("models"))
        .env("PATH", "")
        .env_remove("HF_HUB_OFFLINE")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_download_that_breaks_is_resumed_where_it_ended() {
    let file = std::fs::read(support::default_model()).unwrap();
    let cut = 10_000_000;
    let (hub, address) = Hub::start(file.clone(), 200, Some(cut));
    let directory = tempfile::tempdir().unwrap();
    let output = pull(&address, directory.path());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let starts = hub.starts.lock().unwrap().clone();
    assert!(starts.len() == 2 && starts[0] == 0 && starts[1] > 0 && starts[1] <= cut, "downloads began at {starts:?}");
    let path = text(&output.stdout);
    assert!(std::fs::read(path.trim()).unwrap() == file, "the file differs");
    // The second pull asks nobody.
    assert!(pull("http://127.0.0.1:9", directory.path()).status.success());
}

#[test]
fn a_wrong_checksum_is_refused_with_both_sums_and_leaves_nothing() {
    let (hub, address) = Hub::start(b"not a model".to_vec(), 200, None);
    let directory = tempfile::tempdir().unwrap();
    for attempt in 1..=2 {
        let output = pull(&address, directory.path());
        let error = text(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{error}");
        assert!(error.contains("wrong checksum") && error.contains("b179c9523d0e"), "{error}");
        assert_eq!(hub.starts.lock().unwrap().len(), attempt, "a bad file is fetched anew, not found in the cache");
    }
    assert_eq!(std::fs::read_dir(directory.path().join("models")).unwrap().count(), 0);
}

#[test]
fn a_refusing_hub_and_no_python_are_both_named() {
    let (_hub, address) = Hub::start(Vec::new(), 401, None);
    let directory = tempfile::tempdir().unwrap();
    let output = pull(&address, directory.path());
    let error = text(&output.stderr);
    assert!(!output.status.success(), "{error}");
    assert!(error.contains("401") && error.contains("python3") && error.contains("--model FILE.gguf"), "{error}");
}
