//! Storage types against the `gguf` Python package: what a block unpacks to (tests/golden/storage.json).

mod support;

use engine::model_file::{StorageType, dequantize_row};
use serde_json::Value;
use support::gguf_writer::{random, random_tensor};

#[test]
fn every_quantised_type_unpacks_as_the_gguf_package_does() {
    let golden: Value = serde_json::from_str(include_str!("golden/storage.json")).unwrap();
    for storage in StorageType::ALL.into_iter().filter(|storage| *storage != StorageType::F32) {
        let case = &golden[storage.name()];
        let hex = case["bytes"].as_str().unwrap_or_else(|| panic!("{storage:?} has no golden values"));
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
        let values: Vec<f64> = case["values"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        assert_eq!(storage.row_bytes(values.len()), Some(bytes.len()), "{storage:?}");
        let mut out = vec![0.0; values.len()];
        dequantize_row(storage, &bytes, &mut out);
        for (index, (got, expected)) in out.iter().zip(values).enumerate() {
            let off = (f64::from(*got) - expected).abs();
            assert!(off <= 1e-6 * expected.abs() + 1e-7, "{storage:?}: value {index} is {got}, should be {expected}");
        }
    }
}

#[test]
fn what_the_tests_store_comes_back_within_a_code() {
    for storage in StorageType::ALL {
        let values = random(512, 3);
        let back = random_tensor(storage, 1, 512, 3).to_f32();
        let bound = match storage.name() {
            "F32" => 0.0,
            "F16" => 1e-3,
            "Q8_0" | "BF16" => 0.01,
            "Q6_K" => 0.04,
            "Q5_0" | "Q5_1" | "Q5_K" => 0.05,
            "IQ4_NL" => 0.2,
            _ => 0.15,
        };
        for (got, expected) in back.iter().zip(&values) {
            assert!((got - expected).abs() <= bound, "{storage:?}: {got} for {expected}");
        }
    }
}
