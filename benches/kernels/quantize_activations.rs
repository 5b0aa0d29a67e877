//! `quantize_activations.wgsl`: the hidden state of a prefill.

use crate::{Fixture, HIDDEN, TOKENS};
use engine::kernels::quantize_activations;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let len = TOKENS * HIDDEN;
    let (input, codes, scales) = (fixture.words(len), fixture.words(len / 4), fixture.words(len / 16));
    fixture.time(bencher, u64::from(len), |encoder, plan| {
        quantize_activations(encoder, plan, &input, &codes, &scales, len / 32).unwrap();
    });
}
