//! What the integration tests share: the default model, devices, and steps driven by hand.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod cache_service;
pub mod driver;
pub mod gguf_writer;
pub mod route;
pub mod server;
pub mod tiny_directory;
pub mod tiny_model;

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use engine::device::{self, Selected};
use engine::kernels::Gpu;

/// The default model's file, brought by `pagoda pull`.
pub fn default_model() -> PathBuf {
    let output = Command::new(env!("CARGO_BIN_EXE_pagoda")).arg("pull").output().unwrap();
    assert!(output.status.success(), "pagoda pull: {}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// Gemma-3-270M's file, brought by `tests/golden/fetch-gemma3`.
pub fn gemma3() -> PathBuf {
    let default = || PathBuf::from(std::env::var_os("HOME").unwrap()).join(".cache/pagoda/models");
    let directory = std::env::var_os("PAGODA_MODELS").map_or_else(default, PathBuf::from);
    let path = directory.join("gemma-3-270m.Q4_K_M.gguf");
    assert!(path.is_file(), "{} is not there: run tests/golden/fetch-gemma3", path.display());
    path
}

/// The name of the software Vulkan adapter; `None`, with a line that is counted, where there is none. Under
/// `REQUIRE_GPU=1` (set by `./test`) a missing adapter is a failure.
pub fn software_vulkan() -> Option<String> {
    let name = device::software_vulkan();
    if name.is_none() {
        let required = std::env::var("REQUIRE_GPU").is_ok_and(|value| value == "1");
        assert!(!required, "no software Vulkan adapter (Debian: mesa-vulkan-drivers), and REQUIRE_GPU=1");
        println!("skipped: no adapter");
    }
    name
}

/// The software adapter, opened.
pub fn gpu() -> Option<Arc<Gpu>> {
    opened().map(Arc::new)
}

/// The same, taken for hardware: models run on the variants of kernels that hardware gets.
pub fn gpu_as_hardware() -> Option<Arc<Gpu>> {
    let mut gpu = opened()?;
    gpu.info.traits.software = false;
    Some(Arc::new(gpu))
}

fn opened() -> Option<Gpu> {
    let name = software_vulkan()?;
    match device::select(&name).unwrap() {
        Selected::Gpu(open) => Some(Gpu::new(*open).unwrap()),
        Selected::Cpu => unreachable!("{name} is no CPU"),
    }
}

/// A Python with the package `openai`, in a virtual environment beside the build.
pub fn python_with_openai() -> PathBuf {
    const OPENAI: &str = "openai>=2,<3";
    let directory = std::env::var_os("PAGODA_TEST_VENV")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("openai-venv"), PathBuf::from);
    let python = directory.join("bin/python");
    let has_openai = |python: &PathBuf| {
        Command::new(python).args(["-c", "import openai"]).output().is_ok_and(|output| output.status.success())
    };
    if !has_openai(&python) {
        for (program, arguments) in [
            (PathBuf::from("python3"), vec!["-m", "venv", directory.to_str().unwrap()]),
            (python.clone(), vec!["-m", "pip", "install", "--quiet", "--disable-pip-version-check", OPENAI]),
        ] {
            let output = Command::new(&program).args(&arguments).output().unwrap();
            assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        assert!(has_openai(&python), "{} cannot import openai", python.display());
    }
    python
}
