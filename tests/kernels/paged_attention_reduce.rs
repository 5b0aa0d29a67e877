//! `paged_attention_reduce.wgsl`: merged splits equal attention over the whole context, whatever the blocks' order.

use super::paged_attention_decode::Case;
use crate::harness::{ATTENTION, Harness, Output};
use engine::kernels::{RoundedTo, paged_attention_reduce, quantize_activations};
use engine::kv::KvCacheDtype;
use shaders::reference::{self, Chunk};

fn run(harness: &mut Harness, case: &Case) -> Output {
    let plan = harness.plans[0].clone();
    let partials = case.run(harness, &plan);
    let starts: Vec<u32> = case.splits(plan.split as usize).1.iter().map(|&start| start as u32).collect();
    let starts = harness.upload(&starts);
    let out = harness.output(case.query.len());
    let sequences = case.context_lens.len() as u32;
    paged_attention_reduce(
        &mut harness.encoder,
        &plan,
        &partials.buffer,
        &starts,
        &out.buffer,
        None,
        &case.layout,
        sequences,
    )
    .unwrap();
    let num_blocks = case.query.len() / 32;
    let [beside, after] = [(); 2].map(|()| [harness.output(num_blocks * 8), harness.output(num_blocks * 2)]);
    let (values, encoder) = (harness.output(case.query.len()), &mut harness.encoder);
    let to = RoundedTo { codes: &beside[0].buffer, block_scales: &beside[1].buffer };
    let (partials, layout) = (&partials.buffer, &case.layout);
    paged_attention_reduce(encoder, &plan, partials, &starts, &values.buffer, Some(to), layout, sequences).unwrap();
    let count = num_blocks as u32;
    quantize_activations(encoder, &plan, &values.buffer, &after[0].buffer, &after[1].buffer, count).unwrap();
    // The rounding beside is what rounding afterwards gives, to the bit.
    harness.same_bits("paged_attention_reduce rounded", &values, &out);
    harness.same_bits("paged_attention_reduce codes", &beside[0], &after[0]);
    harness.same_bits("paged_attention_reduce scales", &beside[1], &after[1]);
    out
}

pub fn test(harness: &mut Harness) {
    let split = harness.plans[0].split as usize;
    for heads in [[1, 1, 64], [9, 3, 64], [8, 2, 128]] {
        let mut case =
            Case::new(harness, heads, KvCacheDtype::F16, &[1, split, split + 1, 2 * split, 5 * split + 3], 7, f32::NAN);
        // A window that leaves whole splits unseen.
        for window in [0, split + 5] {
            case.scale.window = window;
            check(harness, &case, &format!("paged_attention_reduce {heads:?} window {window}"));
        }
    }
    shuffled_blocks_give_the_same_bits(harness);
}

fn check(harness: &mut Harness, case: &Case, label: &str) {
    let split = harness.plans[0].split as usize;
    let out = run(harness, case);
    let starts = case.splits(split).1;
    let merged = reference::paged_attention_reduce(&case.reference(split), &starts, case.layout.num_heads);
    harness.compare(label, &out, &merged, ATTENTION);
    // The other opinion: attention over the whole context at once.
    let chunks: Vec<Chunk<'_>> = case
        .block_tables
        .iter()
        .zip(&case.context_lens)
        .enumerate()
        .map(|(row, (block_table, &context_len))| Chunk { row, query_len: 1, context_len, block_table })
        .collect();
    let heads = case.layout.num_heads;
    let whole = reference::paged_attention_prefill(&case.query, case.view(), &chunks, heads, case.scale);
    harness.compare(&format!("{label} against the whole"), &out, &whole, ATTENTION);
}

fn shuffled_blocks_give_the_same_bits(harness: &mut Harness) {
    let case = Case::new(harness, [9, 3, 64], KvCacheDtype::F16, &[70, 33], 3, f32::NAN);
    let first = run(harness, &case);
    // The same vectors in other physical blocks: block b moves to b · 11 mod 37.
    let mut moved =
        Case { key: case.key.clone(), value: case.value.clone(), query: case.query.clone(), ..clone(&case) };
    let len = case.layout.block_bytes() / 2;
    for block in 0..case.layout.num_blocks {
        let to = block * 11 % case.layout.num_blocks;
        moved.key[to * len..][..len].copy_from_slice(&case.key[block * len..][..len]);
        moved.value[to * len..][..len].copy_from_slice(&case.value[block * len..][..len]);
    }
    for table in &mut moved.block_tables {
        for block_id in table {
            *block_id = *block_id * 11 % case.layout.num_blocks as u32;
        }
    }
    let second = run(harness, &moved);
    harness.same_bits("paged_attention_reduce shuffled blocks", &first, &second);
}

fn clone(case: &Case) -> Case {
    Case {
        layout: case.layout.clone(),
        query: Vec::new(),
        key: Vec::new(),
        value: Vec::new(),
        block_tables: case.block_tables.clone(),
        context_lens: case.context_lens.clone(),
        scale: case.scale,
    }
}
