//! `gather_blocks.wgsl`: 16 blocks of one layer.

use crate::{Fixture, HEAD_DIM, KV_HEADS};
use engine::kernels::gather_blocks;

const BLOCKS: u32 = 16;

#[divan::bench]
fn sixteen(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let layout = fixture.layout();
    let cache_words = (layout.layer_bytes() / 4) as u32;
    let (keys, values) = (fixture.words(cache_words), fixture.words(cache_words));
    let ids = fixture.upload(&(0..BLOCKS).collect::<Vec<u32>>());
    let payloads = fixture.words(layout.payload_bytes() as u32 / 4 * BLOCKS);
    fixture.time(bencher, u64::from(BLOCKS * 16 * KV_HEADS * HEAD_DIM) * 2, |encoder, plan| {
        gather_blocks(encoder, plan, &keys, &values, &ids, &payloads, &layout, 0, BLOCKS).unwrap();
    });
}
