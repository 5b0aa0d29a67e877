//! `matmul.wgsl`: the gate projection, matrix-vector and matrix-matrix, by storage type.

use crate::{Fixture, HIDDEN, INNER, TOKENS, support};
use engine::kernels::{DeviceMatrix, matmul};
use engine::model_file::StorageType;

#[divan::bench(args = [StorageType::F16, StorageType::Q4_1, StorageType::Q8_0])]
fn decode(bencher: divan::Bencher<'_, '_>, storage: StorageType) {
    run(bencher, storage, 1);
}

#[divan::bench(args = [StorageType::F16, StorageType::Q4_1, StorageType::Q8_0])]
fn prefill(bencher: divan::Bencher<'_, '_>, storage: StorageType) {
    run(bencher, storage, TOKENS);
}

fn run(bencher: divan::Bencher<'_, '_>, storage: StorageType, tokens: u32) {
    let fixture = Fixture::start();
    let tensor = support::gguf_writer::random_tensor(storage, INNER as usize, HIDDEN as usize, 1);
    let matrix = DeviceMatrix::upload(&fixture.gpu, &[tensor], fixture.plan.placement(&fixture.gpu)).unwrap();
    let (input, output) = (fixture.words(tokens * HIDDEN), fixture.words(tokens * INNER));
    fixture.time(bencher, u64::from(tokens * HIDDEN) * u64::from(INNER), |encoder, plan| {
        let shape = plan.matmul_shape(tokens as usize);
        matmul(encoder, shape, &matrix, &input, &output, tokens, false).unwrap();
    });
}
