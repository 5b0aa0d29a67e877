//! `rotary_embedding.wgsl`: the queries of a prefill.

use crate::{Fixture, HEAD_DIM, HEADS, TOKENS};
use engine::kernels::rotary_embedding;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let pairs = HEAD_DIM / 2;
    let (rotations, values) = (fixture.words(TOKENS * HEAD_DIM), fixture.words(TOKENS * HEADS * HEAD_DIM));
    fixture.time(bencher, u64::from(TOKENS * HEADS * HEAD_DIM), |encoder, plan| {
        rotary_embedding(encoder, plan, &rotations, &values, HEADS, HEAD_DIM, pairs, 1, TOKENS).unwrap();
    });
}
