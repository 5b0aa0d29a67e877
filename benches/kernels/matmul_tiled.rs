//! `matmul_tiled.wgsl`: the gate projection of a prompt, by storage type.

use crate::{Fixture, HIDDEN, INNER, TOKENS, support};
use engine::kernels::{Arithmetic, DeviceMatrix, Placement, matmul_tiled};
use engine::model_file::StorageType;

#[divan::bench(args = [StorageType::F16, StorageType::Q4_1, StorageType::Q8_0])]
fn prefill(bencher: divan::Bencher<'_, '_>, storage: StorageType) {
    let fixture = Fixture::start();
    let tensor = support::gguf_writer::random_tensor(storage, INNER as usize, HIDDEN as usize, 1);
    let placement = Placement { max_binding_bytes: fixture.gpu.max_binding_bytes(), image_rows: None };
    let matrix = DeviceMatrix::upload(&fixture.gpu, &[tensor], placement).unwrap();
    let (input, output) = (fixture.words(TOKENS * HIDDEN), fixture.words(TOKENS * INNER));
    fixture.time(bencher, u64::from(TOKENS * HIDDEN) * u64::from(INNER), |encoder, _| {
        matmul_tiled(encoder, Arithmetic::F32, &matrix, &input, &output, 0, TOKENS, false).unwrap();
    });
}
