//! `rms_norm.wgsl`: one row and many.

use crate::{Fixture, HIDDEN, TOKENS};
use engine::kernels::rms_norm;

#[divan::bench(args = [1, TOKENS])]
fn rows(bencher: divan::Bencher<'_, '_>, rows: u32) {
    let fixture = Fixture::start();
    let (input, weight, output) = (fixture.words(rows * HIDDEN), fixture.words(HIDDEN), fixture.words(rows * HIDDEN));
    fixture.time(bencher, u64::from(rows * HIDDEN), |encoder, plan| {
        rms_norm(encoder, plan, &input, &weight, &output, HIDDEN, 1e-5, rows, false).unwrap();
    });
}
