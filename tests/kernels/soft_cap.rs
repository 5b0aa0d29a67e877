//! `soft_cap.wgsl`: small values that stay, large ones of both signs that become the cap.

use crate::harness::{F32, Harness};
use engine::kernels::soft_cap;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for len in [1, 63, 64, 65, 1000] {
        let mut values: Vec<f32> = harness.random(len).iter().map(|x| x * 60.0).collect();
        values[0] = -1e6;
        let out = harness.output_of(&values);
        soft_cap(&mut harness.encoder, &plan, &out.buffer, 30.0, len as u32).unwrap();
        harness.compare(&format!("soft_cap {len}"), &out, &reference::soft_cap(&values, 30.0), F32);
    }
}
