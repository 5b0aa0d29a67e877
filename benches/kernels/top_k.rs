//! `top_k.wgsl`: 40 of one row of logits.

use crate::{Fixture, VOCAB, support};
use engine::kernels::top_k;

#[divan::bench]
fn forty_of_the_vocabulary(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let values = fixture.upload(&support::gguf_writer::random(VOCAB as usize, 1));
    let top = fixture.words(80);
    fixture.time(bencher, u64::from(VOCAB), |encoder, plan| {
        top_k(encoder, plan, &values, &top, VOCAB, 40, 1).unwrap();
    });
}
