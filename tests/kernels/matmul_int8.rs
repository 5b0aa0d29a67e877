//! `matmul_int8.wgsl`: against the same rounding in f64, for the storage types with integer codes; bits independent of
//! the batch.

use super::matmul::SUM;
use crate::harness::{Harness, Output};
use crate::support::gguf_writer::random_tensor;
use engine::kernels::{DeviceMatrix, MatmulShape, matmul_int8};
use engine::model_file::{StorageType, Tensor};
use shaders::reference::{self, QuantizedRow};

pub fn test(harness: &mut Harness) {
    let shapes: Vec<MatmulShape> = harness.plans.iter().flat_map(|plan| [plan.single, plan.several]).collect();
    for storage in StorageType::ALL.into_iter().filter(|storage| !storage.is_float()) {
        for (rows, columns) in [(1, 32), (65, 96), (192, 576), (65, 512)] {
            if storage.row_bytes(columns).is_none() {
                continue;
            }
            let tensor = random_tensor(storage, rows, columns, 8);
            for matrix in harness.matrices(&tensor, u64::MAX) {
                for &shape in &shapes {
                    for tokens in [1, shape.tokens as usize, shape.tokens as usize + 1] {
                        check(harness, &tensor, &matrix, shape, tokens);
                    }
                }
            }
        }
        bits_do_not_depend_on_the_batch(harness, storage);
    }
    let tensor = random_tensor(StorageType::Q8_0, 100, 64, 6);
    let shape = harness.plans[1].several;
    for matrix in harness.matrices(&tensor, 2048) {
        assert_eq!(matrix.shards.len(), 4, "32 rows of 64 bytes a shard");
        check(harness, &tensor, &matrix, shape, 9);
    }
}

fn run(
    harness: &mut Harness,
    matrix: &DeviceMatrix,
    shape: MatmulShape,
    input: &QuantizedRow,
    tokens: usize,
    out: Output,
    accumulate: bool,
) -> Output {
    let codes = harness.upload(&input.codes);
    let pairs: Vec<[f32; 2]> = input.scales.iter().zip(&input.sums).map(|(&scale, &sum)| [scale, sum]).collect();
    let scales = harness.upload(&pairs);
    let tokens = tokens as u32;
    matmul_int8(&mut harness.encoder, shape, matrix, &codes, &scales, &out.buffer, tokens, accumulate).unwrap();
    harness.encoder.submit().unwrap();
    out
}

fn check(harness: &mut Harness, tensor: &Tensor, matrix: &DeviceMatrix, shape: MatmulShape, tokens: usize) {
    let input = reference::quantize_activations(&harness.random(tokens * tensor.columns));
    let previous = harness.random(tokens * tensor.rows);
    let label =
        format!("matmul_int8 {:?} {}x{} {tokens} tokens {shape:?}", tensor.storage, tensor.rows, tensor.columns);
    let out = harness.output(tokens * tensor.rows);
    let out = run(harness, matrix, shape, &input, tokens, out, false);
    harness.compare(&label, &out, &reference::matmul_int8(&tensor.to_f32(), &input, tensor.columns, None), SUM);
    let out = harness.output_of(&previous);
    let out = run(harness, matrix, shape, &input, tokens, out, true);
    let expected = reference::matmul_int8(&tensor.to_f32(), &input, tensor.columns, Some(&previous));
    harness.compare(&format!("{label} accumulated"), &out, &expected, SUM);
}

fn bits_do_not_depend_on_the_batch(harness: &mut Harness, storage: StorageType) {
    let tensor = random_tensor(storage, 96, 512, 9);
    let values = harness.random(512 * 5);
    for plan in harness.plans.clone() {
        let placement = plan.placement(&harness.gpu);
        let matrix = DeviceMatrix::upload(&harness.gpu, std::slice::from_ref(&tensor), placement).unwrap();
        let (alone, together) = (harness.output(96), harness.output(96 * 5));
        let first = reference::quantize_activations(&values[..512]);
        let alone = run(harness, &matrix, plan.single, &first, 1, alone, false);
        let all = reference::quantize_activations(&values);
        let together = run(harness, &matrix, plan.several, &all, 5, together, false);
        let label = format!("matmul_int8 {storage:?} alone and together");
        let (alone, together) = (harness.words(&label, &alone), harness.words(&label, &together));
        assert_eq!(alone, together[..96], "{label}");
        harness.num_comparisons += 1;
    }
}
