//! Bad Hugging Face directories, and GGUF files in parts that do not belong together: each is an error that names the file and
//! the reason, and never a panic.

mod support;

use engine::chat_template::ChatTemplate;
use engine::config::EngineConfig;
use engine::device::DeviceMemory;
use engine::model::ModelConfig;
use engine::model_file::ModelFile;
use engine::model_runner::cpu_runner;
use engine::sampling_defaults::SamplingDefaults;
use engine::sizes::Sizes;
use engine::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::path::Path;
use support::gguf_writer::random;
use support::tiny_directory::{golden, safetensors, tensors, write};
use support::tiny_model::Tiny;

/// Opens a model as the engine does, up to a loaded runner; what is wrong, or `loaded`.
fn outcome(path: &Path) -> String {
    let load = || -> Result<(), String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let file = ModelFile::open(path).map_err(|error| text(&error))?;
        let tokenizer = Tokenizer::of(&file).map_err(|error| text(&error))?;
        ChatTemplate::of(&file, &tokenizer).map_err(|error| text(&error))?;
        SamplingDefaults::of(&file).map_err(|error| text(&error))?;
        let model = ModelConfig::of(&file).map_err(|error| text(&error))?;
        tokenizer.check_vocabulary(&file, model.vocab_size).map_err(|error| text(&error))?;
        let mut config = EngineConfig::new(path.to_owned(), "cpu");
        config.kv_cache_bytes = Some(64 << 20);
        config.max_num_seqs = 4;
        config.max_num_batched_tokens = 32;
        let sizes = Sizes::choose(model, &config, &DeviceMemory::default()).map_err(|error| text(&error))?;
        cpu_runner(&file, &sizes, &config, &mut |_, _| {}).map_err(|error| text(&error))?;
        Ok(())
    };
    load().err().unwrap_or_else(|| "loaded".into())
}

/// A tiny model's directory, changed by `change`.
fn changed(name: &str, change: impl FnOnce(&Path)) -> String {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), &golden()["models"][name], "F32", false);
    change(directory.path());
    outcome(directory.path())
}

fn set(directory: &Path, file: &str, key: &str, value: Value) {
    let path = directory.join(file);
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    json[key] = value;
    std::fs::write(path, json.to_string()).unwrap();
}

#[test]
fn sampling_defaults_are_those_of_generation_config() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), &golden()["models"]["llama"], "F32", false);
    let defaults = || SamplingDefaults::of(&ModelFile::open(directory.path()).unwrap());
    let path = directory.path().join("generation_config.json");
    let usual = SamplingDefaults::default();
    assert_eq!(defaults().unwrap(), usual);
    let all = r#"{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "do_sample": true}"#;
    let expected =
        SamplingDefaults { temperature: 0.6, top_k: Some(20), top_p: 0.95, min_p: 0.05, repetition_penalty: 1.1 };
    for (text, expected) in [
        (all, expected),
        (r#"{"temperature": null, "top_k": 0}"#, usual),
        (r#"{"top_p": 1}"#, usual),
        (r#"{"temperature": 0}"#, SamplingDefaults { temperature: 0.0, ..usual }),
        // As a request's would be.
        (r#"{"temperature": 1e-40, "top_p": 1e-50}"#, SamplingDefaults { temperature: 0.01, top_p: 1e-6, ..usual }),
    ] {
        std::fs::write(&path, text).unwrap();
        assert_eq!(defaults().unwrap(), expected, "{text}");
    }
    for (text, word) in [
        (r#"{"temperature": -1}"#, "general.sampling.temp"),
        (r#"{"temperature": "hot"}"#, "should be a number"),
        (r#"{"top_k": 2.5}"#, "general.sampling.top_k"),
        (r#"{"top_p": 0}"#, "above 0, at most 1"),
        (r#"{"min_p": 1e400}"#, "generation_config.json"),
        (r#"{"repetition_penalty": 0}"#, "0.01 to 100"),
    ] {
        std::fs::write(&path, text).unwrap();
        let error = outcome(directory.path());
        assert!(error.contains(word), "{text}: {error}");
    }
}

#[test]
fn missing_and_broken_files_are_named() {
    assert_eq!(changed("llama", |_| {}), "loaded");
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let error = changed("llama", |directory| std::fs::remove_file(directory.join(file)).unwrap());
        assert!(error.contains(file) && error.contains("must have it"), "{error}");
        let error = changed("llama", |directory| std::fs::write(directory.join(file), b"{\"a\":").unwrap());
        assert!(error.contains(file), "{error}");
    }
    let error =
        changed("llama", |directory| std::fs::write(directory.join("chat_template.jinja"), "{% if %}").unwrap());
    assert!(error.contains("chat template"), "{error}");
}

#[test]
fn other_models_and_other_weights_are_refused_by_name() {
    let error = changed("llama", |directory| set(directory, "config.json", "model_type", json!("mamba")));
    assert!(error.contains("`mamba`") && error.contains("qwen3"), "{error}");
    let quantised = json!({ "quant_method": "awq", "bits": 4 });
    let error = changed("llama", |directory| set(directory, "config.json", "quantization_config", quantised));
    assert!(error.contains("`awq`") && error.contains("GGUF"), "{error}");
    let error = changed("llama", |directory| set(directory, "config.json", "hidden_act", json!("relu")));
    assert!(error.contains("`relu`") && error.contains("silu"), "{error}");
    let error = changed("llama", |directory| set(directory, "config.json", "vocab_size", json!(95)));
    assert!(error.contains("96 tokens") && error.contains("95"), "{error}");
    let error = changed("qwen3", |directory| {
        let mut tensors = tensors(&golden()["models"]["qwen3"]);
        tensors.retain(|tensor| !tensor.name.ends_with("layers.2.mlp.up_proj.weight"));
        std::fs::write(directory.join("model.safetensors"), safetensors(&tensors, "F32")).unwrap();
    });
    assert!(error.contains("blk.2.ffn_up.weight"), "{error}");
    let scaling = json!({ "rope_type": "warp", "factor": 2.0 });
    let error = changed("llama", |directory| set(directory, "config.json", "rope_scaling", scaling));
    assert!(error.contains("`warp`") && error.contains("yarn"), "{error}");
}

#[test]
fn no_number_of_a_configuration_is_trusted() {
    let numbers =
        [json!(0), json!(1), json!(3), json!(-1), json!(1e30), json!(1u64 << 31), json!(u64::MAX), json!(0.5)];
    let others = [json!("7"), json!(null), json!([]), json!({}), json!(true)];
    for name in ["llama", "gemma2", "gemma3", "phi3", "qwen2"] {
        let config = golden()["models"][name]["config"].clone();
        for key in config.as_object().unwrap().keys() {
            for value in numbers.iter().chain(&others) {
                // Whatever it is, it is no panic; no model has none of these, or a part of one.
                let outcome = changed(name, |directory| set(directory, "config.json", key, value.clone()));
                let counts =
                    ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"];
                let is_count = value.as_u64().is_some_and(|count| count > 0);
                assert!(is_count || !counts.contains(&key.as_str()) || outcome != "loaded", "{name} {key} {value}");
            }
        }
        let Some(scaling) = config["rope_scaling"].as_object() else { continue };
        for key in scaling.keys() {
            for value in numbers.iter().chain(&others) {
                let mut scaling = Value::Object(scaling.clone());
                scaling[key] = value.clone();
                changed(name, |directory| set(directory, "config.json", "rope_scaling", scaling));
            }
        }
    }
}

/// `count` random changes of some bytes: flipped, set, cut or doubled.
fn mutations(bytes: &[u8], count: u64, seed: u64) -> impl Iterator<Item = Vec<u8>> {
    (0..count).map(move |round| {
        let draws: Vec<usize> = random(12, seed + round).iter().map(|x| ((x + 1.0) * 4e8) as usize).collect();
        let mut changed = bytes.to_vec();
        for draw in draws.chunks(3).take(1 + draws[11] % 3) {
            let at = draw[0] % changed.len().max(1);
            match draw[1] % 4 {
                0 => changed[at] ^= 1 << (draw[2] % 8),
                1 => changed[at] = [0, 0xff, b'9', b'-', b'"', b'e'][draw[2] % 6],
                2 => changed.truncate(at + 1),
                _ => changed.insert(at, changed[draw[2] % changed.len()]),
            }
        }
        changed
    })
}

#[test]
fn changed_headers_and_tokenisers_are_survived() {
    let rounds = if std::env::var("PAGODA_TEST_ALL").is_ok() { 20_000 } else { 600 };
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), &golden()["models"]["qwen3"], "BF16", false);
    for file in
        ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    {
        let path = directory.path().join(file);
        let good = std::fs::read(&path).unwrap();
        // Of the weights the header.
        let end = if file == "model.safetensors" {
            8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize
        } else {
            good.len()
        };
        for changed in mutations(&good[..end], rounds, end as u64) {
            std::fs::write(&path, [&changed, &good[end..]].concat()).unwrap();
            outcome(directory.path());
        }
        std::fs::write(&path, &good).unwrap();
    }
    assert_eq!(outcome(directory.path()), "loaded");
    let good = Tiny::default().bytes();
    let path = directory.path().join("tiny.gguf");
    for changed in mutations(&good[..1800], rounds, 99) {
        std::fs::write(&path, [&changed, &good[1800..]].concat()).unwrap();
        outcome(&path);
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (first, second) = Tiny::default().split();
    let path = |number: u32| directory.path().join(format!("tiny-{number:05}-of-00002.gguf"));
    std::fs::write(path(1), &first).unwrap();
    let error = outcome(&path(1));
    assert!(error.contains("tiny-00002-of-00002.gguf"), "the missing part is named: {error}");
    std::fs::write(path(2), &first).unwrap();
    assert!(outcome(&path(1)).contains("not 1 of 2"), "{}", outcome(&path(1)));
    std::fs::write(path(2), &second).unwrap();
    assert_eq!(outcome(&path(1)), "loaded");
    assert!(outcome(&path(2)).contains("give the first part"), "{}", outcome(&path(2)));
    let renamed = directory.path().join("tiny.gguf");
    std::fs::write(&renamed, &first).unwrap();
    assert!(outcome(&renamed).contains("-00001-of-00002.gguf"), "{}", outcome(&renamed));
}

#[test]
fn a_scale_that_is_no_number_is_named_with_its_tensor_and_row() {
    // The first block of a Q4_1 matrix: its scale becomes a NaN.
    let (directory, path) = Tiny { broken_scale_in: Some("blk.1.ffn_down.weight"), ..Default::default() }.write();
    let error = outcome(&path);
    drop(directory);
    assert!(
        error.contains("`blk.1.ffn_down.weight`") && error.contains("row 0") && error.contains("no finite"),
        "{error}"
    );
}

#[test]
fn a_tokeniser_neither_cuts_nor_fills_prompts() {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), &golden()["models"]["qwen3"], "BF16", false);
    let cut = json!({ "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0 });
    set(directory.path(), "tokenizer.json", "truncation", cut);
    let fill = json!({ "strategy": { "Fixed": 40 }, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 95,
                       "pad_type_id": 0, "pad_token": "<eos>" });
    set(directory.path(), "tokenizer.json", "padding", fill);
    let tokenizer = Tokenizer::of(&ModelFile::open(directory.path()).unwrap()).unwrap();
    assert_eq!(tokenizer.encode("Hello there", true).unwrap().len(), 11);
}

#[test]
fn blocks_of_short_and_of_long_rotations_are_not_mixed() {
    let fingerprint = |name: &str, max_model_len: usize| {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &golden()["models"][name], "BF16", false);
        let file = ModelFile::open(directory.path()).unwrap();
        let mut config = EngineConfig::new(directory.path().to_owned(), "cpu");
        config.max_model_len = Some(max_model_len);
        let model = ModelConfig::of(&file).unwrap();
        let sizes = Sizes::choose(model, &config, &DeviceMemory::default()).unwrap();
        engine::fingerprint::of_model(&file, &sizes, &config).to_string()
    };
    // Phi-3's tiny model was trained on 64 tokens.
    assert_eq!(fingerprint("phi3", 32), fingerprint("phi3", 64));
    assert_ne!(fingerprint("phi3", 64), fingerprint("phi3", 65));
    assert_eq!(fingerprint("qwen3", 64), fingerprint("qwen3", 65));
}

#[test]
fn texts_of_llama_3_begin_where_a_file_does_not_say_so() {
    let encoded = |pre| {
        let (_directory, path) = Tiny { pre, add_bos: None, ..Default::default() }.write();
        Tokenizer::of(&ModelFile::open(&path).unwrap()).unwrap().encode("Hi", true).unwrap()
    };
    assert_eq!(encoded("llama-bpe")[0], 256);
    assert_ne!(encoded("gpt-2")[0], 256);
}
