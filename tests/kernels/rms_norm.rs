//! `rms_norm.wgsl`: widths around the workgroup's stride, rows one and several; accumulated; rounded to int8 beside.

use crate::harness::{F32, Harness};
use engine::kernels::{Norm, RoundedTo, quantize_activations, rms_norm};
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (width, rows) in [(4, 1), (32, 3), (252, 2), (256, 1), (260, 2), (576, 5), (2048, 2)] {
        let (input, weight) = (harness.random(width * rows), harness.random(width));
        let (a, b) = (harness.upload(&input), harness.upload(&weight));
        let expected = reference::rms_norm(&input, &weight, 1e-5);
        let norm = Norm { width: width as u32, epsilon: 1e-5, num_rows: rows as u32, accumulate: false };
        let outputs = [harness.output(width * rows), harness.output(width * rows)];
        for out in &outputs {
            rms_norm(&mut harness.encoder, &plan, norm, &a, &b, &out.buffer, None).unwrap();
        }
        let label = format!("rms_norm {width}x{rows}");
        harness.compare(&label, &outputs[0], &expected, F32);
        harness.same_bits(&label, &outputs[0], &outputs[1]);
        let previous = harness.random(width * rows);
        let out = harness.output_of(&previous);
        let adding = Norm { accumulate: true, ..norm };
        rms_norm(&mut harness.encoder, &plan, adding, &a, &b, &out.buffer, None).unwrap();
        let sum: Vec<f64> = expected.iter().zip(&previous).map(|(x, &before)| x + f64::from(before)).collect();
        harness.compare(&format!("{label} accumulated"), &out, &sum, F32);
        if width % 32 == 0 {
            // The rounding beside is what rounding afterwards gives, to the bit.
            let (values, num_blocks) = (harness.output(width * rows), width * rows / 32);
            let beside = [harness.output(num_blocks * 8), harness.output(num_blocks * 2)];
            let to = RoundedTo { codes: &beside[0].buffer, block_scales: &beside[1].buffer };
            rms_norm(&mut harness.encoder, &plan, norm, &a, &b, &values.buffer, Some(to)).unwrap();
            harness.same_bits(&format!("{label} rounded"), &values, &outputs[0]);
            let after = [harness.output(num_blocks * 8), harness.output(num_blocks * 2)];
            let (encoder, count) = (&mut harness.encoder, num_blocks as u32);
            quantize_activations(encoder, &plan, &values.buffer, &after[0].buffer, &after[1].buffer, count).unwrap();
            harness.same_bits(&format!("{label} codes"), &beside[0], &after[0]);
            harness.same_bits(&format!("{label} scales"), &beside[1], &after[1]);
        }
    }
}
