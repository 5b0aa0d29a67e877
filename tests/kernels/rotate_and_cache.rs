//! `rotate_and_cache.wgsl`: both pair orders, partial rotation and none, normalised heads; slots in any block order, both
//! types of the cache, other slots untouched.

use crate::harness::{F32, Harness, SENTINEL};
use engine::kernels::{Plan, Turn, rotate_and_cache};
use engine::kv::{KvCacheDtype, KvLayout};
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
            (2, 2, 96, 32, true),
        ] {
            let shape = HeadShape { num_heads: heads, num_kv_heads: kv_heads, head_dim, pair_stride: 1 };
            let shape = HeadShape { pair_stride: if halves { rotary_dim / 2 } else { 1 }, ..shape };
            for is_normed in [false, true] {
                for dtype in [KvCacheDtype::F16, KvCacheDtype::Q8_0] {
                    if dtype == KvCacheDtype::F16 || head_dim.is_multiple_of(32) {
                        check(harness, &plan, shape, dtype, rotary_dim, is_normed);
                    }
                }
            }
        }
    }
}

fn check(
    harness: &mut Harness,
    plan: &Plan,
    shape: HeadShape,
    dtype: KvCacheDtype,
    rotary_dim: usize,
    is_normed: bool,
) {
    let HeadShape { num_heads, num_kv_heads, head_dim, pair_stride } = shape;
    let layout =
        KvLayout { num_layers: 1, num_blocks: NUM_BLOCKS, num_heads, num_kv_heads, head_dim, block_size: 16, dtype };
    let rotations = match rotary_dim {
        0 => Vec::new(),
        dim => Rotary::new(&RotaryConfig::plain(100_000.0, dim), 10_000).table(&[0, 1, 15, 16, 8191]),
    };
    let qkv = harness.random(SLOTS.len() * (num_heads + 2 * num_kv_heads) * head_dim);
    let weights = harness.random(2 * head_dim);
    let norms = is_normed.then_some((weights.as_slice(), 1e-6));
    let [query, key, value] = reference::rotate_and_cache(&qkv, &rotations, norms, shape);
    let words = NUM_BLOCKS * layout.block_bytes() / 4;
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
    let label = format!("rotate_and_cache {shape:?} {dtype:?} {rotary_dim} {is_normed}");
    harness.compare(&label, &out, &query, F32);
    for (part, expected, cache) in [("key", &key, &keys), ("value", &value, &values)] {
        let label = format!("{label} {part}");
        let got = harness.words(&label, cache);
        let check = if dtype == KvCacheDtype::F16 { check_halves } else { check_bytes };
        check(&label, &layout, bytemuck::cast_slice(&got), expected);
        harness.num_comparisons += 1;
    }
}

/// Each row of the step: head and row of it in the cache's bytes, and its values.
fn rows<'a>(layout: &KvLayout, expected: &'a [f64]) -> Vec<(usize, usize, &'a [f64])> {
    let rows = expected.chunks(layout.head_dim).enumerate();
    let place = |(index, row)| {
        let (base, offset) = layout.head_of(SLOTS[index / layout.num_kv_heads] as usize, index % layout.num_kv_heads);
        (base, offset, row)
    };
    rows.map(place).collect()
}

/// Slots of the step hold its values within one unit of f16, the others what was there.
fn check_halves(label: &str, layout: &KvLayout, got: &[u8], expected: &[f64]) {
    let mut untouched = vec![true; got.len()];
    for (base, offset, row) in rows(layout, expected) {
        let start = base + offset * 2 * layout.head_dim;
        for (index, (got, wanted)) in got[start..].chunks(2).zip(row).enumerate() {
            let got = f16::from_le_bytes([got[0], got[1]]).to_f64();
            let bound = 1e-3 * wanted.abs() + 1e-5;
            assert!((got - wanted).abs() <= bound, "{label}: value {index} is {got}, should be {wanted}");
        }
        untouched[start..][..2 * layout.head_dim].fill(false);
    }
    check_untouched(label, got, &untouched);
}

/// As above, within half a code and the rounding of the scale.
fn check_bytes(label: &str, layout: &KvLayout, got: &[u8], expected: &[f64]) {
    let mut untouched = vec![true; got.len()];
    let (head_dim, row_scales) = (layout.head_dim, 4 * layout.head_dim.div_ceil(64));
    for (base, offset, row) in rows(layout, expected) {
        let codes = base + offset * head_dim;
        let scales = base + 16 * head_dim + offset * row_scales;
        for (block, wanted) in row.chunks(32).enumerate() {
            let scale = f16::from_le_bytes([got[scales + 2 * block], got[scales + 2 * block + 1]]).to_f64();
            let peak = wanted.iter().fold(0.0f64, |peak, value| peak.max(value.abs()));
            for (index, (got, wanted)) in got[codes + 32 * block..].iter().zip(wanted).enumerate() {
                let got = f64::from(*got as i8) * scale;
                let bound = peak / 127.0 * 0.58 + 1e-6;
                assert!((got - wanted).abs() <= bound, "{label}: {block}, {index} is {got}, should be {wanted}");
            }
        }
        untouched[codes..][..head_dim].fill(false);
        untouched[scales..][..row_scales].fill(false);
    }
    check_untouched(label, got, &untouched);
}

fn check_untouched(label: &str, got: &[u8], untouched: &[bool]) {
    let sentinel = SENTINEL.to_le_bytes();
    for (index, (got, _)) in got.iter().zip(untouched).enumerate().filter(|(_, (_, untouched))| **untouched) {
        assert_eq!(*got, sentinel[index % 4], "{label}: byte {index} was touched");
    }
}
