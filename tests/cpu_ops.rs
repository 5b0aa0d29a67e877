//! The `cpu` ops against the kernels' f64 references and against burn-flex, with the kernels' edge shapes and poison.

mod support;

use burn::tensor::{Device, Tensor, TensorData, activation};
use engine::batch::{Choice, ModelInput, Selected, Selection};
use engine::kv::{BLOCK_SIZE, KvCacheDtype, KvLayout};
use engine::model::{Activation, PairOrder, RotaryConfig};
use engine::model_file::{StorageType, Tensor as Stored};
use engine::ops::cpu::{Buffer, CpuOps};
use engine::ops::rotary::Rotary;
use engine::ops::{Attention, Ops, Rows, Write};
use shaders::reference::{self, CacheView, Chunk, HeadShape, Scale};
use support::gguf_writer::{random, random_tensor};

const HEAD_DIM: usize = 64;
/// No result of a test.
const SENTINEL: f32 = -12_345.678;

fn layout(num_heads: usize, num_kv_heads: usize, head_dim: usize, num_blocks: usize) -> KvLayout {
    KvLayout {
        num_layers: 1,
        num_blocks,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size: BLOCK_SIZE,
        dtype: KvCacheDtype::F16,
    }
}

fn ops(layout: KvLayout) -> CpuOps {
    let rotary = Rotary::new(&RotaryConfig::plain(10_000.0, HEAD_DIM), 10_000);
    CpuOps::new(layout, vec![rotary], PairOrder::Neighbours).unwrap()
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
    let matrix = ops.matrix(std::slice::from_ref(tensor)).unwrap();
    ops.linear(&x, &matrix, &mut out, write, Rows::Step).unwrap();
    out.values_mut().to_vec()
}

#[test]
fn linear_matches_the_reference_and_burn_flex_for_every_storage_type() {
    for storage in StorageType::ALL {
        for (rows, columns, tokens) in [(1, 32, 1), (65, 96, 1), (65, 96, 3), (192, 576, 17), (65, 512, 5)] {
            if storage.row_bytes(columns).is_none() {
                continue;
            }
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
        let width = storage.block_len().max(96) / 32 * 32;
        let table = random_tensor(storage, 50, width, 4);
        let mut out = ops.buffer(tokens, width).unwrap();
        let matrix = ops.matrix(std::slice::from_ref(&table)).unwrap();
        ops.embedding(&matrix, 1.0, &mut out).unwrap();
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 50).collect();
        let expected = reference::embedding(&table.to_f32(), &ids, width);
        assert_close("embedding", out.values_mut(), &expected, 1e-6);
        ops.embedding(&matrix, 2.0, &mut out).unwrap();
        let doubled: Vec<f64> = expected.iter().map(|value| value * 2.0).collect();
        assert_close("embedding, scaled", out.values_mut(), &doubled, 1e-6);
    }
    for width in [32, 100, 576] {
        let (values, weight) = (random(tokens * width, 5), random(width, 6));
        let x = buffer(&mut ops, tokens, width, &values);
        let mut out = ops.buffer(tokens, width).unwrap();
        let expected = reference::rms_norm(&values, &weight, 1e-5);
        ops.rms_norm(&x, &weight, 1e-5, &mut out, Write::Store, Rows::Step).unwrap();
        assert_close("rms_norm", out.values_mut(), &expected, 1e-5);
        ops.rms_norm(&x, &weight, 1e-5, &mut out, Write::Accumulate, Rows::Step).unwrap();
        let twice: Vec<f64> = expected.iter().map(|value| value * 2.0).collect();
        assert_close("rms_norm, accumulated", out.values_mut(), &twice, 1e-5);
    }
    let (gate, up) = (random(tokens * 96, 7), random(tokens * 96, 8));
    let both: Vec<f32> = gate.chunks(96).zip(up.chunks(96)).flat_map(|(gate, up)| [gate, up].concat()).collect();
    let gate_up = buffer(&mut ops, tokens, 192, &both);
    let mut out = ops.buffer(tokens, 96).unwrap();
    let oracles = [
        (Activation::Silu, activation::silu(flex(&gate, tokens)) * flex(&up, tokens)),
        (Activation::Gelu, activation::gelu_approximate(flex(&gate, tokens)) * flex(&up, tokens)),
    ];
    for (activation, oracle) in oracles {
        ops.act_and_mul(&gate_up, activation, &mut out).unwrap();
        let expected = reference::act_and_mul(&both, 96, activation == Activation::Gelu);
        assert_close("act_and_mul", out.values_mut(), &expected, 1e-6);
        assert_close("act_and_mul, burn-flex", out.values_mut(), &to_f64(oracle), 1e-5);
    }
    let (bias, values) = (random(96, 20), random(tokens * 96, 21));
    let mut out = buffer(&mut ops, tokens, 96, &values);
    ops.add_bias(&mut out, &bias).unwrap();
    assert_close("add_bias", out.values_mut(), &reference::add_bias(&bias, &values), 1e-6);
    let mut logits = buffer(&mut ops, 1, 96, &values[..96]);
    ops.soft_cap(&mut logits, 0.5).unwrap();
    assert_close("soft_cap", logits.values_mut(), &reference::soft_cap(&values[..96], 0.5), 1e-6);
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
fn heads_are_normalised_and_rotated_as_their_reference_says() {
    let (num_heads, num_kv_heads, tokens) = (4, 2, 40);
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let rotary = Rotary::new(&RotaryConfig::plain(10_000.0, 48), 10_000);
    let rotations = rotary.table(&positions);
    let qkv = random(tokens * (num_heads + 2 * num_kv_heads) * HEAD_DIM, 9);
    let weights = random(2 * HEAD_DIM, 10);
    for (pair_order, pair_stride) in [(PairOrder::Neighbours, 1), (PairOrder::Halves, 24)] {
        for norms in [None, Some((&weights, 1e-6f32))] {
            let layout = layout(num_heads, num_kv_heads, HEAD_DIM, 16);
            let mut ops = CpuOps::new(layout, vec![rotary.clone()], pair_order).unwrap();
            begin(&mut ops, tokens);
            let source = buffer(&mut ops, tokens, qkv.len() / tokens, &qkv);
            let mut query = ops.buffer(tokens, num_heads * HEAD_DIM).unwrap();
            let attention = Attention { rotary: Some(0), ..Attention::plain(HEAD_DIM) };
            ops.rotate_and_cache(0, &attention, &source, norms, &mut query).unwrap();
            let shape = HeadShape { num_heads, num_kv_heads, head_dim: HEAD_DIM, pair_stride };
            let norms = norms.map(|(weights, eps)| (weights.as_slice(), f64::from(eps)));
            let [expected, key, value] = reference::rotate_and_cache(&qkv, &rotations, norms, shape);
            assert_close("queries", query.values_mut(), &expected, 1e-5);
            // What lies in the cache, by way of a query that weighs one token alone.
            ops.copy_blocks(&[0], &[]).unwrap();
            let block = ops.copied_out().unwrap().remove(0);
            let halves: Vec<f32> =
                block.chunks(2).map(|half| half::f16::from_le_bytes([half[0], half[1]]).to_f32()).collect();
            let (keys, values) = halves.split_at(halves.len() / 2);
            for (part, cached, expected) in [("keys", keys, &key), ("values", values, &value)] {
                for token in 0..BLOCK_SIZE {
                    for head in 0..num_kv_heads {
                        let got = &cached[(head * BLOCK_SIZE + token) * HEAD_DIM..][..HEAD_DIM];
                        let expected = &expected[(token * num_kv_heads + head) * HEAD_DIM..][..HEAD_DIM];
                        assert_close(part, got, expected, 2e-3);
                    }
                }
            }
        }
    }
}

/// Attention of one step over keys and values written in earlier steps and this one, in scattered blocks beside poison.
#[test]
fn paged_attention_matches_the_reference_over_scattered_poisoned_blocks() {
    for heads in [[1, 1, 64], [4, 1, 64], [9, 3, 64], [8, 1, 128]] {
        for (cached, query_len) in [(0, 1), (0, 15), (0, 33), (15, 1), (16, 1), (31, 70), (100, 16)] {
            for poison in [f32::NAN, 60_000.0] {
                for scale in [(0.0, 0), (30.0, 0), (0.0, 1), (5.0, 20)] {
                    attention_case(heads, cached, query_len, poison, scale);
                }
            }
        }
    }
}

fn attention_case(heads: [usize; 3], cached: usize, query_len: usize, poison: f32, (soft_cap, window): (f64, usize)) {
    let [num_heads, num_kv_heads, head_dim] = heads;
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
    let scale = Scale { factor: 1.0 / (head_dim as f64).sqrt(), soft_cap, window };
    let attention = Attention { window: window as u32, soft_cap: soft_cap as f32, ..Attention::plain(head_dim) };
    ops.paged_attention(0, &attention, &query_buffer, &mut out).unwrap();
    let (got, guard) = out.values_mut().split_at(query_len * width);
    assert!(guard.iter().all(|&value| value == SENTINEL), "wrote past the step's rows");
    let got = got.to_vec();
    // The reference reads a cache in order: block i holds tokens 16·i on.
    let rounded = |values: &[f32]| -> Vec<f32> {
        let mut cache = vec![half::f16::ZERO; context_len.next_multiple_of(BLOCK_SIZE) * kv_width];
        let slots: Vec<u32> = (0..context_len as u32).collect();
        for (token, head) in slots.iter().flat_map(|&token| (0..num_kv_heads).map(move |head| (token as usize, head))) {
            let source = (token * num_kv_heads + head) * head_dim;
            let block = (token / BLOCK_SIZE * num_kv_heads + head) * BLOCK_SIZE;
            let target = (block + token % BLOCK_SIZE) * head_dim;
            (0..head_dim).for_each(|i| cache[target + i] = half::f16::from_f32(values[source + i]));
        }
        cache.into_iter().map(half::f16::to_f32).collect()
    };
    let (key, value) = (rounded(&key), rounded(&value));
    let view = CacheView { key: &key, value: &value, num_kv_heads, head_dim, block_size: BLOCK_SIZE };
    let in_order: Vec<u32> = (0..table.len() as u32).collect();
    let chunk = Chunk { row: 0, query_len, context_len, block_table: &in_order };
    let expected = reference::paged_attention_prefill(&query, view, &[chunk], num_heads, scale);
    let label = format!("{heads:?} {scale:?}, poison {poison}, {query_len} queries after {cached}");
    assert_close(&label, &got, &expected, 2e-5);
}

fn write_tokens(ops: &mut CpuOps, table: &[u32], start: usize, count: usize, key: &[f32], value: &[f32]) {
    let mut input = ModelInput::default();
    input.push(&vec![0; count], start, table, BLOCK_SIZE);
    ops.begin(&input).unwrap();
    // Rows of keys and values; the queries before them are of no interest.
    let (num_heads, head_dim) = (ops.layout().num_heads, ops.layout().head_dim);
    let width = key.len() / count;
    let query = vec![0.0; num_heads * head_dim];
    let rows = key.chunks(width).zip(value.chunks(width));
    let qkv: Vec<f32> = rows.flat_map(|(key, value)| [&query, key, value].concat()).collect();
    let qkv = buffer(ops, count, qkv.len() / count, &qkv);
    let mut out = ops.buffer(count, num_heads * head_dim).unwrap();
    ops.rotate_and_cache(0, &Attention::plain(head_dim), &qkv, None, &mut out).unwrap();
}
