//! `matmul.wgsl`: every storage type, both plans' shapes, tokens around the tile, shards, accumulation; and that an
//! element's bits do not depend on how many tokens are beside it (invariant 7).

use crate::harness::{F32, Harness, Tolerance};
use crate::support::gguf_writer::random_tensor;
use engine::gguf::StorageType;
use engine::kernels::{DeviceMatrix, MatmulShape, matmul};
use shaders::reference;

/// Sums of up to 1536 products of values below 1.
pub const SUM: Tolerance = Tolerance { abs: 2e-4, rel: F32.rel };

pub fn test(harness: &mut Harness) {
    let shapes: Vec<MatmulShape> = harness.plans.iter().flat_map(|plan| [plan.single, plan.several]).collect();
    for storage in StorageType::ALL {
        for (rows, columns) in [(1, 32), (65, 96), (192, 576)] {
            let tensor = random_tensor(storage, rows, columns, 5);
            let matrix = DeviceMatrix::upload(&harness.gpu, &tensor, harness.gpu.max_binding_bytes()).unwrap();
            for &shape in &shapes {
                for tokens in [1, shape.tokens as usize, shape.tokens as usize + 1] {
                    check(harness, &tensor, &matrix, shape, tokens);
                }
            }
        }
    }
    shards(harness);
    bits_do_not_depend_on_the_batch(harness);
}

fn check(
    harness: &mut Harness,
    tensor: &engine::gguf::Tensor,
    matrix: &DeviceMatrix,
    shape: MatmulShape,
    tokens: usize,
) {
    let input = harness.random(tokens * tensor.columns);
    let previous = harness.random(tokens * tensor.rows);
    let buffer = harness.upload(&input);
    let label = format!("matmul {:?} {}x{} {tokens} tokens {shape:?}", tensor.storage, tensor.rows, tensor.columns);
    let out = harness.output(tokens * tensor.rows);
    matmul(&mut harness.encoder, shape, matrix, &buffer, &out.buffer, tokens as u32, false).unwrap();
    harness.compare(&label, &out, &reference::matmul(&tensor.to_f32(), &input, tensor.columns, None), SUM);
    let out = harness.output_of(&previous);
    matmul(&mut harness.encoder, shape, matrix, &buffer, &out.buffer, tokens as u32, true).unwrap();
    let expected = reference::matmul(&tensor.to_f32(), &input, tensor.columns, Some(&previous));
    harness.compare(&format!("{label} accumulated"), &out, &expected, SUM);
}

fn shards(harness: &mut Harness) {
    let tensor = random_tensor(StorageType::Q8_0, 100, 64, 6);
    let matrix = DeviceMatrix::upload(&harness.gpu, &tensor, 2048).unwrap();
    assert_eq!(matrix.shards.len(), 4, "32 rows of 64 bytes a shard");
    let shape = harness.plans[0].several;
    check(harness, &tensor, &matrix, shape, 9);
}

fn bits_do_not_depend_on_the_batch(harness: &mut Harness) {
    for plan in harness.plans.clone() {
        for storage in StorageType::ALL {
            let tensor = random_tensor(storage, 96, 576, 7);
            let matrix = DeviceMatrix::upload(&harness.gpu, &tensor, harness.gpu.max_binding_bytes()).unwrap();
            let input = harness.random(576 * 5);
            let alone_in = harness.upload(&input[..576]);
            let all_in = harness.upload(&input);
            let (alone, together) = (harness.output(96), harness.output(96 * 5));
            matmul(&mut harness.encoder, plan.single, &matrix, &alone_in, &alone.buffer, 1, false).unwrap();
            matmul(&mut harness.encoder, plan.several, &matrix, &all_in, &together.buffer, 5, false).unwrap();
            let label = format!("matmul {storage:?} alone and together");
            let (alone, together) = (harness.words(&label, &alone), harness.words(&label, &together));
            assert_eq!(alone, together[..96], "{label}");
            harness.num_comparisons += 1;
        }
    }
}
