//! `matmul.wgsl`: every storage type, both plans' shapes, tokens around the tile, shards, accumulation; and that an
//! element's bits do not depend on how many tokens are beside it (invariant 7).

use crate::harness::{F32, Harness, Tolerance};
use crate::support::gguf_writer::random_tensor;
use engine::kernels::{DeviceMatrix, MatmulShape, Placement, matmul};
use engine::model_file::{StorageType, Tensor};
use shaders::reference;

/// Sums of up to 1536 products of values below 1.
pub const SUM: Tolerance = Tolerance { abs: 2e-4, rel: F32.rel };

pub fn test(harness: &mut Harness) {
    let shapes: Vec<MatmulShape> = harness.plans.iter().flat_map(|plan| [plan.single, plan.several]).collect();
    for storage in StorageType::ALL {
        for (rows, columns) in [(1, 32), (65, 96), (192, 576), (65, 512)] {
            if storage.row_bytes(columns).is_none() {
                continue;
            }
            let tensor = random_tensor(storage, rows, columns, 5);
            for matrix in harness.matrices(&tensor, u64::MAX) {
                for &shape in &shapes {
                    for tokens in [1, shape.tokens as usize, shape.tokens as usize + 1] {
                        check(harness, &tensor, &matrix, shape, tokens);
                    }
                }
            }
        }
    }
    shards(harness);
    stacked(harness);
    bits_do_not_depend_on_the_batch(harness);
}

fn check(harness: &mut Harness, tensor: &Tensor, matrix: &DeviceMatrix, shape: MatmulShape, tokens: usize) {
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
    let shape = harness.plans[0].several;
    for matrix in harness.matrices(&tensor, 2048) {
        assert_eq!(matrix.shards.len(), 4, "32 rows of 64 bytes a shard");
        check(harness, &tensor, &matrix, shape, 9);
    }
    let Some(_) = harness.gpu.info.traits.image_rows else { return };
    // Two texels a block of 32, an image of one row: 256 rows of 64 columns.
    let tensor = random_tensor(StorageType::Q8_0, 600, 64, 6);
    let placement = Placement { max_binding_bytes: u64::MAX, image_rows: Some(1) };
    let matrix = DeviceMatrix::upload(&harness.gpu, std::slice::from_ref(&tensor), placement).unwrap();
    assert_eq!(matrix.shards.iter().map(|shard| shard.num_rows).collect::<Vec<_>>(), [256, 256, 88]);
    check(harness, &tensor, &matrix, shape, 9);
}

/// Tensors one below the other: neighbours of one format share a shard, another format has its own.
fn stacked(harness: &mut Harness) {
    let types = [(StorageType::Q4_1, 33), (StorageType::Q4_0, 8), (StorageType::Q6_K, 40), (StorageType::F16, 5)];
    let tensors: Vec<Tensor> =
        (20..).zip(types).map(|(seed, (storage, rows))| random_tensor(storage, rows, 256, seed)).collect();
    let matrix = DeviceMatrix::upload(&harness.gpu, &tensors, harness.plans[2].placement(&harness.gpu)).unwrap();
    assert_eq!(
        matrix.shards.iter().map(|shard| (shard.row_start, shard.num_rows)).collect::<Vec<_>>(),
        [(0, 41), (41, 40), (81, 5)]
    );
    let dense: Vec<f32> = tensors.iter().flat_map(Tensor::to_f32).collect();
    for tokens in [1, 9] {
        let input = harness.random(tokens * 256);
        let (buffer, out) = (harness.upload(&input), harness.output(tokens * matrix.rows));
        let shape = harness.plans[1].matmul_shape(tokens);
        matmul(&mut harness.encoder, shape, &matrix, &buffer, &out.buffer, tokens as u32, false).unwrap();
        let expected = reference::matmul(&dense, &input, 256, None);
        harness.compare(&format!("matmul stacked, {tokens} tokens"), &out, &expected, SUM);
    }
}

fn bits_do_not_depend_on_the_batch(harness: &mut Harness) {
    for plan in harness.plans.clone() {
        for storage in StorageType::ALL {
            let tensor = random_tensor(storage, 96, 512, 7);
            let placement = plan.placement(&harness.gpu);
            let matrix = DeviceMatrix::upload(&harness.gpu, std::slice::from_ref(&tensor), placement).unwrap();
            let input = harness.random(512 * 5);
            let alone_in = harness.upload(&input[..512]);
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
