//! `rotary_embedding.wgsl`: both pair orders, partial rotation, several heads and tokens.

use crate::harness::{F32, Harness};
use engine::kernels::rotary_embedding;
use engine::ops::rotary::Rotary;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (heads, head_dim, rotary_dim, halves) in
        [(1, 8, 8, false), (9, 64, 64, false), (3, 64, 32, false), (3, 64, 64, true), (2, 128, 96, true)]
    {
        let positions = [0u32, 1, 15, 16, 8191];
        let rotary = Rotary::new(100_000.0, rotary_dim, 1.0, None);
        let rotations = rotary.table(&positions);
        let values = harness.random(positions.len() * heads * head_dim);
        let stride = if halves { rotary_dim / 2 } else { 1 };
        let expected = reference::rotary_embedding(&rotations, &values, heads, head_dim, stride);
        let (table, out) = (harness.upload(&rotations), harness.output_of(&values));
        rotary_embedding(
            &mut harness.encoder,
            &plan,
            &table,
            &out.buffer,
            heads as u32,
            head_dim as u32,
            rotary.num_pairs() as u32,
            stride as u32,
            positions.len() as u32,
        )
        .unwrap();
        harness.compare(&format!("rotary_embedding {heads}x{head_dim} {rotary_dim} {halves}"), &out, &expected, F32);
    }
}
