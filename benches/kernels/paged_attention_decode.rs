//! `paged_attention_decode.wgsl`: one sequence of 512 tokens.

use crate::{CONTEXT, Fixture, HEAD_DIM, HEADS};
use engine::kernels::paged_attention_decode;
use engine::ops::Attention;

#[divan::bench]
fn context_512(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let layout = fixture.layout();
    let attention = Attention::plain(HEAD_DIM as usize);
    let cache_words = (layout.layer_bytes() / 4) as u32;
    let (keys, values) = (fixture.words(cache_words), fixture.words(cache_words));
    let (query, table, lens) = (fixture.words(HEADS * HEAD_DIM), fixture.block_table(), fixture.upload(&[CONTEXT]));
    let splits = CONTEXT.div_ceil(fixture.plan.split);
    let items = fixture.upload(&(0..splits).map(|split| [0, split]).collect::<Vec<[u32; 2]>>());
    let partials = fixture.words(splits * HEADS * (HEAD_DIM + 4));
    fixture.time(bencher, u64::from(CONTEXT * HEADS * HEAD_DIM) * 2, |encoder, plan| {
        let (k, v) = (&keys, &values);
        let stride = CONTEXT / 16;
        paged_attention_decode(
            encoder, plan, &query, k, v, &table, &lens, &items, &partials, &layout, &attention, stride, splits, 0,
        )
        .unwrap();
    });
}
