//! The CPU's matrix product by number of tokens, at the default model's output matrix: `cargo bench --bench cpu_matmul`.

#[path = "../tests/support/mod.rs"]
mod support;

use divan::Bencher;
use divan::counter::ItemsCount;
use engine::batch::{Choice, ModelInput};
use engine::kv::{BLOCK_SIZE, KvCacheDtype, KvLayout};
use engine::model::PairOrder;
use engine::model_file::StorageType;
use engine::ops::cpu::{CpuOps, use_threads};
use engine::ops::{Ops, Rows, Write};

fn main() {
    use_threads(2).unwrap();
    divan::main();
}

/// `items/s` are multiply-adds.
#[divan::bench(args = [1, 2, 4, 8, 16, 32, 128])]
fn q4_1(bencher: Bencher<'_, '_>, tokens: usize) {
    product(bencher, StorageType::Q4_1, tokens);
}

#[divan::bench(args = [1, 4, 16])]
fn q8_0(bencher: Bencher<'_, '_>, tokens: usize) {
    product(bencher, StorageType::Q8_0, tokens);
}

fn product(bencher: Bencher<'_, '_>, storage: StorageType, tokens: usize) {
    let (rows, columns) = (12_288, 576);
    let layout = KvLayout {
        num_layers: 1,
        num_blocks: 32,
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 64,
        block_size: BLOCK_SIZE,
        dtype: KvCacheDtype::F16,
    };
    let mut ops = CpuOps::new(layout, Vec::new(), PairOrder::Halves).unwrap();
    let matrix = ops.matrix(&[support::gguf_writer::random_tensor(storage, rows, columns, 1)]).unwrap();
    let mut input = ModelInput::default();
    let blocks: Vec<u32> = (0..32).collect();
    input.push(&vec![0; tokens], 0, &blocks, BLOCK_SIZE);
    input.select_last(Choice::Greedy);
    ops.begin(&input).unwrap();
    let mut x = ops.buffer(tokens, columns).unwrap();
    x.values_mut().copy_from_slice(&support::gguf_writer::random(tokens * columns, 2));
    let mut y = ops.buffer(tokens, rows).unwrap();
    bencher
        .counter(ItemsCount::new(rows * columns * tokens))
        .bench_local(|| ops.linear(&x, &matrix, &mut y, Write::Store, Rows::Step).unwrap());
}
