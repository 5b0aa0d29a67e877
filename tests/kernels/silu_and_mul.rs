//! `silu_and_mul.wgsl`: lengths around the workgroup, large arguments of both signs.

use crate::harness::{F32, Harness};
use engine::kernels::silu_and_mul;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for len in [4, 252, 256, 260, 1536 * 3] {
        let mut gate = harness.random(len);
        gate[0] = 80.0;
        gate[1] = -80.0;
        let up = harness.random(len);
        let out = harness.output_of(&gate);
        let b = harness.upload(&up);
        silu_and_mul(&mut harness.encoder, &plan, &out.buffer, &b, len as u32).unwrap();
        harness.compare(&format!("silu_and_mul {len}"), &out, &reference::silu_and_mul(&gate, &up), F32);
    }
}
