//! `top_k.wgsl`: k of one and of all, ties for the last place, negatives.

use crate::harness::Harness;
use engine::kernels::top_k;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    for (width, k) in [(1, 1), (300, 1), (300, 40), (300, 300), (256, 7), (49_152, 64)] {
        let mut values = harness.random(width * 3);
        // Ties for the last place: the second row has few distinct values, the third is all equal.
        for value in &mut values[width..2 * width] {
            *value = (*value * 4.0).round() - 2.0;
        }
        values[2 * width..].fill(0.0);
        let label = format!("top_k {k} of {width}");
        let got = run(harness, &label, &values, width, k);
        for (row, expected) in reference::top_k(&values, width, k).into_iter().enumerate() {
            let mut pairs: Vec<(u32, f32)> =
                got[row * k * 2..][..k * 2].chunks(2).map(|p| (p[0], f32::from_bits(p[1]))).collect();
            pairs.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            assert_eq!(Some(pairs), expected, "{label} row {row}");
        }
        harness.num_comparisons += 1;
    }
}

fn run(harness: &mut Harness, label: &str, values: &[f32], width: usize, k: usize) -> Vec<u32> {
    let plan = harness.plans[0].clone();
    let rows = values.len() / width;
    let buffer = harness.upload(values);
    let top = harness.output(rows * k * 2);
    let (width, k, num_rows) = (width as u32, k as u32, rows as u32);
    top_k(&mut harness.encoder, &plan, &buffer, &top.buffer, width, k, num_rows).unwrap();
    harness.words(label, &top)
}
