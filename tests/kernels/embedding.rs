//! `embedding.wgsl`: every storage type, one shard and several, repeated tokens.

use crate::harness::{F32, Harness};
use crate::support::gguf_writer::random_tensor;
use engine::gguf::StorageType;
use engine::kernels::{DeviceMatrix, embedding};
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for storage in StorageType::ALL {
        for (columns, shard_bytes) in [(32, u64::MAX), (576, u64::MAX), (576, 8192)] {
            let tensor = random_tensor(storage, 50, columns, 3);
            let limit = shard_bytes.min(harness.gpu.max_binding_bytes());
            let table = DeviceMatrix::upload(&harness.gpu, &tensor, limit).unwrap();
            assert!(shard_bytes == u64::MAX || table.shards.len() > 1, "{storage:?}: not sharded");
            let ids = [0u32, 49, 7, 7, 31];
            let (tokens, out) = (harness.upload(&ids), harness.output(ids.len() * columns));
            embedding(&mut harness.encoder, &plan, &table, &tokens, &out.buffer, ids.len() as u32).unwrap();
            let expected = reference::embedding(&tensor.to_f32(), &ids, columns);
            harness.compare(&format!("embedding {storage:?} {columns} {shard_bytes}"), &out, &expected, F32);
        }
    }
}
