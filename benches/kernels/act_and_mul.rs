//! `act_and_mul.wgsl`: the feed-forward layer of a prefill.

use crate::{Fixture, INNER, TOKENS};
use engine::kernels::act_and_mul;
use engine::model::Activation;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let (gate_up, output) = (fixture.words(2 * TOKENS * INNER), fixture.words(TOKENS * INNER));
    fixture.time(bencher, u64::from(TOKENS * INNER), |encoder, plan| {
        act_and_mul(encoder, plan, Activation::Silu, &gate_up, &output, None, INNER, TOKENS).unwrap();
    });
}
