//! Bad model files: each is an error that names the file, the place and the numbers, and never a panic.

mod support;

use engine::config::EngineConfig;
use engine::kv::KvCacheDtype;
use engine::model::ModelConfig;
use engine::model_file::{ModelFile, StorageType};
use engine::model_runner::cpu_runner;
use engine::sizes::Sizes;
use std::path::Path;
use support::driver::config;
use support::tiny_model::Tiny;

fn open_error(bytes: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().unwrap();
    support::gguf_writer::write(file.path(), bytes);
    ModelFile::open(file.path()).err().map_or_else(|| "opened".into(), |error| error.to_string())
}

fn load_error(path: &Path) -> String {
    let (config, file, sizes) = config(path, 256, KvCacheDtype::F16);
    cpu_runner(&file, &sizes, &config, &mut |_, _| {}).err().map_or_else(|| "loaded".into(), |error| error.to_string())
}

#[test]
fn a_wrong_magic_version_or_count_is_named() {
    assert!(open_error(b"").contains("magic needs 4 bytes"));
    assert!(open_error(b"ELF!aaaaaaaaaaaaaaaaaaaa").contains("not with \"GGUF\""));
    let good = Tiny::default().bytes();
    let mut version = good.clone();
    version[4] = 9;
    assert!(open_error(&version).contains("version 9"));
    let mut count = good.clone();
    count[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    let error = open_error(&count);
    assert!(error.contains("tensor count") && error.contains(&u64::MAX.to_string()), "{error}");
}

#[test]
fn a_file_cut_anywhere_is_an_error_or_misses_a_tensor() {
    let good = Tiny::default().bytes();
    assert_eq!(open_error(&good), "opened");
    for cut in (0..good.len()).step_by(997) {
        let file = tempfile::NamedTempFile::new().unwrap();
        support::gguf_writer::write(file.path(), &good[..cut]);
        let Ok(opened) = ModelFile::open(file.path()) else { continue };
        let Ok(model) = ModelConfig::of(&opened) else { continue };
        assert!(opened.tensor("output.weight", model.vocab_size, model.hidden_size).is_err(), "cut at {cut}");
    }
}

#[test]
fn every_single_bit_flip_of_the_header_is_survived() {
    let good = Tiny { storage: StorageType::Q4_0, ..Default::default() }.bytes();
    // The header's first part: counts, lengths, types and the architecture's numbers.
    for bit in 0..1400 * 8 {
        let mut flipped = good.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        let file = tempfile::NamedTempFile::new().unwrap();
        support::gguf_writer::write(file.path(), &flipped);
        if let Ok(opened) = ModelFile::open(file.path()) {
            drop(ModelConfig::of(&opened));
        }
    }
}

#[test]
fn tensors_missing_or_of_an_unsupported_type_are_named() {
    let (_d, path) = Tiny { without: Some("blk.1.ffn_up.weight"), ..Default::default() }.write();
    let error = load_error(&path);
    assert!(error.contains("`blk.1.ffn_up.weight` is missing") && error.contains("tiny.gguf"), "{error}");
    let (_d, path) = Tiny { type_of: Some(("blk.0.attn_q.weight", 10)), ..Default::default() }.write();
    let error = load_error(&path);
    assert!(error.contains("`blk.0.attn_q.weight` has type Q2_K") && error.contains("Q8_0"), "{error}");
}

#[test]
fn another_architecture_is_named() {
    let (_d, path) = Tiny { architecture: "mamba", ..Default::default() }.write();
    let error = ModelConfig::of(&ModelFile::open(&path).unwrap()).unwrap_err().to_string();
    assert!(error.contains("`mamba`") && error.contains("llama, mistral"), "{error}");
}

#[test]
fn a_tensor_that_no_part_of_the_model_reads_is_refused() {
    let (_d, path) = Tiny { extra: Some("blk.0.attn_sinks.weight"), ..Default::default() }.write();
    let error = load_error(&path);
    assert!(error.contains("`blk.0.attn_sinks.weight` is no part"), "{error}");
}

#[test]
fn forged_sizes_are_errors_and_not_allocations() {
    let error = |key, value| {
        let (_d, path) = Tiny { number: Some((key, value)), ..Default::default() }.write();
        let file = ModelFile::open(&path).unwrap();
        let Err(error) = ModelConfig::of(&file) else {
            let model = ModelConfig::of(&file).unwrap();
            let config = EngineConfig::new(path.clone(), "cpu");
            return match Sizes::choose(model, &config, &engine::device::DeviceMemory::default()) {
                Err(error) => error.to_string(),
                Ok(sizes) => cpu_runner(&file, &sizes, &config, &mut |_, _| {})
                    .err()
                    .map_or_else(|| "loaded".into(), |error| error.to_string()),
            };
        };
        error.to_string()
    };
    assert!(error("llama.attention.head_count", 128).contains("heads of 0 values"));
    assert!(error("llama.block_count", 0).contains("is 0"));
    assert!(error("llama.block_count", u32::MAX).contains("is 4294967295"));
    let huge = error("llama.block_count", 1 << 20);
    assert!(huge.contains("is 1048576, should be 1 to 1024"), "{huge}");
    // The longest sequence is cut to the default cache.
    let long = error("llama.context_length", 1 << 24);
    assert_eq!(long, "loaded");
}
