//! `gather_rows.wgsl`: rows in any order, repeated, the last.

use crate::harness::{EXACT, Harness};
use engine::kernels::gather_rows;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for (width, rows) in [(4, vec![0u32]), (256, vec![4, 0, 4]), (260, vec![2]), (576, vec![4, 3, 2, 1, 0])] {
        let input = harness.random(width * 5);
        let (a, b) = (harness.upload(&input), harness.upload(&rows));
        let out = harness.output(width * rows.len());
        gather_rows(&mut harness.encoder, &plan, &a, &b, &out.buffer, width as u32, rows.len() as u32).unwrap();
        let expected = reference::gather_rows(&input, &rows, width);
        harness.compare(&format!("gather_rows {width} {rows:?}"), &out, &expected, EXACT);
    }
}
