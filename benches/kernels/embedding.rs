//! `embedding.wgsl`: rows of a Q8_0 table.

use crate::{Fixture, HIDDEN, TOKENS, support};
use engine::kernels::{DeviceMatrix, embedding};
use engine::model_file::StorageType;

#[divan::bench]
fn prefill(bencher: divan::Bencher<'_, '_>) {
    let fixture = Fixture::start();
    let tensor = support::gguf_writer::random_tensor(StorageType::Q8_0, 1024, HIDDEN as usize, 1);
    let table = DeviceMatrix::upload(&fixture.gpu, &[tensor], fixture.plan.placement(&fixture.gpu)).unwrap();
    let ids = fixture.upload(&(0..TOKENS).map(|i| i * 7).collect::<Vec<u32>>());
    let output = fixture.words(TOKENS * HIDDEN);
    fixture.time(bencher, u64::from(TOKENS * HIDDEN), |encoder, plan| {
        embedding(encoder, plan, &table, &ids, &output, TOKENS, 1.0).unwrap();
    });
}
