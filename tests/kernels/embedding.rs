//! `embedding.wgsl`: every storage type, one shard and several, repeated tokens.

use crate::harness::{F32, Harness};
use crate::support::gguf_writer::random_tensor;
use engine::kernels::{DeviceMatrix, Plan, embedding};
use engine::model_file::{StorageType, Tensor};
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for storage in StorageType::ALL {
        for (columns, shard_bytes) in [(32, u64::MAX), (576, u64::MAX), (576, 8192), (512, u64::MAX)] {
            if storage.row_bytes(columns).is_none() {
                continue;
            }
            let tensor = random_tensor(storage, 50, columns, 3);
            for table in harness.matrices(&tensor, shard_bytes) {
                assert!(shard_bytes == u64::MAX || table.shards.len() > 1, "{storage:?}: not sharded");
                check(harness, &plan, &tensor, &table, shard_bytes);
            }
        }
    }
}

fn check(harness: &mut Harness, plan: &Plan, tensor: &Tensor, table: &DeviceMatrix, shard_bytes: u64) {
    let ids = [0u32, 49, 7, 7, 31];
    let (storage, columns) = (tensor.storage, tensor.columns);
    let (tokens, out) = (harness.upload(&ids), harness.output(ids.len() * columns));
    embedding(&mut harness.encoder, plan, table, &tokens, &out.buffer, ids.len() as u32, 1.5).unwrap();
    let expected = reference::embedding(&tensor.to_f32(), &ids, columns).into_iter().map(|value| value * 1.5);
    let expected: Vec<f64> = expected.collect();
    harness.compare(&format!("embedding {storage:?} {columns} {shard_bytes}"), &out, &expected, F32);
}
