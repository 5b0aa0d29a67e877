//! Engine equivalences on a tiny random model, token for token: one chunk = many, alone = batched, shuffled blocks,
//! `wgpu` = `cpu` off near-ties; and what happens when weights or the device are broken.

mod support;

use engine::batch::{ModelInput, Selected, Selection};
use engine::engine::Engine;
use engine::event::{EngineEvent, RequestError};
use engine::gguf::{GgufFile, StorageType};
use engine::kernels::Activations;
use engine::kv::{BLOCK_SIZE, BlockManager};
use engine::model_runner::StepRunner;
use engine::ops::DeviceError;
use engine::sampling_params::SamplingParams;
use engine::scheduler::{Scheduler, SchedulerLimits};
use engine::sequence::{FinishReason, RequestId};
use engine::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use support::driver::{Fed, argmax, greedy, logits_of, on_cpu, on_gpu};
use support::tiny_model::Tiny;

const KV_TOKENS: usize = 2048;

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + seed * 101 + i * i % 7) % 256).collect()
}

/// Every device there is, by name.
fn runners(path: &Path) -> Vec<(&'static str, Box<dyn StepRunner>)> {
    let mut all: Vec<(&'static str, Box<dyn StepRunner>)> = vec![("cpu", on_cpu(path, KV_TOKENS))];
    if let Some(gpu) = support::gpu() {
        all.push(("wgpu f32", on_gpu(&gpu, path, KV_TOKENS, Activations::F32)));
        all.push(("wgpu int8", on_gpu(&gpu, path, KV_TOKENS, Activations::Int8)));
    }
    all
}

#[test]
fn one_chunk_equals_many_chunks_bit_for_bit() {
    let (_directory, path) = Tiny::default().write();
    let prompt = prompt(131, 1);
    for (name, mut runner) in runners(&path) {
        let whole = Fed::in_order(200).prefill(runner.as_mut(), &prompt, 640);
        for chunk in [1, 7, 16, 64, 130] {
            let parts = Fed::in_order(200).prefill(runner.as_mut(), &prompt, chunk);
            assert_eq!(bits(&whole), bits(&parts), "{name}: chunks of {chunk}");
        }
    }
}

#[test]
fn shuffled_block_ids_give_the_same_bits() {
    let (_directory, path) = Tiny::default().write();
    let prompt = prompt(90, 2);
    for (name, mut runner) in runners(&path) {
        let ordered = greedy(runner.as_mut(), &mut Fed::in_order(160), &prompt, 640, 30);
        let mut shuffled = Fed::new((0..10).map(|block| (block * 37 + 5) % 128).collect());
        assert_eq!(greedy(runner.as_mut(), &mut shuffled, &prompt, 32, 30), ordered, "{name}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Runs requests through the real scheduler and engine; returns each one's tokens.
fn through_engine(runner: Box<dyn StepRunner>, path: &Path, prompts: &[Vec<u32>], budget: usize) -> Vec<Vec<u32>> {
    let tokenizer = Arc::new(Tokenizer::from_gguf(&GgufFile::open(path).unwrap()).unwrap());
    let limits = SchedulerLimits { max_num_seqs: 8, max_num_batched_tokens: budget };
    let scheduler = Scheduler::new(limits, BlockManager::new(KV_TOKENS / BLOCK_SIZE, BLOCK_SIZE));
    let mut engine = Engine::new(runner, scheduler, tokenizer, 512);
    for (id, prompt) in prompts.iter().enumerate() {
        let params = SamplingParams { max_tokens: 12 + id, ignore_eos: true, ..Default::default() };
        engine.add(RequestId(id as u64), prompt.clone(), params);
    }
    let mut tokens = vec![Vec::new(); prompts.len()];
    while !engine.scheduler().is_idle() {
        for (id, event) in engine.step().unwrap() {
            match event {
                EngineEvent::Token { token_id, .. } => tokens[id.0 as usize].push(token_id),
                EngineEvent::Finished { reason, num_generated, .. } => {
                    assert_eq!((reason, num_generated), (FinishReason::Length, 12 + id.0 as usize));
                }
                EngineEvent::Failed(error) => panic!("request {id:?}: {error}"),
            }
        }
    }
    assert_eq!(engine.scheduler().blocks().num_free_blocks(), KV_TOKENS / BLOCK_SIZE, "all blocks are free again");
    tokens
}

/// Makes a fresh runner of one device.
type MakeRunner<'a> = Box<dyn Fn() -> Box<dyn StepRunner> + 'a>;

#[test]
fn alone_equals_batched_token_for_token() {
    let (_directory, path) = Tiny::default().write();
    let prompts: Vec<Vec<u32>> =
        [5, 40, 1, 100, 17, 64].iter().enumerate().map(|(i, &len)| prompt(len, i as u32)).collect();
    let gpu = support::gpu();
    let mut make: BTreeMap<&str, MakeRunner<'_>> = BTreeMap::new();
    make.insert("cpu", Box::new(|| on_cpu(&path, KV_TOKENS)));
    if let Some(gpu) = &gpu {
        make.insert("wgpu f32", Box::new(|| on_gpu(gpu, &path, KV_TOKENS, Activations::F32)));
        make.insert("wgpu int8", Box::new(|| on_gpu(gpu, &path, KV_TOKENS, Activations::Int8)));
    }
    for (name, make) in &make {
        let together = through_engine(make(), &path, &prompts, 640);
        let squeezed = through_engine(make(), &path, &prompts, 24);
        assert_eq!(together, squeezed, "{name}: a small token budget");
        for (index, prompt) in prompts.iter().enumerate() {
            let alone = through_engine(make(), &path, std::slice::from_ref(prompt), 640);
            assert_eq!(alone[0], together[index][..12], "{name}: request {index}");
        }
    }
}

#[test]
fn wgpu_equals_cpu_off_near_ties_for_every_storage_type() {
    let Some(gpu) = support::gpu() else { return };
    for storage in StorageType::ALL {
        let (_directory, path) = Tiny { storage, ..Default::default() }.write();
        let mut cpu = on_cpu(&path, KV_TOKENS);
        // Bounds as parts of the largest logit: an f32 order of sums, and rounding to 127 steps through two layers.
        for (activations, part) in [(Activations::F32, 0.001), (Activations::Int8, 0.1)] {
            let mut wgpu = on_gpu(&gpu, &path, KV_TOKENS, activations);
            let (mut on_cpu, mut on_wgpu) = (Fed::in_order(200), Fed::in_order(200));
            let mut expected = on_cpu.prefill(cpu.as_mut(), &prompt(70, 3), 640);
            let mut got = on_wgpu.prefill(wgpu.as_mut(), &prompt(70, 3), 640);
            let mut compared = 0;
            for step in 0..40 {
                let bound = part * expected.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
                let worst = expected.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < bound, "{storage:?} {activations:?} step {step}: logits off by {worst}, bound {bound}");
                let token = argmax(&expected);
                let mut sorted = expected.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                if sorted[0] - sorted[1] > 2.0 * bound {
                    assert_eq!(argmax(&got), token, "{storage:?} {activations:?} step {step}");
                    compared += 1;
                }
                expected = logits_of(on_cpu.feed(cpu.as_mut(), &[token], true, Selection::Logits));
                got = logits_of(on_wgpu.feed(wgpu.as_mut(), &[token], true, Selection::Logits));
            }
            assert!(compared >= 5, "{storage:?} {activations:?}: only {compared} tokens were off near-ties");
        }
    }
}

#[test]
fn device_selections_agree_with_the_logits() {
    let (_directory, path) = Tiny::default().write();
    for (name, mut runner) in runners(&path) {
        let mut input = ModelInput::default();
        for (index, selection) in
            [Selection::Logits, Selection::Argmax, Selection::TopK(5), Selection::TopK(200)].into_iter().enumerate()
        {
            let blocks = [index as u32 * 2, index as u32 * 2 + 1];
            input.push(&prompt(20, 9), 0, &blocks, BLOCK_SIZE, Some(selection));
        }
        let selected = runner.run(&input).unwrap();
        let [Selected::Logits(logits), Selected::Token(token), Selected::TopK(five), Selected::TopK(many)] =
            &selected[..]
        else {
            panic!("{name}: {selected:?}")
        };
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        assert_eq!(*token, sorted[0].0, "{name}");
        assert_eq!(five[..], sorted[..5], "{name}");
        assert_eq!(many[..], sorted[..200], "{name}");
    }
}

#[test]
fn nan_weights_fail_their_request_and_the_engine_goes_on() {
    // A row of the output matrix, and a norm before it whose NaN passes through the rounding to int8.
    for (nan_in, storage) in [("output.weight", StorageType::F32), ("output_norm.weight", StorageType::Q4_1)] {
        let (_directory, path) = Tiny { nan_in: Some(nan_in), storage, ..Default::default() }.write();
        for (name, runner) in runners(&path) {
            nan_fails_its_request(&format!("{name}, NaN in {nan_in}"), runner, &path);
        }
    }
}

fn nan_fails_its_request(name: &str, runner: Box<dyn StepRunner>, path: &Path) {
    let tokenizer = Arc::new(Tokenizer::from_gguf(&GgufFile::open(path).unwrap()).unwrap());
    let limits = SchedulerLimits { max_num_seqs: 8, max_num_batched_tokens: 64 };
    let mut engine = Engine::new(runner, Scheduler::new(limits, BlockManager::new(64, BLOCK_SIZE)), tokenizer, 512);
    for (id, temperature) in [(0, 0.0), (1, 1.0)] {
        engine.add(RequestId(id), prompt(5, 1), SamplingParams { temperature, ..Default::default() });
    }
    let failed = |id| (RequestId(id), EngineEvent::Failed(RequestError::NotANumber));
    assert_eq!(engine.step().unwrap(), vec![failed(0), failed(1)], "{name}");
    assert!(engine.scheduler().is_idle() && engine.scheduler().blocks().num_free_blocks() == 64, "{name}");
    engine.add(RequestId(2), prompt(5, 1), SamplingParams::default());
    assert_eq!(engine.step().unwrap(), vec![failed(2)], "{name}: goes on");
}

#[test]
fn a_lost_device_is_an_error_and_never_tokens() {
    let Some(gpu) = support::gpu() else { return };
    let (_directory, path) = Tiny::default().write();
    let mut runner = on_gpu(&gpu, &path, KV_TOKENS, Activations::F32);
    let mut input = ModelInput::default();
    input.push(&prompt(20, 1), 0, &[0, 1], BLOCK_SIZE, Some(Selection::Argmax));
    assert!(matches!(runner.run(&input).unwrap()[0], Selected::Token(_)));
    gpu.lose();
    let error = runner.run(&input).unwrap_err();
    assert!(matches!(error, DeviceError::Lost(_) | DeviceError::Refused { .. }), "{error}");
    assert!(runner.run(&input).is_err(), "a failed device stays failed");
}
