//! The fingerprint of a model file: which KV state belongs to it.
//!
//! Called by the engine's thread once the model is loaded. Hashing reads the whole file, so the weights' hash is kept in a
//! directory, by the file's path, size and time of change.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use protocol::ModelFingerprint;
use protocol::fingerprint::FingerprintParts;

use crate::config::EngineConfig;
use crate::kv::BLOCK_SIZE;
use crate::model_file::ModelFile;
use crate::sizes::Sizes;

/// The fingerprint of a file under these settings; the weights' hash is read from and written to the directory that they
/// name, where they name one.
pub fn of_model(file: &ModelFile, sizes: &Sizes, config: &EngineConfig) -> ModelFingerprint {
    let model = &sizes.model;
    ModelFingerprint::of(&FingerprintParts {
        weights: weights(file, config.fingerprint_cache.as_deref()),
        // Whatever the configuration says changes what is computed of the same weights; so does what the longest text makes
        // of the rotary frequencies.
        architecture: &format!("{model:?} {:?} {:?}", config.quantize, sizes.rotaries()),
        kv_dtype: "f16",
        num_layers: model.num_layers,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.head_dim,
        block_size: BLOCK_SIZE,
    })
}

fn weights(file: &ModelFile, cache: Option<&Path>) -> [u8; 32] {
    let Some((cache, state)) = cache.zip(state(file.files())) else { return file.hash_tensors() };
    let entry = cache.join(blake3::hash(file.path().as_os_str().as_encoded_bytes()).to_hex().as_str());
    if let Some(hash) = read(&entry, &state) {
        return hash;
    }
    let hash = file.hash_tensors();
    let text = format!("{state} {}\n", blake3::Hash::from(hash).to_hex());
    // The next start hashes again where this one cannot write; a reader checks the state, so a torn entry is none.
    if let Err(error) = std::fs::create_dir_all(cache).and_then(|()| std::fs::write(&entry, text)) {
        tracing::debug!(%error, path = %entry.display(), "fingerprint not kept");
    }
    hash
}

/// What tells changed files apart: their sizes and times of change.
fn state(files: &[PathBuf]) -> Option<String> {
    let of = |path: &PathBuf| {
        let metadata = path.metadata().ok()?;
        let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
        Some(format!("{} {}", metadata.len(), changed.as_nanos()))
    };
    files.iter().map(of).collect::<Option<Vec<_>>>().map(|states| states.join(" "))
}

fn read(entry: &Path, state: &str) -> Option<[u8; 32]> {
    let text = std::fs::read_to_string(entry).ok()?;
    let hash = text.strip_prefix(state)?.strip_prefix(' ')?.trim_end();
    blake3::Hash::from_hex(hash).ok().map(Into::into)
}
