//! `rotate_and_cache.wgsl`: the queries, keys and values of a prefill.

use crate::{Fixture, HEAD_DIM, HEADS, KV_HEADS, TOKENS};
use engine::kernels::{Turn, rotate_and_cache};

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let layout = fixture.layout();
    let width = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    let (qkv, query) = (fixture.words(TOKENS * width), fixture.words(TOKENS * HEADS * HEAD_DIM));
    let slots = fixture.upload(&(0..TOKENS).collect::<Vec<u32>>());
    let rotations = fixture.words(TOKENS * HEAD_DIM);
    let cache_words = (layout.layer_bytes() / 4) as u32;
    let (keys, values) = (fixture.words(cache_words), fixture.words(cache_words));
    fixture.time(bencher, u64::from(TOKENS * width), |encoder, plan| {
        let turn = Turn { rotations: &rotations, num_pairs: HEAD_DIM / 2, pair_stride: 1, norms: None };
        rotate_and_cache(encoder, plan, turn, &qkv, &slots, &query, &keys, &values, &layout, TOKENS).unwrap();
    });
}
