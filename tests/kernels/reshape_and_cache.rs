//! `reshape_and_cache.wgsl`: slots in any block order, f16 rounding, other slots untouched.

use crate::harness::{Harness, SENTINEL};
use engine::kernels::reshape_and_cache;
use engine::kv::KvLayout;
use half::f16;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (kv_heads, head_dim) in [(1, 64), (3, 64), (2, 128)] {
        let layout = KvLayout {
            num_layers: 1,
            num_blocks: 6,
            num_heads: kv_heads,
            num_kv_heads: kv_heads,
            head_dim,
            block_size: 16,
        };
        let slots = [5u32 * 16 + 15, 0, 2 * 16 + 3, 2 * 16 + 4, 16];
        let width = kv_heads * head_dim;
        let (key, value) = (harness.random(slots.len() * width), harness.random(slots.len() * width));
        let words = 6 * layout.block_values() / 2;
        let (keys, values) = (harness.output(words), harness.output(words));
        let (k, v, mapping) = (harness.upload(&key), harness.upload(&value), harness.upload(&slots));
        let tokens = slots.len() as u32;
        let (kc, vc) = (&keys.buffer, &values.buffer);
        reshape_and_cache(&mut harness.encoder, &plan, &k, &v, &mapping, kc, vc, &layout, tokens).unwrap();
        for (label, source, cache) in [("key", &key, &keys), ("value", &value, &values)] {
            let label = format!("reshape_and_cache {label} {kv_heads}x{head_dim}");
            let untouched: [f16; 2] = bytemuck::cast(SENTINEL);
            let mut expected: Vec<f16> = untouched.iter().copied().cycle().take(words * 2).collect();
            reference::reshape_and_cache(source, &slots, &mut expected, kv_heads, head_dim, 16);
            let got = harness.words(&label, cache);
            assert_eq!(got, bytemuck::cast_slice::<f16, u32>(&expected), "{label}");
            harness.num_comparisons += 1;
        }
    }
}
