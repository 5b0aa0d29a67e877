//! `argmax.wgsl`: widths around the workgroup, ties, one value, NaN anywhere, infinities.

use crate::harness::Harness;
use engine::kernels::argmax;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    for width in [1, 63, 64, 65, 1000, 49_152] {
        let mut values = harness.random(width * 6);
        let last = width - 1;
        // Row by row: random, a tie of the first and the last, all equal, infinities, a NaN first, a NaN last.
        values[width] = 5.0;
        values[width + last] = 5.0;
        values[2 * width..3 * width].fill(-1.0);
        values[3 * width] = f32::NEG_INFINITY;
        values[3 * width + last] = f32::INFINITY;
        values[4 * width] = f32::NAN;
        values[5 * width + last] = f32::from_bits(0xffc0_0001);
        let plan = harness.plans[0].clone();
        let (buffer, out) = (harness.upload(&values), harness.output(12));
        argmax(&mut harness.encoder, &plan, &buffer, &out.buffer, width as u32, 6).unwrap();
        let got = harness.words(&format!("argmax {width}"), &out);
        for (row, expected) in reference::argmax(&values, width).into_iter().enumerate() {
            match expected {
                Some((index, value)) => assert_eq!(&got[row * 2..][..2], [index, value.to_bits()], "{width} row {row}"),
                None => assert_eq!(got[row * 2], u32::MAX, "{width} row {row}: a NaN was not seen"),
            }
        }
        harness.num_comparisons += 1;
    }
}
