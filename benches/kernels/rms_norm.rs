//! `rms_norm.wgsl`: one row and many.

use crate::{Fixture, HIDDEN, TOKENS};
use engine::kernels::{Norm, rms_norm};

#[divan::bench(args = [1, TOKENS])]
fn rows(bencher: divan::Bencher<'_, '_>, rows: u32) {
    let fixture = Fixture::start();
    let (input, weight, output) = (fixture.words(rows * HIDDEN), fixture.words(HIDDEN), fixture.words(rows * HIDDEN));
    fixture.time(bencher, u64::from(rows * HIDDEN), |encoder, plan| {
        let norm = Norm { width: HIDDEN, epsilon: 1e-5, num_rows: rows, accumulate: false };
        rms_norm(encoder, plan, norm, &input, &weight, &output, None).unwrap();
    });
}
