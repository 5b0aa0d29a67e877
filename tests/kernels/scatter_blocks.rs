//! `scatter_blocks.wgsl`: canonical payloads land in every layer of their blocks, to the bit, and nowhere else.

use crate::gather_blocks::{SHAPES, caches, layout};
use crate::harness::{Harness, SENTINEL};
use engine::kernels::scatter_blocks;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    for shape in SHAPES {
        let layout = layout(shape);
        let source = caches(harness, &layout);
        for block_ids in [vec![2u32], vec![4, 1, 0]] {
            let label = format!("scatter_blocks {shape:?} {block_ids:?}");
            let block_words = layout.block_bytes() / 4;
            let payloads = reference::gather_blocks(&source.host, &block_ids, block_words);
            let (uploaded, ids) = (harness.upload(&payloads), harness.upload(&block_ids));
            let words = layout.num_blocks * block_words;
            let targets: Vec<_> =
                (0..layout.num_layers).map(|_| (harness.output(words), harness.output(words))).collect();
            let (plan, count) = (harness.plans[0].clone(), block_ids.len() as u32);
            for (layer, (key, value)) in targets.iter().enumerate() {
                let (encoder, key, value) = (&mut harness.encoder, &key.buffer, &value.buffer);
                scatter_blocks(encoder, &plan, &uploaded, &ids, key, value, &layout, layer, count).unwrap();
            }
            let untouched = vec![SENTINEL; words];
            let mut expected = vec![(untouched.clone(), untouched); layout.num_layers];
            reference::scatter_blocks(&payloads, &block_ids, &mut expected, block_words);
            for ((key, value), (expected_key, expected_value)) in targets.iter().zip(&expected) {
                assert_eq!(&harness.words(&label, key), expected_key, "{label} keys");
                assert_eq!(&harness.words(&label, value), expected_value, "{label} values");
            }
            harness.num_comparisons += 1;
        }
    }
}
