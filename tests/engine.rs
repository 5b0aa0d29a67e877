//! Engine equivalences on a tiny random model, token for token: one chunk = many, alone = batched, shuffled blocks,
//! `wgpu` = `cpu` off near-ties; and what happens when weights or the device are broken.

mod support;

use engine::batch::{Choice, ModelInput, Selected, Selection};
use engine::engine::{Engine, EngineLimits};
use engine::event::{EngineEvent, RequestError};
use engine::kernels::{Activations, Gpu};
use engine::kv::{BLOCK_SIZE, BlockManager, COPY_BYTES, KvCacheDtype, Load};
use engine::model_file::{ModelFile, StorageType};
use engine::model_runner::StepRunner;
use engine::ops::DeviceError;
use engine::sampling_params::SamplingParams;
use engine::scheduler::{Scheduler, SchedulerLimits};
use engine::sequence::{EngineRequest, FinishReason, RequestId};
use engine::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use support::driver::{Fed, argmax, greedy, logits_of, on_cpu, on_cpu_with, on_gpu, on_gpu_with};
use support::tiny_model::Tiny;

const KV_TOKENS: usize = 2048;

fn prompt(len: usize, seed: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * 37 + seed * 101 + i * i % 7) % 256).collect()
}

/// What a GPU computes in.
fn activations_of(gpu: &Gpu) -> Vec<Activations> {
    let halves = gpu.info.traits.f16.then_some(Activations::F16);
    [Activations::F32, Activations::Int8].into_iter().chain(halves).collect()
}

/// Every device there is, by name; a software GPU as what it is, and as if it were hardware.
fn runners(path: &Path) -> Vec<(String, Box<dyn StepRunner>)> {
    let mut all: Vec<(String, Box<dyn StepRunner>)> = vec![("cpu".into(), on_cpu(path, KV_TOKENS))];
    for (name, gpu) in [("wgpu", support::gpu()), ("hardware", support::gpu_as_hardware())] {
        let Some(gpu) = gpu else { continue };
        for activations in activations_of(&gpu) {
            all.push((format!("{name} {activations:?}"), on_gpu(&gpu, path, KV_TOKENS, activations)));
        }
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

#[test]
fn blocks_beyond_a_copy_buffer_go_out_and_come_back_in_turns() {
    let (_directory, path) = Tiny::default().write();
    let prompt = prompt(128, 9);
    for (name, mut runner) in runners(&path) {
        Fed::in_order(128).prefill(runner.as_mut(), &prompt, 640);
        let payload_bytes = runner.payload().bytes;
        // Two and a half buffers of them, in no even order.
        let count = (COPY_BYTES as usize * 5 / 2) / payload_bytes + 1;
        let block_ids: Vec<u32> = (0..count as u32).map(|index| index * index % 7).collect();
        runner.copy_blocks(&(0..8).collect::<Vec<u32>>(), &[]).unwrap();
        let blocks = runner.copied_out().unwrap();
        assert!((1..8).all(|index| blocks[index] != blocks[0]), "{name}");
        runner.copy_blocks(&block_ids, &[]).unwrap();
        let copied = runner.copied_out().unwrap();
        assert_eq!(copied.len(), count, "{name}");
        assert!(copied.iter().zip(&block_ids).all(|(payload, &id)| *payload == blocks[id as usize]), "{name}");
        // What leaves is read before what arrives is written, whichever turn it has.
        let load = |index: usize| Load { block_id: index as u32, payload: blocks[7 - index].clone() };
        runner.copy_blocks(&block_ids, &(0..8).map(load).collect::<Vec<Load>>()).unwrap();
        assert!(runner.copied_out().unwrap() == copied, "{name}");
        runner.copy_blocks(&[0, 7], &[]).unwrap();
        assert_eq!(runner.copied_out().unwrap(), [blocks[7].clone(), blocks[0].clone()], "{name}");
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// The real engine over a runner of its own.
struct Driven {
    runner: Box<dyn StepRunner>,
    engine: Engine,
}

impl Driven {
    fn new(runner: Box<dyn StepRunner>, path: &Path, num_blocks: usize, budget: usize) -> Self {
        let tokenizer = Arc::new(Tokenizer::of(&ModelFile::open(path).unwrap()).unwrap());
        let limits = SchedulerLimits {
            max_num_seqs: 8,
            max_num_batched_tokens: budget,
            max_logits_rows: 24,
            max_context_tokens: usize::MAX,
            enable_prefix_caching: true,
            has_tiers: false,
        };
        let scheduler = Scheduler::new(limits, BlockManager::new(num_blocks, BLOCK_SIZE));
        let limits = EngineLimits { max_model_len: 512, max_step_s: 1e9 };
        Self { runner, engine: Engine::new(scheduler, tokenizer, limits) }
    }

    fn add(&mut self, id: u64, prompt: Vec<u32>, params: SamplingParams) {
        self.engine.add(RequestId(id), EngineRequest { prompt, params, ..Default::default() });
    }

    fn step(&mut self) -> Vec<(RequestId, EngineEvent)> {
        let step = self.engine.begin().unwrap();
        let selected = self.runner.run(&step.input).unwrap();
        self.engine.finish(step, selected)
    }

    /// Steps until all is done; the tokens of each request.
    fn finish(&mut self, num_requests: usize) -> Vec<Vec<u32>> {
        let mut tokens = vec![Vec::new(); num_requests];
        while !self.engine.scheduler().is_idle() {
            for (id, event) in self.step() {
                match event {
                    EngineEvent::Token { token_id, .. } => tokens[id.0 as usize].push(token_id),
                    EngineEvent::Finished { reason, num_generated, .. } => {
                        assert_eq!((reason, num_generated), (FinishReason::Length, tokens[id.0 as usize].len()));
                    }
                    EngineEvent::Resumed { .. } | EngineEvent::Prompt { .. } => {}
                    EngineEvent::Failed(error) => panic!("request {id:?}: {error}"),
                }
            }
        }
        let blocks = self.engine.scheduler().blocks();
        assert_eq!(blocks.num_free_blocks(), blocks.num_blocks(), "all blocks are free again");
        tokens
    }
}

/// Runs requests through the real scheduler and engine; returns each one's tokens.
fn through_engine(runner: Box<dyn StepRunner>, path: &Path, prompts: &[Vec<u32>], budget: usize) -> Vec<Vec<u32>> {
    let mut driven = Driven::new(runner, path, KV_TOKENS / BLOCK_SIZE, budget);
    for (id, prompt) in prompts.iter().enumerate() {
        let params = SamplingParams { max_tokens: 12 + id, ignore_eos: true, ..Default::default() };
        driven.add(id as u64, prompt.clone(), params);
    }
    driven.finish(prompts.len())
}

/// Makes a fresh runner of one device.
type MakeRunner<'a> = Box<dyn Fn() -> Box<dyn StepRunner> + 'a>;

/// Runs requests together, together in steps of few tokens, and each alone, on every device.
fn alone_equals_batched(path: &Path, prompts: &[Vec<u32>], dtype: KvCacheDtype, label: &str) {
    let (gpu, hardware) = (support::gpu(), support::gpu_as_hardware());
    let mut make: BTreeMap<String, MakeRunner<'_>> = BTreeMap::new();
    make.insert("cpu".into(), Box::new(|| on_cpu_with(path, KV_TOKENS, dtype)));
    for (name, gpu) in [("wgpu", &gpu), ("hardware", &hardware)] {
        let Some(gpu) = gpu else { continue };
        for activations in activations_of(gpu) {
            let runner = move || on_gpu_with(gpu, path, KV_TOKENS, activations, dtype);
            make.insert(format!("{name} {activations:?}"), Box::new(runner));
        }
    }
    for (name, make) in &make {
        let together = through_engine(make(), path, prompts, 640);
        let squeezed = through_engine(make(), path, prompts, 24);
        assert_eq!(together, squeezed, "{label}, {name}: a small token budget");
        for (index, prompt) in prompts.iter().enumerate() {
            let alone = through_engine(make(), path, std::slice::from_ref(prompt), 640);
            assert_eq!(alone[0], together[index][..12], "{label}, {name}: request {index}");
        }
    }
}

#[test]
fn alone_equals_batched_token_for_token() {
    let prompts: Vec<Vec<u32>> =
        [5, 40, 1, 100, 17, 64].iter().enumerate().map(|(i, &len)| prompt(len, i as u32)).collect();
    let (_directory, path) = Tiny::wide().write();
    alone_equals_batched(&path, &prompts, KvCacheDtype::F16, "f16");
    alone_equals_batched(&path, &prompts, KvCacheDtype::Q8_0, "q8_0");
}

#[test]
fn alone_equals_batched_for_every_storage_type() {
    let prompts = [prompt(9, 1), prompt(40, 2), prompt(1, 3)];
    for storage in StorageType::ALL {
        let (_directory, path) = Tiny::of(storage).write();
        alone_equals_batched(&path, &prompts, KvCacheDtype::F16, &format!("{storage:?}"));
    }
}

#[test]
fn a_cache_of_bytes_stays_near_one_of_halves() {
    let (_directory, path) = Tiny::wide().write();
    let gpu = support::gpu();
    let make = |name: &str, dtype| match (name, &gpu) {
        ("wgpu", Some(gpu)) => on_gpu_with(gpu, &path, KV_TOKENS, Activations::F32, dtype),
        _ => on_cpu_with(&path, KV_TOKENS, dtype),
    };
    let prompt = prompt(150, 4);
    let logits = |runner: &mut dyn StepRunner| Fed::in_order(200).prefill(runner, &prompt, 64);
    for name in ["cpu", "wgpu"] {
        let (mut halves, mut bytes) = (make(name, KvCacheDtype::F16), make(name, KvCacheDtype::Q8_0));
        // 34 bytes for 32 values.
        assert_eq!(bytes.payload().bytes * 64, halves.payload().bytes * 34, "{name}");
        assert_ne!(bytes.numerics(), halves.numerics(), "{name}");
        let (expected, got) = (logits(halves.as_mut()), logits(bytes.as_mut()));
        let largest = expected.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
        let worst = expected.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst > 0.0 && worst < 0.03 * largest, "{name}: off by {worst}, the largest is {largest}");
        // Blocks go out and come back whole.
        bytes.copy_blocks(&[0, 1], &[]).unwrap();
        let blocks = bytes.copied_out().unwrap();
        bytes.copy_blocks(&[], &[Load { block_id: 90, payload: blocks[1].clone() }]).unwrap();
        bytes.copied_out().unwrap();
        bytes.copy_blocks(&[90], &[]).unwrap();
        assert_eq!(bytes.copied_out().unwrap(), [blocks[1].clone()], "{name}");
    }
}

#[test]
fn wgpu_equals_cpu_off_near_ties_for_every_storage_type() {
    let (Some(gpu), Some(hardware)) = (support::gpu(), support::gpu_as_hardware()) else { return };
    for storage in StorageType::ALL {
        let (_directory, path) = Tiny::of(storage).write();
        let mut cpu = on_cpu(&path, KV_TOKENS);
        // Bounds as parts of the largest logit: an f32 order of sums, and rounding to 127 steps through two layers.
        for (gpu, activations, part, margin) in [
            (&gpu, Activations::F32, 0.001, 0.002),
            (&hardware, Activations::F32, 0.001, 0.002),
            (&gpu, Activations::Int8, 0.12, 0.2),
        ] {
            let mut wgpu = on_gpu(gpu, &path, KV_TOKENS, activations);
            let (mut on_cpu, mut on_wgpu) = (Fed::in_order(200), Fed::in_order(200));
            let mut expected = on_cpu.prefill(cpu.as_mut(), &prompt(70, 3), 640);
            let mut got = on_wgpu.prefill(wgpu.as_mut(), &prompt(70, 3), 640);
            let mut compared = 0;
            for step in 0..40 {
                let largest = expected.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
                let bound = part * largest;
                let worst = expected.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(worst < bound, "{storage:?} {activations:?} step {step}: logits off by {worst}, bound {bound}");
                let token = argmax(&expected);
                let mut sorted = expected.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                if sorted[0] - sorted[1] > margin * largest {
                    assert_eq!(argmax(&got), token, "{storage:?} {activations:?} step {step}");
                    compared += 1;
                }
                expected = logits_of(on_cpu.feed(cpu.as_mut(), &[token], true, Choice::Logits));
                got = logits_of(on_wgpu.feed(wgpu.as_mut(), &[token], true, Choice::Logits));
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
        let given = Choice::Given(17);
        for (index, (choice, num_logprobs)) in [
            (Choice::Logits, None),
            (Choice::Greedy, None),
            (Choice::Greedy, Some(5)),
            (given, Some(100)),
            (given, Some(0)),
        ]
        .into_iter()
        .enumerate()
        {
            let blocks = [index as u32 * 2, index as u32 * 2 + 1];
            input.push(&prompt(20, 9), 0, &blocks, BLOCK_SIZE);
            let row = input.num_rows() - 1;
            input.selections.push(Selection { num_logprobs, ..Selection::plain(row, choice) });
        }
        let selected = runner.run(&input).unwrap();
        let [
            Selected::Logits(logits),
            Selected::Token(token, None),
            Selected::Token(again, Some(five)),
            Selected::Token(17, Some(hundred)),
            Selected::Token(17, Some(none)),
        ] = &selected[..]
        else {
            panic!("{name}: {selected:?}")
        };
        let (_, log_sum, rank) = shaders::reference::token_logprobs(logits, 17);
        let mut sorted: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        assert_eq!((*token, *again, five.rank, hundred.rank), (sorted[0].0, sorted[0].0, 1, rank), "{name}");
        let near = |(token, logprob): &(u32, f32), (expected, logit): &(u32, f32)| {
            token == expected && (f64::from(*logprob) - (f64::from(*logit) - log_sum)).abs() < 1e-4
        };
        assert!(five.top.len() == 5 && five.top.iter().zip(&sorted).all(|(a, b)| near(a, b)), "{name}: {five:?}");
        assert!(hundred.top.len() == 100 && hundred.top.iter().zip(&sorted).all(|(a, b)| near(a, b)), "{name}");
        assert!(near(&(17, none.logprob), &(17, logits[17])) && none.top.is_empty(), "{name}");
    }
}

/// Penalties, bias, truncations and log probabilities at once.
fn elaborate(seed: u64, max_tokens: usize) -> SamplingParams {
    SamplingParams {
        temperature: 0.9,
        top_k: Some(60),
        top_p: 0.95,
        min_p: 0.001,
        repetition_penalty: 1.2,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        logit_bias: vec![(65, 3.0), (66, -100.0)],
        seed,
        max_tokens,
        min_tokens: 4,
        logprobs: Some(3),
        ..Default::default()
    }
}

#[test]
fn a_seeded_request_gives_the_same_alone_batched_and_after_preemption() {
    let (_directory, path) = Tiny::default().write();
    // One device per run is compared with itself, where decode and prefill share their sums: bit for bit on the CPU. On a
    // GPU a preempted token moves from decode to prefill attention, so only the unpreempted runs must be equal.
    let gpu = support::gpu();
    let mut make: BTreeMap<&str, MakeRunner<'_>> = BTreeMap::new();
    make.insert("cpu", Box::new(|| on_cpu(&path, KV_TOKENS)));
    if let Some(gpu) = &gpu {
        make.insert("wgpu f32", Box::new(|| on_gpu(gpu, &path, KV_TOKENS, Activations::F32)));
    }
    let run = |make: &MakeRunner<'_>, only: Option<u64>, num_blocks: usize, budget: usize| {
        let mut driven = Driven::new(make(), &path, num_blocks, budget);
        for id in (0..5).filter(|id| only.is_none_or(|only| only == *id)) {
            let params = SamplingParams { ignore_eos: true, ..elaborate(id + 40, 30 + id as usize) };
            driven.add(id, prompt(20 + 11 * id as usize, id as u32), params);
        }
        let tokens = driven.finish(5);
        (tokens, driven.engine.scheduler().counters().num_preemptions)
    };
    for (name, make) in &make {
        let (together, _) = run(make, None, 128, 640);
        for id in 0..5u64 {
            let (alone, _) = run(make, Some(id), 128, 640);
            assert_eq!(alone[id as usize], together[id as usize], "{name}: request {id}");
        }
        let (squeezed, preemptions) = run(make, None, 12, 64);
        assert!(preemptions > 0, "{name}: 12 blocks are too few for all");
        if *name == "cpu" {
            assert_eq!(squeezed, together, "{name}: with {preemptions} preemptions");
        }
    }
}

#[test]
fn cpu_and_wgpu_draw_the_same_tokens_from_the_same_seed() {
    let Some(gpu) = support::gpu() else { return };
    let (_directory, path) = Tiny::default().write();
    let tokens = |runner| {
        let mut driven = Driven::new(runner, &path, 64, 640);
        for id in 0..8 {
            driven.add(id, prompt(30, id as u32), SamplingParams { ignore_eos: true, ..elaborate(id, 24) });
        }
        driven.finish(8)
    };
    let cpu = tokens(on_cpu(&path, KV_TOKENS));
    let wgpu = tokens(on_gpu(&gpu, &path, KV_TOKENS, Activations::F32));
    // A draw can fall on a boundary between two tokens that rounding moves: after it, the answers go their own ways.
    let same = cpu.iter().zip(&wgpu).filter(|(cpu, wgpu)| cpu == wgpu).count();
    assert!(same >= 7, "{same} of 8 answers are equal");
}

#[test]
fn a_cached_prefix_changes_no_token() {
    let (_directory, path) = Tiny::default().write();
    for (name, runner) in runners(&path) {
        let mut driven = Driven::new(runner, &path, KV_TOKENS / BLOCK_SIZE, 640);
        let shared = prompt(100, 3);
        let mut other = shared[..70].to_vec();
        other.extend(prompt(40, 8));
        let params = SamplingParams { max_tokens: 20, ignore_eos: true, ..Default::default() };
        let mut answer = |prompt: &[u32]| {
            driven.add(0, prompt.to_vec(), params.clone());
            let before = driven.engine.scheduler().counters().num_hit_tokens;
            let tokens = driven.finish(1).remove(0);
            (tokens, driven.engine.scheduler().counters().num_hit_tokens - before)
        };
        let (cold, none) = answer(&shared);
        let (warm, hit) = answer(&shared);
        assert_eq!((none, hit, &cold), (0, 96, &warm), "{name}");
        let (warm, hit) = answer(&other);
        assert_eq!(hit, 64, "{name}");
        let mut fresh = Driven::new(runners(&path).into_iter().find(|(n, _)| *n == name).unwrap().1, &path, 128, 640);
        fresh.add(0, other, params.clone());
        assert_eq!(fresh.finish(1)[0], warm, "{name}");
    }
}

#[test]
fn prompt_logprobs_are_those_of_the_tokens_whatever_the_chunks() {
    let (_directory, path) = Tiny::default().write();
    let prompt = prompt(50, 4);
    for (name, mut runner) in runners(&path) {
        let mut fed = Fed::in_order(64);
        let expected: Vec<f64> = prompt
            .windows(2)
            .map(|pair| {
                let logits = logits_of(fed.feed(runner.as_mut(), &pair[..1], false, Choice::Logits));
                let (logit, log_sum, _) = shaders::reference::token_logprobs(&logits, pair[1]);
                logit - log_sum
            })
            .collect();
        let mut driven = Driven::new(runner, &path, 64, 640);
        let params = SamplingParams { prompt_logprobs: Some(2), max_tokens: 2, ..Default::default() };
        driven.add(0, prompt.clone(), params);
        let first = std::iter::from_fn(|| Some(driven.step())).flatten().next().unwrap();
        let EngineEvent::Prompt { num_cached_tokens: 0, logprobs } = first.1 else { panic!("{name}: {first:?}") };
        let tokens: Vec<u32> = logprobs.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, prompt[1..], "{name}");
        for ((_, got), expected) in logprobs.iter().zip(&expected) {
            assert!(
                (f64::from(got.logprob) - expected).abs() < 1e-3 && got.top.len() == 2,
                "{name}: {got:?} {expected}"
            );
        }
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
    let mut driven = Driven::new(runner, path, 64, 64);
    for (id, temperature) in [(0, 0.0), (1, 1.0)] {
        driven.add(id, prompt(5, 1 + id as u32), SamplingParams { temperature, ..Default::default() });
    }
    let failed = |id| (RequestId(id), EngineEvent::Failed(RequestError::NotANumber));
    assert_eq!(driven.step(), vec![failed(0), failed(1)], "{name}");
    let scheduler = driven.engine.scheduler();
    assert!(scheduler.is_idle() && scheduler.blocks().num_free_blocks() == 64, "{name}");
    driven.add(2, prompt(5, 1), SamplingParams::default());
    assert_eq!(driven.step(), vec![failed(2)], "{name}: goes on");
}

#[test]
fn a_lost_device_is_an_error_and_never_tokens() {
    let Some(gpu) = support::gpu() else { return };
    let (_directory, path) = Tiny::default().write();
    let mut runner = on_gpu(&gpu, &path, KV_TOKENS, Activations::F32);
    let mut input = ModelInput::default();
    input.push(&prompt(20, 1), 0, &[0, 1], BLOCK_SIZE);
    input.select_last(Choice::Greedy);
    assert!(matches!(runner.run(&input).unwrap()[0], Selected::Token(..)));
    gpu.lose();
    let error = runner.run(&input).unwrap_err();
    assert!(matches!(error, DeviceError::Lost(_) | DeviceError::Refused { .. }), "{error}");
    assert!(runner.run(&input).is_err(), "a failed device stays failed");
}
