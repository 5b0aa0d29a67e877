//! `act_and_mul.wgsl`: both activations, widths around the workgroup, large arguments of both signs.

use crate::harness::{F32, Harness};
use engine::kernels::act_and_mul;
use engine::model::Activation;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (activation, is_gelu) in [(Activation::Silu, false), (Activation::Gelu, true)] {
        for (width, rows) in [(4, 1), (252, 1), (256, 2), (260, 3), (1536, 3)] {
            let mut gate_up = harness.random(2 * width * rows);
            (gate_up[0], gate_up[1]) = (80.0, -80.0);
            let source = harness.upload(&gate_up);
            let out = harness.output(width * rows);
            let (encoder, output) = (&mut harness.encoder, &out.buffer);
            act_and_mul(encoder, &plan, activation, &source, output, width as u32, rows as u32).unwrap();
            let expected = reference::act_and_mul(&gate_up, width, is_gelu);
            harness.compare(&format!("act_and_mul {activation:?} {rows}x{width}"), &out, &expected, F32);
        }
    }
}
