//! The references that compute (norm, activation, products, rotation, attention) against NumPy: tests/golden/kernels.json,
//! made by make_kernels.py. The others select or round, and face cases by hand beside them.

mod support;

use serde_json::Value;
use shaders::reference::{self, CacheView, Chunk, HeadShape, Scale};
use support::gguf_writer::random;

fn assert_fixture(name: &str, got: &[f64]) {
    let fixture: Value = serde_json::from_str(include_str!("golden/kernels.json")).unwrap();
    let expected: Vec<f64> = fixture[name].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    assert_eq!(got.len(), expected.len(), "{name}");
    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
        // Rotations enter as f32, so their last digits differ.
        assert!((got - expected).abs() < 1e-6, "{name}: element {index} is {got}, NumPy has {expected}");
    }
}

#[test]
fn references_agree_with_numpy() {
    assert_fixture("rms_norm", &reference::rms_norm(&random(24, 1), &random(8, 2), 1e-5));
    let gate_up = [random(12, 3), random(12, 4)].concat();
    assert_fixture("silu_and_mul", &reference::act_and_mul(&gate_up, 12, false));
    assert_fixture("gelu_and_mul", &reference::act_and_mul(&gate_up, 12, true));
    assert_fixture("matmul", &reference::matmul(&random(40, 5), &random(16, 6), 8, None));
    let rotations = [0.5f32, 0.25, 1.0, 0.5].map(|angle| [angle.cos(), angle.sin()]);
    // One query head, one key head, one value head of four values, two tokens.
    let shape = HeadShape { num_heads: 1, num_kv_heads: 1, head_dim: 4, pair_stride: 1 };
    let qkv: Vec<f32> = random(16, 7).chunks(8).flat_map(|heads| [heads, &[0.0; 4]].concat()).collect();
    let [query, key, _] = reference::rotate_and_cache(&qkv, &rotations, None, shape);
    let both: Vec<f64> = query.chunks(4).zip(key.chunks(4)).flat_map(|(query, key)| [query, key].concat()).collect();
    assert_fixture("rotary_embedding", &both);
}

#[test]
fn attention_references_agree_with_numpy_through_shuffled_blocks() {
    let (key, value) = (random(7 * 2 * 4, 9), random(7 * 2 * 4, 10));
    // Blocks of two tokens: logical block i lies in physical block table[i].
    let table = [2u32, 0, 3, 1];
    let paged = |values: &[f32]| {
        let mut cache = vec![f32::NAN; 4 * 2 * 2 * 4];
        for token in 0..7 {
            for head in 0..2 {
                let block = table[token / 2] as usize;
                let to = ((block * 2 + head) * 2 + token % 2) * 4;
                cache[to..to + 4].copy_from_slice(&values[(token * 2 + head) * 4..][..4]);
            }
        }
        cache
    };
    let (key, value) = (paged(&key), paged(&value));
    let view = CacheView { key: &key, value: &value, num_kv_heads: 2, head_dim: 4, block_size: 2 };
    let query = random(3 * 4 * 4, 8);
    let chunk = Chunk { row: 0, query_len: 3, context_len: 7, block_table: &table };
    assert_fixture(
        "paged_attention",
        &reference::paged_attention_prefill(&query, view, &[chunk], 4, Scale::plain(0.5)),
    );
    // The same by splits of three tokens, one query as a decode.
    let decoded: Vec<f64> = (0..3)
        .flat_map(|row| {
            let visible = 5 + row;
            let splits: Vec<(usize, usize, usize)> =
                (0..visible).step_by(3).map(|first| (0, first, (first + 3).min(visible))).collect();
            let query = &query[row * 16..][..16];
            let partials = reference::paged_attention_decode(query, view, &[&table], &splits, 4, Scale::plain(0.5));
            reference::paged_attention_reduce(&partials, &[0, splits.len()], 4)
        })
        .collect();
    assert_fixture("paged_attention", &decoded);
}
