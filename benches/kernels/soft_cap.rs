//! `soft_cap.wgsl`: the logits of four sequences.

use crate::{Fixture, VOCAB};
use engine::kernels::soft_cap;

#[divan::bench]
fn four_rows(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let logits = fixture.words(4 * VOCAB);
    fixture.time(bencher, u64::from(4 * VOCAB), |encoder, plan| {
        soft_cap(encoder, plan, &logits, 30.0, 4 * VOCAB).unwrap();
    });
}
