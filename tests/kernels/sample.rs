//! `sample.wgsl`: each truncation and all together against the intervals of the reference, the other kinds of choice, a NaN,
//! and frequencies against probabilities.

use crate::harness::Harness;
use engine::kernels::{argmax, sample};
use shaders::params::RowDraw;
use shaders::reference;

/// Rounding of f32 sums over a row, as part of its total.
const ROUNDING: f64 = 3e-5;

fn draw(top_k: u32, top_p: f32, min_p: f32) -> RowDraw {
    RowDraw { kind: 1, inverse_temperature: 1.3, top_k, top_p, min_p, ..Default::default() }
}

pub fn test(harness: &mut Harness) {
    let truncations = [
        draw(0, 1.0, 0.0),
        draw(7, 1.0, 0.0),
        draw(0, 0.6, 0.0),
        draw(0, 1.0, 0.05),
        draw(50, 0.9, 0.01),
        draw(1, 0.1, 0.0),
    ];
    for width in [1, 255, 256, 257, 3000, 49_152] {
        // Wide logits, so that weights span many magnitudes; some equal, so that bounds meet ties.
        let mut scores: Vec<f32> = harness.random(width).iter().map(|x| x * 6.0).collect();
        for i in (0..width).step_by(9) {
            scores[i] = (scores[i] * 2.0).round() / 2.0;
        }
        for (index, truncation) in truncations.iter().enumerate() {
            let draws: Vec<RowDraw> =
                (0..12).map(|i| RowDraw { uniform: i as f32 / 12.0 + 0.001 * index as f32, ..*truncation }).collect();
            let label = format!("sample {width}, truncation {index}");
            let chosen = run(harness, &label, &scores, &draws);
            let intervals = reference::sample(&scores, truncation);
            for (draw, token) in draws.iter().zip(chosen) {
                let interval = intervals.iter().find(|(kept, ..)| *kept == token);
                let (_, from, to) = interval.unwrap_or_else(|| panic!("{label}: token {token} is cut off"));
                let uniform = f64::from(draw.uniform);
                let holds = *from - ROUNDING <= uniform && uniform <= *to + ROUNDING;
                assert!(holds, "{label}: token {token} is drawn at {from}..{to}, not at {uniform}");
            }
            harness.num_comparisons += 1;
        }
    }
    other_choices(harness);
    frequencies(harness);
}

fn run(harness: &mut Harness, label: &str, scores: &[f32], draws: &[RowDraw]) -> Vec<u32> {
    let rows = scores.repeat(draws.len());
    run_rows(harness, label, &rows, scores.len(), draws)
}

fn run_rows(harness: &mut Harness, label: &str, rows: &[f32], width: usize, draws: &[RowDraw]) -> Vec<u32> {
    let plan = harness.plans[0].clone();
    let (scores, draw_buffer) = (harness.upload(rows), harness.upload(draws));
    let (best, chosen) = (harness.output(draws.len() * 2), harness.output(draws.len()));
    let (width, num_rows) = (width as u32, draws.len() as u32);
    let encoder = &mut harness.encoder;
    argmax(encoder, &plan, &scores, &best.buffer, width, num_rows).unwrap();
    sample(encoder, &plan, &scores, &best.buffer, &draw_buffer, &chosen.buffer, width, num_rows).unwrap();
    harness.words(label, &chosen)
}

fn other_choices(harness: &mut Harness) {
    let mut rows = vec![0.5f32; 4 * 300];
    rows[7] = 2.0;
    rows[900] = f32::NAN;
    // Forbidden as adjust_logits forbids: never drawn.
    rows[600..899].fill(-1e30);
    let given = RowDraw { kind: 2, token: 31, ..Default::default() };
    let all = RowDraw { uniform: 0.9999, ..draw(0, 1.0, 0.0) };
    let draws = [RowDraw::default(), given, all, all];
    let chosen = run_rows(harness, "sample, other choices", &rows, 300, &draws);
    assert_eq!(chosen, [7, 31, 299, u32::MAX]);
    harness.num_comparisons += 1;
}

fn frequencies(harness: &mut Harness) {
    let scores = [0.0f32, 1.0, -2.0, 0.5, 3.0];
    let truncation = RowDraw { inverse_temperature: 0.8, ..draw(0, 0.97, 0.0) };
    let expected = reference::sample(&scores, &truncation);
    let draws: Vec<RowDraw> = (0..20_000)
        .map(|position| RowDraw { uniform: engine::sampler::uniform(5, 0, position), ..truncation })
        .collect();
    let chosen = run(harness, "sample, frequencies", &scores, &draws);
    assert!(expected.len() < scores.len(), "top-p cuts the least likely");
    for (token, from, to) in expected {
        let drawn = chosen.iter().filter(|chosen| **chosen == token).count() as f64 / 20_000.0;
        // Four standard deviations of a binomial at 20,000 draws are below 0.0142.
        assert!((drawn - (to - from)).abs() < 0.0142, "token {token}: {drawn} against {}", to - from);
    }
    harness.num_comparisons += 1;
}
