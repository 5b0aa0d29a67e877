//! `adjust_logits.wgsl`: penalties of five hundred tokens.

use crate::{Fixture, VOCAB};
use engine::kernels::adjust_logits;
use shaders::params::LogitEntry;

#[divan::bench]
fn five_hundred_tokens(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let entry = |index: u32| LogitEntry { index: index * 97, bias: 0.0, repetition: 1.1, subtract: 0.1 };
    let entries = fixture.upload(&(0..500).map(entry).collect::<Vec<_>>());
    let logits = fixture.words(VOCAB);
    fixture.time(bencher, 500, |encoder, plan| {
        adjust_logits(encoder, plan, &entries, &logits, 500).unwrap();
    });
}
