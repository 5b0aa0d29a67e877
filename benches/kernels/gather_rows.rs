//! `gather_rows.wgsl`: some rows of the hidden state.

use crate::{Fixture, HIDDEN, TOKENS};
use engine::kernels::gather_rows;

#[divan::bench]
fn sixteen_rows(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let (input, output) = (fixture.words(TOKENS * HIDDEN), fixture.words(16 * HIDDEN));
    let rows = fixture.upload(&(0..16u32).map(|i| i * 7).collect::<Vec<u32>>());
    fixture.time(bencher, u64::from(16 * HIDDEN), |encoder, plan| {
        gather_rows(encoder, plan, &input, &rows, &output, HIDDEN, 16).unwrap();
    });
}
