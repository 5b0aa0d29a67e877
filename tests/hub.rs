//! Models named `hf:...` against a local fake of the Hugging Face hub: directories, files in parts, tokens, offline use.

mod support;

use serde_json::json;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use support::server::listen;
use support::tiny_directory;
use support::tiny_model::Tiny;

/// What the fake hub serves, by path in the repository, and the requests that it got.
struct Hub {
    files: BTreeMap<String, Vec<u8>>,
    /// Asked of everybody where it is set.
    token: Option<&'static str>,
    asked: Mutex<Vec<String>>,
}

impl Hub {
    fn start(files: BTreeMap<String, Vec<u8>>, token: Option<&'static str>) -> (Arc<Self>, String) {
        let hub = Arc::new(Self { files, token, asked: Mutex::default() });
        let served = Arc::clone(&hub);
        let address = listen(move |stream| served.answer(stream));
        (hub, address)
    }

    fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        loop {
            let mut lines: Vec<String> = Vec::new();
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line)? == 0 {
                    return Ok(());
                }
                if line == "\r\n" {
                    break;
                }
                lines.push(line.trim().to_owned());
            }
            let path = lines[0].split(' ').nth(1).unwrap().to_owned();
            let header = |name: &str| {
                let found = lines.iter().find(|line| line.to_lowercase().starts_with(name));
                found.map(|line| line.split_once(": ").unwrap().1.to_owned())
            };
            self.asked.lock().unwrap().push(path.clone());
            if self.token.is_some_and(|token| header("authorization") != Some(format!("Bearer {token}"))) {
                write!(stream, "HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")?;
                continue;
            }
            if path.starts_with("/api/models/org/repo/revision/") {
                let siblings: Vec<_> = self.files.keys().map(|name| json!({ "rfilename": name })).collect();
                let body = json!({ "siblings": siblings, "sha": "c0ffee" }).to_string();
                write!(stream, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
                continue;
            }
            let name =
                path.strip_prefix("/org/repo/resolve/").and_then(|rest| rest.split_once('/')).map(|(_, name)| name);
            let Some((name, file)) = name.and_then(|name| self.files.get_key_value(name)) else {
                write!(stream, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")?;
                continue;
            };
            let range = header("range").unwrap();
            let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
            let first: usize = first.parse().unwrap();
            let end = last.parse().map_or(file.len(), |last: usize| (last + 1).min(file.len()));
            write!(
                stream,
                "HTTP/1.1 206 Partial\r\nx-repo-commit: c0ffee\r\netag: \"{name}\"\r\naccept-ranges: bytes\r\ncontent-length: {}\r\ncontent-range: bytes {first}-{}/{}\r\n\r\n",
                end - first,
                end - 1,
                file.len()
            )?;
            stream.write_all(&file[first..end])?;
        }
    }
}

fn run(hub: &str, home: &Path, arguments: &[&str], more: &[(&str, &str)]) -> (Output, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_pagoda"))
        .args(arguments)
        .env("HF_ENDPOINT", hub)
        .env("HF_HOME", home)
        .env("PAGODA_MODELS", home.join("models"))
        .env_remove("HF_HUB_OFFLINE")
        .env_remove("HF_TOKEN")
        .envs(more.iter().copied())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, errors)
}

/// A golden model's directory as the hub has it.
fn directory_files() -> BTreeMap<String, Vec<u8>> {
    let directory = tempfile::tempdir().unwrap();
    tiny_directory::write(directory.path(), &tiny_directory::golden()["models"]["qwen3"], "BF16", true);
    let mut files: BTreeMap<String, Vec<u8>> = BTreeMap::new();
    for entry in directory.path().read_dir().unwrap() {
        let path = entry.unwrap().path();
        files.insert(path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap());
    }
    files.insert("README.md".into(), b"a model".to_vec());
    files.insert("pytorch_model.bin".into(), vec![0; 1000]);
    files
}

#[test]
fn a_directory_is_fetched_run_and_found_again_without_the_hub() {
    let (hub, address) = Hub::start(directory_files(), Some("secret"));
    let home = tempfile::tempdir().unwrap();
    let (refused, error) = run(&address, home.path(), &["pull", "hf:org/repo"], &[]);
    assert!(!refused.status.success() && error.contains("org/repo") && error.contains("401"), "{error}");
    let token = ("HF_TOKEN", "secret");
    let (pulled, error) = run(&address, home.path(), &["pull", "hf:org/repo"], &[token]);
    assert!(pulled.status.success(), "{error}");
    let path = String::from_utf8(pulled.stdout).unwrap();
    assert!(Path::new(path.trim()).join("model-00002-of-00002.safetensors").is_file(), "{path}");
    let asked = hub.asked.lock().unwrap().join("\n");
    assert!(!asked.contains("README") && !asked.contains("pytorch"), "only what is needed is fetched: {asked}");
    let prompt = ["run", "--model", "hf:org/repo", "--device", "cpu", "Hi", "--max-tokens", "4", "--seed", "1"];
    let (online, error) = run(&address, home.path(), &prompt, &[token]);
    assert!(online.status.success(), "{error}");
    let offline = ("HF_HUB_OFFLINE", "1");
    let (again, error) = run("http://127.0.0.1:9", home.path(), &prompt, &[offline]);
    assert!(again.status.success() && again.stdout == online.stdout, "{error}");
    // A hub that is away is no hindrance either.
    let (away, error) = run("http://127.0.0.1:9", home.path(), &prompt, &[]);
    assert!(away.status.success() && away.stdout == online.stdout && error.contains("its cache"), "{error}");
    let (missing, error) = run("http://127.0.0.1:9", home.path(), &["pull", "hf:org/other"], &[offline]);
    assert!(!missing.status.success() && error.contains("org/other") && error.contains("HF_HUB_OFFLINE"), "{error}");
}

#[test]
fn files_of_a_repository_are_named_or_listed_and_come_with_their_parts() {
    let whole = Tiny::default();
    let (first, second) = whole.split();
    let files = BTreeMap::from([
        ("m.Q8_0.gguf".to_owned(), whole.bytes()),
        ("m.Q4_1-00001-of-00002.gguf".to_owned(), first),
        ("m.Q4_1-00002-of-00002.gguf".to_owned(), second),
    ]);
    let (_hub, address) = Hub::start(files, None);
    let home = tempfile::tempdir().unwrap();
    let (several, error) = run(&address, home.path(), &["pull", "hf:org/repo"], &[]);
    assert!(!several.status.success(), "{error}");
    assert!(error.contains("m.Q8_0.gguf, ") || error.contains(", m.Q8_0.gguf"), "{error}");
    let answer = |model: &str| {
        let arguments = ["run", "--model", model, "--device", "cpu", "Hi", "--max-tokens", "8"];
        let (output, error) = run(&address, home.path(), &arguments, &[]);
        assert!(output.status.success(), "{model}: {error}");
        output.stdout
    };
    // The same weights, in one file and in two.
    assert_eq!(answer("hf:org/repo/m.Q8_0.gguf@v1"), answer("hf:org/repo/m.Q4_1-00001-of-00002.gguf"));
    let (missing, error) = run(&address, home.path(), &["pull", "hf:org/repo/none.gguf"], &[]);
    assert!(!missing.status.success() && error.contains("none.gguf") && error.contains("404"), "{error}");
    let (wrong, error) = run(&address, home.path(), &["pull", "hf:repo"], &[]);
    assert!(!wrong.status.success() && error.contains("hf:ORGANISATION/REPOSITORY"), "{error}");
}
