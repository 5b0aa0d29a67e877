//! `quantize_activations.wgsl`: codes within one step of the reference, exact scales, zero blocks, NaN passed on.

use crate::harness::Harness;
use engine::kernels::quantize_activations;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    let plan = harness.plans[0].clone();
    for num_blocks in [1usize, 2, 63, 64, 65, 500] {
        let mut input = harness.random(num_blocks * 32);
        input[..32].fill(if num_blocks == 2 { 0.0 } else { 1.0 });
        let buffer = harness.upload(&input);
        let (codes, scales) = (harness.output(num_blocks * 8), harness.output(num_blocks * 2));
        let blocks = num_blocks as u32;
        quantize_activations(&mut harness.encoder, &plan, &buffer, &codes.buffer, &scales.buffer, blocks).unwrap();
        let label = format!("quantize_activations {num_blocks}");
        let expected = reference::quantize_activations(&input);
        let got: Vec<i8> = bytemuck::cast_slice::<u32, i8>(&harness.words(&label, &codes)).to_vec();
        let differing = got.iter().zip(&expected.codes).filter(|(a, b)| a != b).count();
        assert!(
            got.iter().zip(&expected.codes).all(|(&a, &b)| (i16::from(a) - i16::from(b)).abs() <= 1),
            "{label}: codes"
        );
        assert!(differing * 1000 <= got.len(), "{label}: {differing} of {} codes differ", got.len());
        for (block, pair) in harness.floats(&label, &scales).chunks(2).enumerate() {
            let sum: i32 = got[block * 32..][..32].iter().map(|&code| i32::from(code)).sum();
            assert!(
                (pair[0] - expected.scales[block]).abs() <= 1e-6 * expected.scales[block],
                "{label}: scale {block}"
            );
            assert!((pair[1] - pair[0] * sum as f32).abs() <= 1e-5, "{label}: sum of block {block}");
        }
        harness.num_comparisons += 2;
    }
    for bad in [f32::NAN, f32::INFINITY] {
        let mut input = harness.random(64);
        input[40] = bad;
        let buffer = harness.upload(&input);
        let (codes, scales) = (harness.output(16), harness.output(4));
        quantize_activations(&mut harness.encoder, &plan, &buffer, &codes.buffer, &scales.buffer, 2).unwrap();
        let got = harness.floats("quantize_activations NaN", &scales);
        assert!(got[2].is_nan() && !got[0].is_nan(), "{bad} must reach the scale: {got:?}");
        harness.num_comparisons += 1;
    }
}
