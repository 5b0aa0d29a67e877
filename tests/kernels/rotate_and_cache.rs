//! `rotate_and_cache.wgsl`: both pair orders, partial rotation and none, normalised heads; slots in any block order, f16
//! rounding, other slots untouched.

use crate::harness::{F32, Harness, SENTINEL};
use engine::kernels::{Plan, Turn, rotate_and_cache};
use engine::kv::KvLayout;
use engine::model::RotaryConfig;
use engine::ops::rotary::Rotary;
use half::f16;
use shaders::reference::{self, HeadShape};

const SLOTS: [u32; 5] = [5 * 16 + 15, 0, 2 * 16 + 3, 2 * 16 + 4, 16];
const NUM_BLOCKS: usize = 6;

pub fn test(harness: &mut Harness) {
    for plan in harness.plans.clone() {
        for (heads, kv_heads, head_dim, rotary_dim, halves) in [
            (1, 1, 8, 8, false),
            (9, 3, 64, 64, false),
            (3, 1, 64, 32, false),
            (3, 3, 64, 64, true),
            (2, 2, 128, 96, true),
            (4, 1, 256, 256, true),
            (4, 2, 64, 0, true),
        ] {
            let shape = HeadShape { num_heads: heads, num_kv_heads: kv_heads, head_dim, pair_stride: 1 };
            let shape = HeadShape { pair_stride: if halves { rotary_dim / 2 } else { 1 }, ..shape };
            for is_normed in [false, true] {
                check(harness, &plan, shape, rotary_dim, is_normed);
            }
        }
    }
}

fn check(harness: &mut Harness, plan: &Plan, shape: HeadShape, rotary_dim: usize, is_normed: bool) {
    let HeadShape { num_heads, num_kv_heads, head_dim, pair_stride } = shape;
    let layout = KvLayout { num_layers: 1, num_blocks: NUM_BLOCKS, num_heads, num_kv_heads, head_dim, block_size: 16 };
    let rotations = match rotary_dim {
        0 => Vec::new(),
        dim => Rotary::new(&RotaryConfig::plain(100_000.0, dim), 10_000).table(&[0, 1, 15, 16, 8191]),
    };
    let qkv = harness.random(SLOTS.len() * (num_heads + 2 * num_kv_heads) * head_dim);
    let weights = harness.random(2 * head_dim);
    let norms = is_normed.then_some((weights.as_slice(), 1e-6));
    let [query, key, value] = reference::rotate_and_cache(&qkv, &rotations, norms, shape);
    let words = NUM_BLOCKS * layout.block_values() / 2;
    let out = harness.output(SLOTS.len() * num_heads * head_dim);
    let (keys, values) = (harness.output(words), harness.output(words));
    let table = if rotations.is_empty() { vec![[0.0; 2]] } else { rotations.clone() };
    let (table, source, mapping) = (harness.upload(&table), harness.upload(&qkv), harness.upload(&SLOTS));
    let weights = harness.upload(&weights);
    let turn = Turn {
        rotations: &table,
        num_pairs: (rotary_dim / 2) as u32,
        pair_stride: pair_stride as u32,
        norms: is_normed.then_some((&weights, 1e-6)),
    };
    rotate_and_cache(
        &mut harness.encoder,
        plan,
        turn,
        &source,
        &mapping,
        &out.buffer,
        &keys.buffer,
        &values.buffer,
        &layout,
        SLOTS.len() as u32,
    )
    .unwrap();
    let label = format!("rotate_and_cache {shape:?} {rotary_dim} {is_normed}");
    harness.compare(&label, &out, &query, F32);
    for (part, expected, cache) in [("key", &key, &keys), ("value", &value, &values)] {
        let label = format!("{label} {part}");
        let got = harness.words(&label, cache);
        check_cache(&label, &layout, bytemuck::cast_slice(&got), expected);
        harness.num_comparisons += 1;
    }
}

/// Slots of the step hold its values within one unit of f16, the others what was there.
fn check_cache(label: &str, layout: &KvLayout, got: &[f16], expected: &[f64]) {
    let mut wanted: Vec<Option<f64>> = vec![None; got.len()];
    for (token, &slot) in SLOTS.iter().enumerate() {
        for head in 0..layout.num_kv_heads {
            let source = (token * layout.num_kv_heads + head) * layout.head_dim;
            let target = layout.slot_base(slot as usize, head);
            (0..layout.head_dim).for_each(|i| wanted[target + i] = Some(expected[source + i]));
        }
    }
    let untouched: [f16; 2] = bytemuck::cast(SENTINEL);
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        match wanted {
            None => assert_eq!(got.to_bits(), untouched[index % 2].to_bits(), "{label}: value {index} was touched"),
            Some(wanted) => {
                let bound = 1e-3 * wanted.abs() + 1e-5;
                assert!((got.to_f64() - wanted).abs() <= bound, "{label}: value {index} is {got}, should be {wanted}");
            }
        }
    }
}
