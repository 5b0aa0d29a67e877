//! `sample.wgsl`: one row of logits, drawn from all and from the nucleus of 0.9.

use crate::{Fixture, VOCAB, support};
use engine::kernels::sample;
use shaders::params::RowDraw;

#[divan::bench(args = [1.0, 0.9])]
fn one_row(bencher: divan::Bencher<'_, '_>, top_p: f32) {
    let fixture = Fixture::start();
    let scores = fixture.upload(&support::gguf_writer::random(VOCAB as usize, 1));
    let best = fixture.upload(&[0u32, 1.0f32.to_bits()]);
    let draw = RowDraw { kind: 1, inverse_temperature: 1.0, top_p, uniform: 0.5, ..Default::default() };
    let (draws, chosen) = (fixture.upload(&[draw]), fixture.words(1));
    fixture.time(bencher, u64::from(VOCAB), |encoder, plan| {
        sample(encoder, plan, &scores, &best, &draws, &chosen, VOCAB, 1).unwrap();
    });
}
