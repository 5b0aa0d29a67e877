//! `add_bias.wgsl`: widths around the workgroup, several rows.

use crate::harness::{F32, Harness};
use engine::kernels::add_bias;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (width, rows) in [(4, 1), (260, 1), (64, 5), (960, 3)] {
        let (bias, values) = (harness.random(width), harness.random(width * rows));
        let (source, out) = (harness.upload(&bias), harness.output_of(&values));
        add_bias(&mut harness.encoder, &plan, &source, &out.buffer, width as u32, rows as u32).unwrap();
        harness.compare(&format!("add_bias {rows}x{width}"), &out, &reference::add_bias(&bias, &values), F32);
    }
}
