//! `add_bias.wgsl`: the queries, keys and values of a prefill.

use crate::{Fixture, HEAD_DIM, HEADS, KV_HEADS, TOKENS};
use engine::kernels::add_bias;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let width = (HEADS + 2 * KV_HEADS) * HEAD_DIM;
    let (bias, values) = (fixture.words(width), fixture.words(TOKENS * width));
    fixture.time(bencher, u64::from(TOKENS * width), |encoder, plan| {
        add_bias(encoder, plan, &bias, &values, width, TOKENS).unwrap();
    });
}
