//! `argmax.wgsl` over one row of logits.

use crate::{Fixture, VOCAB};
use engine::kernels::argmax;

#[divan::bench]
fn vocabulary(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let (values, best) = (fixture.words(VOCAB), fixture.words(2));
    fixture.time(bencher, u64::from(VOCAB), |encoder, plan| argmax(encoder, plan, &values, &best, VOCAB, 1).unwrap());
}
