//! The rotary table: (cos, sin) of each row's position at each frequency, in f64 on the host for every device.
//!
//! Called by both ops at the start of a step. A GPU's own sine loses digits at large positions, and a host table makes
//! the devices agree bit for bit.

use std::f64::consts::TAU;

use crate::model::{RopeScaling, RotaryConfig};

/// Frequencies of one table.
#[derive(Clone, Debug)]
pub struct Rotary {
    frequencies: Vec<f64>,
    /// What sines and cosines are multiplied by.
    factor: f64,
}

impl Rotary {
    /// The frequencies of a table for texts of up to `max_model_len` tokens: θ^(−2i/dim), scaled.
    pub fn new(config: &RotaryConfig, max_model_len: usize) -> Self {
        let dim = config.dim as f64;
        let of = |theta: f64| (0..config.dim / 2).map(move |pair| theta.powf(-2.0 * pair as f64 / dim));
        let (mut frequencies, mut factor): (Vec<f64>, f64) = (of(config.theta).collect(), 1.0);
        match &config.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => frequencies.iter_mut().for_each(|frequency| *frequency /= factor),
            RopeScaling::Dynamic { factor, original } => {
                // The longest text has `original` · `factor` tokens.
                let grown = factor * (original * factor) / original - (factor - 1.0);
                frequencies = of(config.theta * grown.powf(dim / (dim - 2.0))).collect();
            }
            RopeScaling::Llama3 { factor, low, high, original } => frequencies.iter_mut().for_each(|frequency| {
                let turns = original * *frequency / TAU;
                let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                *frequency = (1.0 - kept) * *frequency / factor + kept * *frequency;
            }),
            RopeScaling::Yarn { factor: stretch, original, beta_fast, beta_slow, attention_factor } => {
                let pair_of = |turns: f64| dim * (original / (turns * TAU)).ln() / (2.0 * config.theta.ln());
                let first = pair_of(*beta_fast).floor().max(0.0);
                let last = pair_of(*beta_slow).ceil().min(dim - 1.0);
                for (pair, frequency) in frequencies.iter_mut().enumerate() {
                    let divided = ((pair as f64 - first) / (last - first).max(0.001)).clamp(0.0, 1.0);
                    *frequency = divided * *frequency / stretch + (1.0 - divided) * *frequency;
                }
                factor = *attention_factor;
            }
            RopeScaling::Factors { short, long, original, attention_factor } => {
                let factors = if max_model_len > *original { long } else { short };
                frequencies.iter_mut().zip(factors).for_each(|(frequency, factor)| *frequency /= factor);
                factor = *attention_factor;
            }
        }
        Self { frequencies, factor }
    }

    /// Rotated pairs of a head.
    pub fn num_pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// (cos, sin) by row and pair.
    pub fn table(&self, positions: &[u32]) -> Vec<[f32; 2]> {
        positions
            .iter()
            .flat_map(|&position| {
                self.frequencies.iter().map(move |frequency| {
                    let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                    [(cos * self.factor) as f32, (sin * self.factor) as f32]
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(scaling: RopeScaling, max_model_len: usize) -> Vec<f64> {
        Rotary::new(&RotaryConfig { theta: 10_000.0, dim: 8, scaling }, max_model_len).frequencies
    }

    fn assert_close(got: &[f64], expected: [f64; 4]) {
        for (got, expected) in got.iter().zip(expected) {
            assert!((got / expected - 1.0).abs() < 1e-6, "{got} and {expected}");
        }
    }

    #[test]
    fn first_pair_turns_by_one_radian_a_position() {
        let rotary = Rotary::new(&RotaryConfig::plain(10_000.0, 4), 100);
        let table = rotary.table(&[0, 2]);
        assert_eq!(table[0], [1.0, 0.0]);
        assert_eq!(table[2], [2f64.cos() as f32, 2f64.sin() as f32]);
        assert_eq!(table[3], [0.02f64.cos() as f32, 0.02f64.sin() as f32]);
    }

    #[test]
    fn scalings_are_those_of_the_reference_implementations() {
        // From Hugging Face transformers' ROPE_INIT_FUNCTIONS (tests/golden/make_rope.py): theta 10,000, eight values.
        let golden: serde_json::Value =
            serde_json::from_str(include_str!("../../../tests/golden/rope.json")).unwrap_or_default();
        let of = |name: &str| -> [f64; 4] { std::array::from_fn(|i| golden[name][i].as_f64().unwrap_or(f64::NAN)) };
        assert_close(&frequencies(RopeScaling::None, 1), of("default"));
        assert_close(&frequencies(RopeScaling::Linear { factor: 4.0 }, 1), of("linear"));
        let dynamic = RopeScaling::Dynamic { factor: 4.0, original: 64.0 };
        assert_close(&frequencies(dynamic, 1), of("dynamic"));
        let llama3 = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 512.0 };
        assert_close(&frequencies(llama3, 1), of("llama3"));
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original: 512.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 0.1 * 4f64.ln() + 1.0,
        };
        assert_close(&frequencies(yarn.clone(), 1), of("yarn"));
        let table = Rotary::new(&RotaryConfig { theta: 10_000.0, dim: 8, scaling: yarn }, 1).table(&[0]);
        assert!((f64::from(table[0][0]) / golden["yarn_factor"].as_f64().unwrap_or(f64::NAN) - 1.0).abs() < 1e-6);
        let factors = RopeScaling::Factors {
            short: vec![1.0, 1.5, 2.0, 3.0],
            long: vec![1.0, 4.0, 8.0, 16.0],
            original: 64,
            attention_factor: 1.0,
        };
        assert_close(&frequencies(factors.clone(), 64), of("longrope_short"));
        assert_close(&frequencies(factors, 65), of("longrope_long"));
    }
}
