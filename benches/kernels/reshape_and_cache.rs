//! `reshape_and_cache.wgsl`: the keys and values of a prefill.

use crate::{Fixture, HEAD_DIM, KV_HEADS, TOKENS};
use engine::kernels::reshape_and_cache;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let layout = fixture.layout();
    let len = TOKENS * KV_HEADS * HEAD_DIM;
    let (key, value) = (fixture.words(len), fixture.words(len));
    let slots = fixture.upload(&(0..TOKENS).collect::<Vec<u32>>());
    let cache_words = (layout.layer_bytes() / 4) as u32;
    let (keys, values) = (fixture.words(cache_words), fixture.words(cache_words));
    fixture.time(bencher, u64::from(len) * 2, |encoder, plan| {
        reshape_and_cache(encoder, plan, &key, &value, &slots, &keys, &values, &layout, TOKENS).unwrap();
    });
}
