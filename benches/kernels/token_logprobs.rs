//! `token_logprobs.wgsl`: one row of logits.

use crate::{Fixture, VOCAB, support};
use engine::kernels::token_logprobs;

#[divan::bench]
fn one_row(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let logits = fixture.upload(&support::gguf_writer::random(VOCAB as usize, 1));
    let (tokens, logprobs) = (fixture.words(1), fixture.words(4));
    fixture.time(bencher, u64::from(VOCAB), |encoder, plan| {
        token_logprobs(encoder, plan, &logits, &tokens, &logprobs, VOCAB, 1).unwrap();
    });
}
