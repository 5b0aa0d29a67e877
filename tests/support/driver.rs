//! Drives a model runner by hand: a sequence with its own block table, prefilled in chunks and decoded token by token.

use engine::batch::{Choice, ModelInput, Selected, Selection};
use engine::config::EngineConfig;
use engine::device::DeviceMemory;
use engine::kernels::{Activations, Gpu};
use engine::kv::{BLOCK_SIZE, KvCacheDtype, KvLayout};
use engine::model::ModelConfig;
use engine::model_file::ModelFile;
use engine::model_runner::{StepRunner, cpu_runner, wgpu_runner};
use engine::sizes::Sizes;
use std::path::Path;
use std::sync::Arc;

/// Settings of the runners in tests: a pool of `kv_tokens`.
pub fn config(path: &Path, kv_tokens: usize, dtype: KvCacheDtype) -> (EngineConfig, ModelFile, Sizes) {
    let file = ModelFile::open(path).unwrap();
    let model = ModelConfig::of(&file).unwrap();
    let mut config = EngineConfig::new(path.to_owned(), "cpu");
    config.kv_cache_dtype = dtype;
    config.kv_cache_bytes = Some(KvLayout::new(&model, dtype, kv_tokens / BLOCK_SIZE).total_bytes());
    config.max_num_seqs = 8;
    config.max_num_batched_tokens = 640;
    let sizes = Sizes::choose(model, &config, &DeviceMemory::default()).unwrap();
    (config, file, sizes)
}

/// The model on the CPU.
pub fn on_cpu(path: &Path, kv_tokens: usize) -> Box<dyn StepRunner> {
    on_cpu_with(path, kv_tokens, KvCacheDtype::F16)
}

/// The model on the CPU with a cache of this type.
pub fn on_cpu_with(path: &Path, kv_tokens: usize, dtype: KvCacheDtype) -> Box<dyn StepRunner> {
    let (config, file, sizes) = config(path, kv_tokens, dtype);
    Box::new(cpu_runner(&file, &sizes, &config, &mut |_, _| {}).unwrap())
}

/// The model on a GPU, with these activations.
pub fn on_gpu(gpu: &Arc<Gpu>, path: &Path, kv_tokens: usize, activations: Activations) -> Box<dyn StepRunner> {
    on_gpu_with(gpu, path, kv_tokens, activations, KvCacheDtype::F16)
}

/// The model on a GPU, with these activations and a cache of this type.
pub fn on_gpu_with(
    gpu: &Arc<Gpu>,
    path: &Path,
    kv_tokens: usize,
    activations: Activations,
    dtype: KvCacheDtype,
) -> Box<dyn StepRunner> {
    let (mut config, file, sizes) = config(path, kv_tokens, dtype);
    config.activations = Some(activations);
    Box::new(wgpu_runner(Arc::clone(gpu), &file, &sizes, &config, &mut |_, _| {}).unwrap())
}

/// A sequence whose tokens are fed by the test.
pub struct Fed {
    /// Tokens computed so far.
    pub len: usize,
    /// Its physical blocks.
    pub blocks: Vec<u32>,
}

impl Fed {
    /// A sequence on these blocks.
    pub fn new(blocks: Vec<u32>) -> Self {
        Self { len: 0, blocks }
    }

    /// Blocks 0.. for `max_len` tokens.
    pub fn in_order(max_len: usize) -> Self {
        Self::new((0..max_len.div_ceil(BLOCK_SIZE) as u32).collect())
    }

    /// Computes `tokens`, as decode when `decode`, and makes `choice` for the last.
    pub fn feed(&mut self, runner: &mut dyn StepRunner, tokens: &[u32], decode: bool, choice: Choice) -> Selected {
        let row = tokens.len() - 1;
        self.select(runner, tokens, decode, Selection::plain(row, choice))
    }

    /// The same with a whole selection.
    pub fn select(
        &mut self,
        runner: &mut dyn StepRunner,
        tokens: &[u32],
        decode: bool,
        selection: Selection,
    ) -> Selected {
        let mut input = ModelInput { num_decodes: usize::from(decode), ..Default::default() };
        input.push(tokens, self.len, &self.blocks, BLOCK_SIZE);
        input.selections.push(selection);
        self.len += tokens.len();
        runner.run(&input).unwrap().remove(0)
    }

    /// Prefills `tokens` in chunks of `chunk` and returns the last logits.
    pub fn prefill(&mut self, runner: &mut dyn StepRunner, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut logits = Vec::new();
        for tokens in tokens.chunks(chunk) {
            logits = logits_of(self.feed(runner, tokens, false, Choice::Logits));
        }
        logits
    }
}

/// The logits of a selection that asked for them.
pub fn logits_of(selected: Selected) -> Vec<f32> {
    match selected {
        Selected::Logits(logits) => logits,
        other => panic!("wanted logits, got {other:?}"),
    }
}

/// The index of the largest value.
pub fn argmax(logits: &[f32]) -> u32 {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a))).unwrap() as u32
}

/// Greedy continuation of a prompt by `count` tokens, prefilled in chunks of `chunk`.
pub fn greedy(runner: &mut dyn StepRunner, sequence: &mut Fed, prompt: &[u32], chunk: usize, count: usize) -> Vec<u32> {
    let mut tokens = vec![argmax(&sequence.prefill(runner, prompt, chunk))];
    while tokens.len() < count {
        let last = tokens[tokens.len() - 1];
        match sequence.feed(runner, &[last], true, Choice::Greedy) {
            Selected::Token(token, _) => tokens.push(token),
            other => panic!("wanted a token, got {other:?}"),
        }
    }
    tokens
}
