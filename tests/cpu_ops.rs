//! The `cpu` ops against the kernels' f64 references and against burn-flex, with the kernels' edge shapes and poison.

mod support;

use burn::tensor::{Device, Tensor, TensorData, activation};
use engine::batch::{Choice, ModelInput, Selected, Selection};
use engine::gguf::{StorageType, Tensor as Stored};
use engine::kv::{BLOCK_SIZE, KvLayout};
use engine::ops::cpu::{Buffer, CpuOps};
use engine::ops::rotary::Rotary;
use engine::ops::{Ops, Rows, Write};
use shaders::reference::{self, CacheView, Chunk};
use support::gguf_writer::{random, random_tensor};

const HEAD_DIM: usize = 64;
/// No result of a test.
const SENTINEL: f32 = -12_345.678;

fn layout(num_heads: usize, num_kv_heads: usize, head_dim: usize, num_blocks: usize) -> KvLayout {
    KvLayout { num_layers: 1, num_blocks, num_heads, num_kv_heads, head_dim, block_size: BLOCK_SIZE }
}

fn ops(layout: KvLayout) -> CpuOps {
    CpuOps::new(layout, Rotary::new(10_000.0, HEAD_DIM, 1.0, None)).unwrap()
}

/// A step of `rows` tokens of one sequence.
fn begin(ops: &mut CpuOps, rows: usize) {
    let mut input = ModelInput::default();
    let blocks: Vec<u32> = (0..rows.div_ceil(BLOCK_SIZE) as u32).collect();
    let tokens: Vec<u32> = (0..rows as u32).map(|i| i * 7 % 50).collect();
    input.push(&tokens, 0, &blocks, BLOCK_SIZE);
    input.select_last(Choice::Greedy);
    ops.begin(&input).unwrap();
}

fn buffer(ops: &mut CpuOps, rows: usize, width: usize, values: &[f32]) -> Buffer {
    let mut buffer = ops.buffer(rows, width).unwrap();
    buffer.values_mut()[..values.len()].copy_from_slice(values);
    buffer
}

fn assert_close(label: &str, got: &[f32], expected: &[f64], abs: f64) {
    assert_eq!(got.len(), expected.len(), "{label}");
    for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let bound = abs + 1e-4 * expected.abs();
        assert!((f64::from(got) - expected).abs() <= bound, "{label}: element {index} is {got}, should be {expected}");
    }
}

fn flex(values: &[f32], rows: usize) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [rows, values.len() / rows]), &Device::flex())
}

fn to_f64(tensor: Tensor<2>) -> Vec<f64> {
    tensor.into_data().try_to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn product(tensor: &Stored, input: &[f32], write: Write, previous: &[f32]) -> Vec<f32> {
    let rows = input.len() / tensor.columns;
    let mut ops = ops(layout(1, 1, HEAD_DIM, 16));
    begin(&mut ops, rows);
    let x = buffer(&mut ops, rows, tensor.columns, input);
    let mut out = buffer(&mut ops, rows, tensor.rows, previous);
    let matrix = ops.matrix(tensor).unwrap();
    ops.linear(&x, &matrix, &mut out, write, Rows::Step).unwrap();
    out.values_mut().to_vec()
}

#[test]
fn linear_matches_the_reference_and_burn_flex_for_every_storage_type() {
    for storage in StorageType::ALL {
        for (rows, columns, tokens) in [(1, 32, 1), (65, 96, 1), (65, 96, 3), (192, 576, 17)] {
            let tensor = random_tensor(storage, rows, columns, 1);
            let (input, previous) = (random(tokens * columns, 2), random(tokens * rows, 3));
            let dense = tensor.to_f32();
            let label = format!("{storage:?} {rows}x{columns}, {tokens} tokens");
            let got = product(&tensor, &input, Write::Store, &previous);
            assert_close(&label, &got, &reference::matmul(&dense, &input, columns, None), 2e-4);
            let oracle = to_f64(flex(&input, tokens).matmul(flex(&dense, rows).transpose()));
            assert_close(&format!("{label}, burn-flex"), &got, &oracle, 2e-4);
            let got = product(&tensor, &input, Write::Accumulate, &previous);
            assert_close(&label, &got, &reference::matmul(&dense, &input, columns, Some(&previous)), 2e-4);
            let alone = product(&tensor, &input[..columns], Write::Store, &previous[..rows]);
            assert_eq!(alone, product(&tensor, &input, Write::Store, &previous)[..rows], "{label}: bits");
        }
    }
}

#[test]
fn embedding_norm_and_activation_match_their_references() {
    let mut ops = ops(layout(1, 1, HEAD_DIM, 16));
    let tokens = 33;
    begin(&mut ops, tokens);
    for storage in StorageType::ALL {
        let table = random_tensor(storage, 50, 96, 4);
        let mut out = ops.buffer(tokens, 96).unwrap();
        let matrix = ops.matrix(&table).unwrap();
        ops.embedding(&matrix, &mut out).unwrap();
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 50).collect();
        assert_close("embedding", out.values_mut(), &reference::embedding(&table.to_f32(), &ids, 96), 1e-6);
    }
    for width in [32, 100, 576] {
        let (values, weight) = (random(tokens * width, 5), random(width, 6));
        let x = buffer(&mut ops, tokens, width, &values);
        let mut out = ops.buffer(tokens, width).unwrap();
        ops.rms_norm(&x, &weight, 1e-5, &mut out, Rows::Step).unwrap();
        assert_close("rms_norm", out.values_mut(), &reference::rms_norm(&values, &weight, 1e-5), 1e-5);
    }
    let (gate, up) = (random(tokens * 96, 7), random(tokens * 96, 8));
    let mut out = buffer(&mut ops, tokens, 96, &gate);
    let up_buffer = buffer(&mut ops, tokens, 96, &up);
    ops.silu_and_mul(&mut out, &up_buffer).unwrap();
    assert_close("silu_and_mul", out.values_mut(), &reference::silu_and_mul(&gate, &up), 1e-6);
    let oracle = to_f64(activation::silu(flex(&gate, tokens)) * flex(&up, tokens));
    assert_close("silu_and_mul, burn-flex", out.values_mut(), &oracle, 1e-5);
}

#[test]
fn selections_match_their_references() {
    let width = 300;
    let mut values = random(width * 5, 13);
    // Ties, infinities, few distinct values, a NaN.
    values[width] = 5.0;
    values[2 * width - 1] = 5.0;
    values[2 * width] = f32::NEG_INFINITY;
    values[3 * width - 1] = f32::INFINITY;
    values[3 * width..4 * width].iter_mut().for_each(|value| *value = (*value * 4.0).round());
    values[4 * width + 77] = f32::NAN;
    let mut ops = ops(layout(1, 1, HEAD_DIM, 16));
    for k in [1, 40, width] {
        let mut input = ModelInput::default();
        for row in 0..5 {
            input.push(&[1], 0, &[row], BLOCK_SIZE);
            let selection = Selection::plain(row as usize, Choice::Greedy);
            input.selections.push(Selection { num_logprobs: Some(k), ..selection });
        }
        ops.begin(&input).unwrap();
        let hidden = buffer(&mut ops, 5, width, &values);
        let mut logits = ops.buffer(5, width).unwrap();
        ops.gather_rows(&hidden, &mut logits).unwrap();
        let got = ops.select(&logits).unwrap();
        let best = reference::argmax(&values, width);
        let top = reference::top_k(&values, width, k);
        for (row, ((got, best), top)) in got.into_iter().zip(best).zip(top).enumerate() {
            let (Some((best, _)), Some(top)) = (best, top) else {
                assert_eq!(got, Selected::NotANumber, "row {row}");
                continue;
            };
            let Selected::Token(token, Some(logprob)) = got else { panic!("row {row}: {got:?}") };
            let tokens = |pairs: &[(u32, f32)]| pairs.iter().map(|(token, _)| *token).collect::<Vec<_>>();
            assert_eq!((token, logprob.rank, tokens(&logprob.top)), (best, 1, tokens(&top)), "row {row}");
        }
    }
}

#[test]
fn rotation_matches_its_reference() {
    let mut ops = ops(layout(3, 3, HEAD_DIM, 16));
    let tokens = 40;
    begin(&mut ops, tokens);
    let values = random(tokens * 3 * HEAD_DIM, 9);
    let mut out = buffer(&mut ops, tokens, 3 * HEAD_DIM, &values);
    ops.rotary_embedding(&mut out, 3).unwrap();
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let table = Rotary::new(10_000.0, HEAD_DIM, 1.0, None).table(&positions);
    assert_close("rotary", out.values_mut(), &reference::rotary_embedding(&table, &values, 3, HEAD_DIM, 1), 1e-5);
}

/// Attention of one step over keys and values written in earlier steps and this one, in scattered blocks beside poison.
#[test]
fn paged_attention_matches_the_reference_over_scattered_poisoned_blocks() {
    for heads in [[1, 1, 64], [4, 1, 64], [9, 3, 64], [8, 1, 128]] {
        for (cached, query_len) in [(0, 1), (0, 15), (0, 33), (15, 1), (16, 1), (31, 70), (100, 16)] {
            for poison in [f32::NAN, 60_000.0] {
                attention_case(heads, cached, query_len, poison);
            }
        }
    }
}

fn attention_case([num_heads, num_kv_heads, head_dim]: [usize; 3], cached: usize, query_len: usize, poison: f32) {
    let num_blocks = 23;
    let mut ops = ops(layout(num_heads, num_kv_heads, head_dim, num_blocks));
    let (width, kv_width) = (num_heads * head_dim, num_kv_heads * head_dim);
    let context_len = cached + query_len;
    let table: Vec<u32> = (0..context_len.div_ceil(BLOCK_SIZE) as u32).map(|block| (block * 7 + 3) % 23).collect();
    // Poison into every slot, then the real tokens into theirs.
    let all: Vec<u32> = (0..num_blocks as u32).collect();
    let poisoned = vec![poison; num_blocks * BLOCK_SIZE * kv_width];
    write_tokens(&mut ops, &all, 0, num_blocks * BLOCK_SIZE, &poisoned, &poisoned);
    let (key, value) = (random(context_len * kv_width, 10), random(context_len * kv_width, 11));
    if cached > 0 {
        write_tokens(&mut ops, &table, 0, cached, &key[..cached * kv_width], &value[..cached * kv_width]);
    }
    write_tokens(&mut ops, &table, cached, query_len, &key[cached * kv_width..], &value[cached * kv_width..]);
    let query = random(query_len * width, 12);
    let query_buffer = buffer(&mut ops, query_len, width, &query);
    // A row past the step's, and a sentinel in every one.
    let mut out = buffer(&mut ops, query_len + 1, width, &vec![SENTINEL; (query_len + 1) * width]);
    ops.paged_attention(0, &query_buffer, &mut out).unwrap();
    let (got, guard) = out.values_mut().split_at(query_len * width);
    assert!(guard.iter().all(|&value| value == SENTINEL), "wrote past the step's rows");
    let got = got.to_vec();
    // The reference reads a cache in order: block i holds tokens 16·i on.
    let rounded = |values: &[f32]| -> Vec<f32> {
        let mut cache = vec![half::f16::ZERO; context_len.next_multiple_of(BLOCK_SIZE) * kv_width];
        let slots: Vec<u32> = (0..context_len as u32).collect();
        reference::reshape_and_cache(values, &slots, &mut cache, num_kv_heads, head_dim, BLOCK_SIZE);
        cache.into_iter().map(half::f16::to_f32).collect()
    };
    let (key, value) = (rounded(&key), rounded(&value));
    let view = CacheView { key: &key, value: &value, num_kv_heads, head_dim, block_size: BLOCK_SIZE };
    let in_order: Vec<u32> = (0..table.len() as u32).collect();
    let chunk = Chunk { row: 0, query_len, context_len, block_table: &in_order };
    let expected =
        reference::paged_attention_prefill(&query, view, &[chunk], num_heads, 1.0 / (head_dim as f64).sqrt());
    let label =
        format!("{num_heads}/{num_kv_heads} heads of {head_dim}, poison {poison}, {query_len} queries after {cached}");
    assert_close(&label, &got, &expected, 2e-5);
}

fn write_tokens(ops: &mut CpuOps, table: &[u32], start: usize, count: usize, key: &[f32], value: &[f32]) {
    let mut input = ModelInput::default();
    input.push(&vec![0; count], start, table, BLOCK_SIZE);
    ops.begin(&input).unwrap();
    let width = key.len() / count;
    let (key, value) = (buffer(ops, count, width, key), buffer(ops, count, width, value));
    ops.reshape_and_cache(0, &key, &value).unwrap();
}
