//! `rms_norm.wgsl`: widths around the workgroup's stride, rows one and several.

use crate::harness::{F32, Harness};
use engine::kernels::rms_norm;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (width, rows) in [(4, 1), (32, 3), (252, 2), (256, 1), (260, 2), (576, 5), (2048, 2)] {
        let (input, weight) = (harness.random(width * rows), harness.random(width));
        let (a, b) = (harness.upload(&input), harness.upload(&weight));
        let expected = reference::rms_norm(&input, &weight, 1e-5);
        let outputs = [harness.output(width * rows), harness.output(width * rows)];
        for out in &outputs {
            rms_norm(&mut harness.encoder, &plan, &a, &b, &out.buffer, width as u32, 1e-5, rows as u32, false).unwrap();
        }
        let label = format!("rms_norm {width}x{rows}");
        harness.compare(&label, &outputs[0], &expected, F32);
        harness.same_bits(&label, &outputs[0], &outputs[1]);
        let previous = harness.random(width * rows);
        let out = harness.output_of(&previous);
        rms_norm(&mut harness.encoder, &plan, &a, &b, &out.buffer, width as u32, 1e-5, rows as u32, true).unwrap();
        let expected: Vec<f64> = expected.iter().zip(&previous).map(|(x, &before)| x + f64::from(before)).collect();
        harness.compare(&format!("{label} accumulated"), &out, &expected, F32);
    }
}
