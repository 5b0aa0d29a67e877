//! `token_logprobs.wgsl`: widths around the workgroup, the likeliest and the least likely, large logits, no token.

use crate::harness::Harness;
use engine::kernels::token_logprobs;
use shaders::reference;

pub fn test(harness: &mut Harness) {
    for width in [1usize, 255, 256, 257, 49_152] {
        let mut logits: Vec<f32> = harness.random(width * 4).iter().map(|x| x * 20.0).collect();
        logits[width..2 * width].iter_mut().for_each(|x| *x += 500.0);
        let row_of = |row: usize| &logits[row * width..][..width];
        let index_of = |row: usize, better: fn(f32, f32) -> bool| {
            let values = row_of(row);
            (0..width).fold(0, |best, i| if better(values[i], values[best]) { i } else { best }) as u32
        };
        let tokens = [index_of(0, |a, b| a > b), index_of(1, |a, b| a < b), width as u32 / 2, u32::MAX];
        let plan = harness.plans[0].clone();
        let (buffer, token_buffer, out) = (harness.upload(&logits), harness.upload(&tokens), harness.output(16));
        let label = format!("token_logprobs {width}");
        let encoder = &mut harness.encoder;
        token_logprobs(encoder, &plan, &buffer, &token_buffer, &out.buffer, width as u32, 4).unwrap();
        let got = harness.words(&label, &out);
        for (row, &token) in tokens[..3].iter().enumerate() {
            let (logit, log_sum, rank) = reference::token_logprobs(row_of(row), token);
            let words = &got[row * 4..][..4];
            let float = |word: u32| f64::from(f32::from_bits(word));
            assert_eq!((float(words[0]), words[2]), (logit, rank), "{label} row {row}");
            let off = (float(words[1]) - log_sum).abs();
            assert!(off <= 1e-5 + 1e-6 * log_sum.abs(), "{label} row {row}: {} against {log_sum}", float(words[1]));
        }
        assert_eq!(got[12..], [0; 4], "{label}: no token");
        harness.num_comparisons += 1;
    }
}
