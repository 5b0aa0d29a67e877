//! What a reader relies on, checked: module headers, file and function lengths, leftovers, complete kernels.

use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Folders with our sources.
const FOLDERS: [&str; 8] = ["src", "protocol", "shaders", "cache-tier", "engine", "router", "tests", "benches"];
const MAX_FILE_LINES: usize = 500;
const MAX_FUNCTION_LINES: usize = 70;

/// Every file below our folders with this extension, with its text.
fn files(extension: &str) -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|folder| Path::new(ROOT).join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    found
}

/// The part of a source that is not its unit tests.
fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or(text)
}

#[test]
fn every_source_opens_with_what_it_is() {
    let sources = files("rs");
    assert!(sources.len() > 100, "only {} sources were seen", sources.len());
    for (path, text) in &sources {
        assert!(text.starts_with("//! "), "{} has no header", path.display());
    }
    let shaders = files("wgsl");
    assert!(shaders.len() > 14, "only {} shaders were seen", shaders.len());
    for (path, text) in &shaders {
        assert!(text.starts_with("// ") || text.starts_with("{# "), "{} has no header", path.display());
    }
}

#[test]
fn files_and_functions_fit_a_reader() {
    let mut functions = 0;
    for (path, text) in files("rs") {
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines.len() <= MAX_FILE_LINES, "{} has {} lines", path.display(), lines.len());
        for (start, line) in lines.iter().enumerate() {
            let indent = line.len() - line.trim_start().len();
            let is_function = line.trim_start().split("fn ").next().is_some_and(|before| {
                line.contains("fn ")
                    && before
                        .split_whitespace()
                        .all(|word| matches!(word, "pub" | "async" | "const" | "unsafe") || word.starts_with("pub("))
            });
            if !is_function {
                continue;
            }
            functions += 1;
            // A trait's method without a body ends where its declaration does.
            let end = lines[start..].iter().position(|line| line.ends_with(['{', '}', ';']));
            if end.is_some_and(|end| lines[start + end].ends_with(';')) {
                continue;
            }
            let close = format!("{}}}", " ".repeat(indent));
            let len = lines[start..].iter().position(|line| *line == close).unwrap_or(0);
            assert!(len <= MAX_FUNCTION_LINES, "{}:{} is {len} lines long", path.display(), start + 1);
        }
    }
    assert!(functions > 400, "only {functions} functions were seen");
}

#[test]
fn nothing_is_left_over() {
    // Spelled in halves, so that this file does not find itself.
    let leftovers =
        [["todo", "!("], ["unimplemented", "!("], ["dbg", "!("], ["#[ig", "nore"], ["FIX", "ME"], ["XX", "X"]]
            .map(|halves| halves.concat());
    for (path, text) in files("rs").into_iter().chain(files("wgsl")) {
        for leftover in &leftovers {
            assert!(!text.contains(leftover.as_str()), "{} has `{leftover}`", path.display());
        }
    }
}

#[test]
fn only_tests_unwrap() {
    let unwrap = [".unw", "rap()"].concat();
    for (path, text) in files("rs") {
        let below = path.strip_prefix(ROOT).unwrap();
        if below.starts_with("tests")
            || below.starts_with("benches")
            || below.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs")
        {
            continue;
        }
        assert!(!without_tests(&text).contains(&unwrap), "{} unwraps", path.display());
    }
}

#[test]
fn every_kernel_has_its_five_files() {
    for shader in shaders::CATALOGUE {
        let stem = shader.name;
        for file in [
            format!("shaders/wgsl/{stem}.wgsl"),
            format!("engine/src/kernels/{stem}.rs"),
            format!("shaders/src/reference/{stem}.rs"),
            format!("tests/kernels/{stem}.rs"),
            format!("benches/kernels/{stem}.rs"),
        ] {
            assert!(Path::new(ROOT).join(&file).is_file(), "{stem} lacks {file}");
        }
    }
    let known = |name: &str| {
        shaders::CATALOGUE.iter().any(|shader| format!("{}.wgsl", shader.name) == name)
            || shaders::INCLUDES.iter().any(|(include, _)| *include == name)
    };
    for (path, _) in files("wgsl") {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(known(&name), "{name} is in no catalogue");
    }
}
