//! The real default model and Gemma-3-270M against golden values of an independent float32 implementation (tests/golden/README.md).
//!
//! Tokeniser ids; logits after each prompt; greedy tokens, fed back so that a near-tie does not end the comparison. `cpu`
//! runs all of it; the software GPU runs 16 tokens of each case but `long_512`, or everything with `PAGODA_TEST_ALL=1`.

mod support;

use engine::batch::Choice;
use engine::kernels::Activations;
use engine::kv::KvCacheDtype;
use engine::model_file::ModelFile;
use engine::model_runner::StepRunner;
use engine::tokenizer::Tokenizer;
use serde_json::Value;
use support::driver::{Fed, argmax, logits_of, on_cpu, on_cpu_with, on_gpu};

/// How far an arithmetic may stray: absolute logits, margin below which the largest logit may differ.
#[derive(Clone, Copy)]
struct Bounds {
    logits: f32,
    top_margin: f32,
    greedy_margin: f32,
}

/// f32 with an f16 KV cache.
const F32: Bounds = Bounds { logits: 0.03, top_margin: 0.15, greedy_margin: 0.15 };
/// Activations rounded to int8 in blocks of 32.
const INT8: Bounds = Bounds { logits: 0.5, top_margin: 0.6, greedy_margin: 0.6 };

/// Keys and values as signed bytes, activations in f32.
const KV_BYTES: Bounds = Bounds { logits: 0.3, top_margin: 0.35, greedy_margin: 0.35 };

fn golden() -> Value {
    serde_json::from_str(include_str!("golden/smollm2.json")).unwrap()
}

fn golden_gemma3() -> Value {
    serde_json::from_str(include_str!("golden/gemma3.json")).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

/// Checks one case; returns how many greedy tokens were compared.
fn check_case(runner: &mut dyn StepRunner, name: &str, case: &Value, bounds: Bounds, num_greedy: usize) -> usize {
    let prompt = ids(&case["ids"]);
    let mut sequence = Fed::in_order(prompt.len() + 48);
    let logits = sequence.prefill(runner, &prompt, 640);
    let (top_ids, top_logits) = (ids(&case["top_ids"]), floats(&case["top_logits"]));
    let mut worst = 0.0f32;
    for (&id, &golden) in top_ids.iter().zip(&top_logits) {
        worst = worst.max((logits[id as usize] - golden).abs());
    }
    println!("{name}: worst of ten logits off by {worst:.4}");
    assert!(worst <= bounds.logits, "{name}: a logit is off by {worst}, bound {}", bounds.logits);
    if top_logits[0] - top_logits[1] > bounds.top_margin {
        assert_eq!(argmax(&logits), top_ids[0], "{name}: top token");
    }
    let (greedy, margins) = (ids(&case["greedy_ids"]), floats(&case["greedy_margin"]));
    let mut next = argmax(&logits);
    let mut compared = 0;
    for position in 0..num_greedy.min(greedy.len()) {
        if margins[position] > bounds.greedy_margin {
            assert_eq!(next, greedy[position], "{name}: greedy token {position}, margin {}", margins[position]);
            compared += 1;
        }
        next = argmax(&logits_of(sequence.feed(runner, &[greedy[position]], true, Choice::Logits)));
    }
    compared
}

/// Checks all cases of a model but the long one, and that too where `with_long`.
fn check_cases(golden: &Value, runner: &mut dyn StepRunner, bounds: Bounds, num_greedy: usize, with_long: bool) {
    let cases = golden["cases"].as_object().unwrap();
    let mut compared = 0;
    for (name, case) in cases {
        if with_long || !name.starts_with("long") {
            compared += check_case(runner, name, case, bounds, num_greedy);
        }
    }
    println!("{compared} greedy tokens compared");
    assert!(compared > num_greedy, "only {compared} greedy tokens were off near-ties");
}

/// Checks a tokeniser's ids of texts and of the cases' prompts, and that they come back.
fn check_tokeniser(path: &std::path::Path, golden: &Value) {
    let tokenizer = Tokenizer::of(&ModelFile::open(path).unwrap()).unwrap();
    let texts = golden["tokenizer"].as_array().unwrap();
    assert_eq!(texts.len(), 16);
    for entry in texts {
        let text = entry["text"].as_str().unwrap();
        assert_eq!(tokenizer.encode(text, true).unwrap(), ids(&entry["ids"]), "{text:?}");
        // What a text begins with is no part of it; SentencePiece's own sign for a space comes back as one.
        let all = ids(&entry["ids"]);
        let begun = usize::from(tokenizer.encode("", true).unwrap().len() == 1);
        assert_eq!(tokenizer.decode(&all[begun..]), text.replace('\u{2581}', " "));
    }
    for (name, case) in golden["cases"].as_object().unwrap() {
        assert_eq!(tokenizer.encode(case["prompt"].as_str().unwrap(), true).unwrap(), ids(&case["ids"]), "{name}");
        assert_eq!(tokenizer.decode(&ids(&case["greedy_ids"])), case["greedy_text"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn tokeniser_gives_the_golden_ids() {
    check_tokeniser(&support::default_model(), &golden());
}

#[test]
fn sentencepiece_vocabulary_of_gemma_gives_the_golden_ids() {
    check_tokeniser(&support::gemma3(), &golden_gemma3());
}

#[test]
fn cpu_gives_gemma_s_golden_logits_and_tokens() {
    let mut runner = on_cpu(&support::gemma3(), 1024);
    check_cases(&golden_gemma3(), runner.as_mut(), F32, 24, true);
}

#[test]
fn software_gpu_gives_gemma_s_golden_logits_and_tokens() {
    let Some(gpu) = support::gpu() else { return };
    let mut runner = on_gpu(&gpu, &support::gemma3(), 1024, Activations::F32);
    let all = std::env::var("PAGODA_TEST_ALL").is_ok_and(|value| value == "1");
    check_cases(&golden_gemma3(), runner.as_mut(), F32, if all { 24 } else { 8 }, all);
}

#[test]
fn a_cache_of_bytes_gives_values_near_the_golden_ones() {
    let mut runner = on_cpu_with(&support::default_model(), 1024, KvCacheDtype::Q8_0);
    check_cases(&golden(), runner.as_mut(), KV_BYTES, 48, true);
}

#[test]
fn cpu_gives_the_golden_logits_and_tokens() {
    let mut runner = on_cpu(&support::default_model(), 1024);
    check_cases(&golden(), runner.as_mut(), F32, 48, true);
}

fn gpu_gives_the_golden_values(activations: Activations, bounds: Bounds) {
    let Some(gpu) = support::gpu() else { return };
    let mut runner = on_gpu(&gpu, &support::default_model(), 1024, activations);
    let all = std::env::var("PAGODA_TEST_ALL").is_ok_and(|value| value == "1");
    check_cases(&golden(), runner.as_mut(), bounds, if all { 48 } else { 16 }, all);
}

#[test]
fn software_gpu_with_f32_activations_gives_the_golden_values() {
    gpu_gives_the_golden_values(Activations::F32, F32);
}

#[test]
fn kernels_of_hardware_give_the_golden_values_on_the_software_gpu() {
    let Some(gpu) = support::gpu_as_hardware() else { return };
    let mut runner = on_gpu(&gpu, &support::default_model(), 1024, Activations::F32);
    // Slow here, where nothing is shared: one case, a prompt of many tiles too where there is time.
    let all = std::env::var("PAGODA_TEST_ALL").is_ok_and(|value| value == "1");
    let golden = golden();
    for name in ["capital", "long_512"].into_iter().take(1 + usize::from(all)) {
        check_case(runner.as_mut(), name, &golden["cases"][name], F32, 4);
    }
}

#[test]
fn software_gpu_with_int8_activations_gives_the_golden_values() {
    gpu_gives_the_golden_values(Activations::Int8, INT8);
}
