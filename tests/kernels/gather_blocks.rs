//! `gather_blocks.wgsl`: every layer of blocks in any order, in the canonical one, to the bit.

use crate::harness::Harness;
use engine::kernels::{GpuBuffer, gather_blocks};
use engine::kv::{KvCacheDtype, KvLayout};
use shaders::reference;

/// K and V of each layer, on the host and on the device.
pub struct Caches {
    pub host: Vec<(Vec<u32>, Vec<u32>)>,
    pub device: Vec<(GpuBuffer, GpuBuffer)>,
}

/// Shapes of a cache: layers, blocks, heads, width of a head, type.
pub const SHAPES: [(usize, usize, usize, usize, KvCacheDtype); 4] = [
    (1, 5, 1, 8, KvCacheDtype::F16),
    (3, 6, 3, 64, KvCacheDtype::F16),
    (2, 9, 2, 128, KvCacheDtype::F16),
    (2, 7, 3, 96, KvCacheDtype::Q8_0),
];

pub fn layout(
    (num_layers, num_blocks, num_kv_heads, head_dim, dtype): (usize, usize, usize, usize, KvCacheDtype),
) -> KvLayout {
    KvLayout { num_layers, num_blocks, num_heads: num_kv_heads, num_kv_heads, head_dim, block_size: 16, dtype }
}

/// Caches of random words: pairs of f16 are copied as they are, NaN or not.
pub fn caches(harness: &mut Harness, layout: &KvLayout) -> Caches {
    let words = layout.num_blocks * layout.block_bytes() / 4;
    let mut random = || harness.random(words).iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    let host: Vec<(Vec<u32>, Vec<u32>)> = (0..layout.num_layers).map(|_| (random(), random())).collect();
    let device = host.iter().map(|(key, value)| (harness.upload(key), harness.upload(value))).collect();
    Caches { host, device }
}

pub fn test(harness: &mut Harness) {
    for shape in SHAPES {
        let layout = layout(shape);
        let caches = caches(harness, &layout);
        for block_ids in [vec![3u32], vec![4, 0, 2]] {
            let label = format!("gather_blocks {shape:?} {block_ids:?}");
            let payloads = harness.output(layout.payload_bytes() / 4 * block_ids.len());
            let (ids, count) = (harness.upload(&block_ids), block_ids.len() as u32);
            let plan = harness.plans[0].clone();
            for (layer, (key, value)) in caches.device.iter().enumerate() {
                let (encoder, out) = (&mut harness.encoder, &payloads.buffer);
                gather_blocks(encoder, &plan, key, value, &ids, out, &layout, layer, count).unwrap();
            }
            let expected = reference::gather_blocks(&caches.host, &block_ids, layout.block_bytes() / 4);
            assert_eq!(harness.words(&label, &payloads), expected, "{label}");
            harness.num_comparisons += 1;
        }
    }
}
