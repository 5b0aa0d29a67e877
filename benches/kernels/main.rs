//! Every kernel at the default model's shapes on the software GPU: `cargo bench --bench kernels`.
//!
//! An iteration records a dispatch ten times, submits once and waits. `items/s` are multiply-adds, or values where a
//! kernel multiplies nothing. The device's own plan is benched, so the matrix kernels run the variant that it would use.

#[path = "../../tests/support/mod.rs"]
mod support;

mod act_and_mul;
mod add_bias;
mod adjust_logits;
mod argmax;
mod embedding;
mod gather_blocks;
mod gather_rows;
mod matmul;
mod matmul_int8;
mod matmul_tiled;
mod paged_attention_decode;
mod paged_attention_prefill;
mod paged_attention_reduce;
mod quantize_activations;
mod rms_norm;
mod rotate_and_cache;
mod sample;
mod scatter_blocks;
mod soft_cap;
mod token_logprobs;
mod top_k;

use divan::Bencher;
use divan::counter::ItemsCount;
use engine::kernels::{Encoder, Gpu, GpuBuffer, Plan};
use engine::kv::{KvCacheDtype, KvLayout};
use std::sync::{Arc, OnceLock};

/// The default model's widths.
pub const HIDDEN: u32 = 576;
pub const INNER: u32 = 1536;
pub const VOCAB: u32 = 49_152;
pub const HEADS: u32 = 9;
pub const KV_HEADS: u32 = 3;
pub const HEAD_DIM: u32 = 64;
/// Rows of a prefill.
pub const TOKENS: u32 = 128;
/// Tokens in the cache.
pub const CONTEXT: u32 = 512;

const DISPATCHES: u64 = 10;

fn main() {
    divan::main();
}

/// The device and a recorder.
pub struct Fixture {
    pub gpu: Arc<Gpu>,
    pub encoder: Encoder,
    pub plan: Plan,
}

static GPU: OnceLock<Arc<Gpu>> = OnceLock::new();

impl Fixture {
    pub fn start() -> Self {
        let gpu = Arc::clone(GPU.get_or_init(|| support::gpu().expect("a software Vulkan adapter")));
        let plan = Plan::choose(gpu.info.traits);
        Self { encoder: Encoder::new(Arc::clone(&gpu), u64::MAX), gpu, plan }
    }

    /// A buffer of this many zero words.
    pub fn words(&self, len: u32) -> GpuBuffer {
        self.upload(&vec![0u32; len as usize])
    }

    pub fn upload<T: bytemuck::Pod>(&self, values: &[T]) -> GpuBuffer {
        self.gpu.upload("bench", bytemuck::cast_slice(values)).unwrap()
    }

    /// The default model's cache of one layer, and a block table of one sequence.
    pub fn layout(&self) -> KvLayout {
        KvLayout {
            num_layers: 1,
            num_blocks: (CONTEXT / 16) as usize,
            num_heads: HEADS as usize,
            num_kv_heads: KV_HEADS as usize,
            head_dim: HEAD_DIM as usize,
            block_size: 16,
            dtype: KvCacheDtype::F16,
        }
    }

    pub fn block_table(&self) -> GpuBuffer {
        self.upload(&(0..CONTEXT / 16).collect::<Vec<u32>>())
    }

    /// Times `record`, which does `items` of work.
    pub fn time(mut self, bencher: Bencher<'_, '_>, items: u64, record: impl Fn(&mut Encoder, &Plan)) {
        bencher.counter(ItemsCount::new(items * DISPATCHES)).bench_local(|| {
            for _ in 0..DISPATCHES {
                record(&mut self.encoder, &self.plan);
            }
            self.encoder.submit().unwrap();
            self.gpu.wait().unwrap();
        });
    }
}
