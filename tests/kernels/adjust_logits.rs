//! `adjust_logits.wgsl`: every kind of change, logits of both signs and zero, entries around the workgroup.

use crate::harness::{F32, Harness};
use engine::kernels::adjust_logits;
use shaders::params::LogitEntry;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    for (width, num_entries) in [(1, 1), (300, 63), (300, 64), (300, 65), (5000, 1500)] {
        let mut logits = harness.random(width);
        logits[0] = 0.0;
        let random = harness.random(num_entries * 3);
        let entries: Vec<LogitEntry> = (0..num_entries as u32)
            .map(|i| LogitEntry {
                // Distinct, in no order.
                index: (i * 7) % width as u32,
                bias: random[i as usize * 3],
                repetition: 1.0 + random[i as usize * 3 + 1].abs(),
                subtract: if i % 5 == 0 { 1e30 } else { random[i as usize * 3 + 2] },
            })
            .collect();
        let plan = harness.plans[0].clone();
        let (buffer, out) = (harness.upload(&entries), harness.output_of(&logits));
        adjust_logits(&mut harness.encoder, &plan, &buffer, &out.buffer, num_entries as u32).unwrap();
        let expected = reference::adjust_logits(&entries, &logits);
        harness.compare(&format!("adjust_logits {num_entries} of {width}"), &out, &expected, F32);
    }
}
