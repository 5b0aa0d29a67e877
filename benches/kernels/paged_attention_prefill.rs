//! `paged_attention_prefill.wgsl`: a chunk of 128 queries at the end of 512 tokens.

use crate::{CONTEXT, Fixture, HEAD_DIM, HEADS, TOKENS};
use engine::kernels::paged_attention_prefill;
use engine::ops::Attention;

#[divan::bench]
fn chunk_of_128_in_512(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let layout = fixture.layout();
    let attention = Attention::plain(HEAD_DIM as usize);
    let cache_words = (layout.layer_bytes() / 4) as u32;
    let (keys, values) = (fixture.words(cache_words), fixture.words(cache_words));
    let len = TOKENS * HEADS * HEAD_DIM;
    let (query, output, table) = (fixture.words(len), fixture.words(len), fixture.block_table());
    let chunks = fixture.upload(&[[0, TOKENS, CONTEXT, 0]]);
    let firsts = (0..TOKENS).step_by(fixture.plan.query_tile as usize);
    let tiles: Vec<[u32; 2]> = firsts.map(|first| [0, first]).collect();
    let items = fixture.upload(&tiles);
    let num_tiles = tiles.len() as u32;
    let pairs = u64::from(TOKENS) * u64::from(CONTEXT - TOKENS / 2);
    fixture.time(bencher, pairs * u64::from(HEADS * HEAD_DIM) * 2, |encoder, plan| {
        let (k, v) = (&keys, &values);
        let stride = CONTEXT / 16;
        paged_attention_prefill(
            encoder, plan, &query, k, v, &table, &chunks, &items, &output, &layout, &attention, stride, num_tiles, 0,
        )
        .unwrap();
    });
}
