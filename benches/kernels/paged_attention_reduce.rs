//! `paged_attention_reduce.wgsl`: the splits of one sequence of 512 tokens.

use crate::{CONTEXT, Fixture, HEAD_DIM, HEADS};
use engine::kernels::paged_attention_reduce;

#[divan::bench]
fn context_512(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let layout = fixture.layout();
    let splits = CONTEXT.div_ceil(fixture.plan.split);
    let partials = fixture.words(splits * HEADS * (HEAD_DIM + 4));
    let (starts, output) = (fixture.upload(&[0, splits]), fixture.words(HEADS * HEAD_DIM));
    fixture.time(bencher, u64::from(splits * HEADS * HEAD_DIM), |encoder, plan| {
        paged_attention_reduce(encoder, plan, &partials, &starts, &output, None, &layout, 1).unwrap();
    });
}
