//! `matmul_tiled.wgsl`: every storage type, tiles whole and in part, tokens before the first untouched, accumulation, shards;
//! in f32 and, where the device has it, in half precision. Matrix arithmetic runs on hardware that has it: here it is
//! validated and translated (`shaders/tests/portability.rs`), and an engine tries it before it uses it.

use crate::harness::{Harness, Tolerance};
use crate::support::gguf_writer::random_tensor;
use engine::kernels::{Arithmetic, DeviceMatrix, Placement, agrees, matmul, matmul_tiled};
use engine::model_file::{StorageType, Tensor};
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let has_f16 = harness.gpu.info.traits.f16;
    let arithmetics = [Some(Arithmetic::F32), has_f16.then_some(Arithmetic::F16)];
    for arithmetic in arithmetics.into_iter().flatten() {
        for storage in StorageType::ALL {
            let tensor = random_tensor(storage, 70, if storage.row_bytes(96).is_some() { 96 } else { 256 }, 5);
            check(harness, arithmetic, &tensor, u64::MAX, [0, 67]);
        }
        let tensor = random_tensor(StorageType::Q4_1, 130, 576, 6);
        for tokens in [[0, 1], [3, 4], [2, 70], [64, 128], [5, 5]] {
            check(harness, arithmetic, &tensor, u64::MAX, tokens);
        }
        check(harness, arithmetic, &random_tensor(StorageType::Q8_0, 100, 64, 7), 2048, [1, 66]);
        let plan = harness.plans[0].clone();
        assert!(agrees(&harness.gpu, &mut harness.encoder, &plan, arithmetic).unwrap(), "{arithmetic:?}");
        harness.num_comparisons += 1;
    }
    if !harness.gpu.info.traits.has_matrices() {
        // What no adapter offers does not compile, which is an answer and not a failure.
        let plan = harness.plans[0].clone();
        assert!(!agrees(&harness.gpu, &mut harness.encoder, &plan, Arithmetic::Matrix16).unwrap());
        assert!(agrees(&harness.gpu, &mut harness.encoder, &plan, Arithmetic::F32).unwrap(), "the device is as before");
    }
}

fn check(harness: &mut Harness, arithmetic: Arithmetic, tensor: &Tensor, binding: u64, [first, end]: [usize; 2]) {
    let placement = Placement { max_binding_bytes: binding.min(harness.gpu.max_binding_bytes()), image_rows: None };
    let matrix = DeviceMatrix::upload(&harness.gpu, std::slice::from_ref(tensor), placement).unwrap();
    let input = harness.random(end * tensor.columns);
    let previous = harness.random(end * tensor.rows);
    let buffer = harness.upload(&input);
    let weights = tensor.to_f32();
    // Half precision: products of rounded values, and sums of eight in it.
    let largest = weights.iter().fold(0.0f32, |largest, weight| largest.max(weight.abs()));
    let abs = match arithmetic {
        Arithmetic::F32 => 2e-4,
        _ => 2e-3 * f64::from(largest) * (tensor.columns as f64).sqrt(),
    };
    for accumulate in [false, true] {
        let out = harness.output_of(&previous);
        let (encoder, output) = (&mut harness.encoder, &out.buffer);
        matmul_tiled(encoder, arithmetic, &matrix, &buffer, output, first as u32, end as u32, accumulate).unwrap();
        let expected = reference::matmul_tiled(&weights, &input, tensor.columns, first, &previous, accumulate);
        let label = format!(
            "matmul_tiled {arithmetic:?} {:?} {}x{} {first}..{end} {accumulate}",
            tensor.storage, tensor.rows, tensor.columns
        );
        harness.compare(&label, &out, &expected, Tolerance { abs, rel: 1e-4 });
        if arithmetic == Arithmetic::F32 && first == 0 {
            // As the product of few tokens on hardware, to the bit.
            let plain = harness.output_of(&previous);
            let shape = harness.plans[0].several;
            let (encoder, output) = (&mut harness.encoder, &plain.buffer);
            matmul(encoder, shape, &matrix, &buffer, output, end as u32, accumulate).unwrap();
            harness.same_bits(&label, &plain, &out);
        }
    }
}
