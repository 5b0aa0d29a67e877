//! `silu_and_mul.wgsl`: the feed-forward layer of a prefill.

use crate::{Fixture, INNER, TOKENS};
use engine::kernels::silu_and_mul;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let len = TOKENS * INNER;
    let (gate, up) = (fixture.words(len), fixture.words(len));
    fixture.time(bencher, u64::from(len), |encoder, plan| silu_and_mul(encoder, plan, &gate, &up, len).unwrap());
}
