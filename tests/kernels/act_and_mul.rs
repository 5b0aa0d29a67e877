//! `act_and_mul.wgsl`: both activations, widths around the workgroup, large arguments of both signs; rounded to int8 beside.

use crate::harness::{F32, Harness};
use engine::kernels::{RoundedTo, act_and_mul, quantize_activations};
use engine::model::Activation;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (activation, is_gelu) in [(Activation::Silu, false), (Activation::Gelu, true)] {
        for (width, rows) in [(32, 1), (96, 1), (2048, 2), (2080, 3), (1536, 3)] {
            let mut gate_up = harness.random(2 * width * rows);
            (gate_up[0], gate_up[1]) = (80.0, -80.0);
            let source = harness.upload(&gate_up);
            let out = harness.output(width * rows);
            let (encoder, output) = (&mut harness.encoder, &out.buffer);
            let (columns, count) = (width as u32, rows as u32);
            act_and_mul(encoder, &plan, activation, &source, output, None, columns, count).unwrap();
            let expected = reference::act_and_mul(&gate_up, width, is_gelu);
            let label = format!("act_and_mul {activation:?} {rows}x{width}");
            harness.compare(&label, &out, &expected, F32);
            // The rounding beside is what rounding afterwards gives, to the bit.
            let (values, num_blocks) = (harness.output(width * rows), width * rows / 32);
            let beside = [harness.output(num_blocks * 8), harness.output(num_blocks * 2)];
            let after = [harness.output(num_blocks * 8), harness.output(num_blocks * 2)];
            let to = RoundedTo { codes: &beside[0].buffer, block_scales: &beside[1].buffer };
            let encoder = &mut harness.encoder;
            act_and_mul(encoder, &plan, activation, &source, &values.buffer, Some(to), columns, count).unwrap();
            let count = num_blocks as u32;
            quantize_activations(encoder, &plan, &values.buffer, &after[0].buffer, &after[1].buffer, count).unwrap();
            harness.same_bits(&format!("{label} codes"), &beside[0], &after[0]);
            harness.same_bits(&format!("{label} scales"), &beside[1], &after[1]);
        }
    }
}
