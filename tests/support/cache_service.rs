//! A real `pagoda cache serve` process on a free port.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::server::PATIENCE;

pub struct CacheService {
    pub child: Child,
    pub address: String,
}

impl CacheService {
    /// Starts a service over a directory and waits until it listens.
    pub fn start(directory: &Path, flags: &[&str]) -> Self {
        Self::start_on("127.0.0.1:0", directory, flags)
    }

    /// The same on an address.
    pub fn start_on(address: &str, directory: &Path, flags: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagoda"));
        command
            .args(["cache", "serve", "--listen", address, "--log-format", "json", "--dir"])
            .arg(directory)
            .args(flags);
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let started = Instant::now();
        let address = loop {
            assert!(started.elapsed() < PATIENCE, "the cache service does not listen");
            let line = lines.next().expect("the cache service ended").unwrap();
            if let Some((_, rest)) = line.split_once("\"address\":\"") {
                break rest.split('"').next().unwrap().to_owned();
            }
        };
        // What it says later must not fill the pipe.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Self { child, address }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends it as an operator does.
    pub fn stop(mut self) {
        let status = Command::new("kill").args(["-TERM", &self.child.id().to_string()]).status().unwrap();
        assert!(status.success() && self.child.wait().unwrap().success());
    }
}

impl Drop for CacheService {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
