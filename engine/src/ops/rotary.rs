//! The rotary table: (cos, sin) of each row's position at each frequency, in f64 on the host for every device.
//!
//! Called by both ops at the start of a step. A GPU's own sine loses digits at large positions, and a host table makes
//! the devices agree bit for bit.

/// Frequencies of one model.
#[derive(Clone, Debug)]
pub struct Rotary {
    frequencies: Vec<f64>,
}

impl Rotary {
    /// θ^(−2i/rotary_dim) / scale, divided by `factors` where the file has them (`rope_freqs.weight`).
    pub fn new(theta: f64, rotary_dim: usize, scale: f64, factors: Option<&[f32]>) -> Self {
        let frequencies = (0..rotary_dim / 2)
            .map(|pair| {
                let factor = factors.map_or(1.0, |factors| f64::from(factors[pair]));
                theta.powf(-2.0 * pair as f64 / rotary_dim as f64) / (scale * factor)
            })
            .collect();
        Self { frequencies }
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
                    [cos as f32, sin as f32]
                })
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_pair_turns_by_one_radian_a_position() {
        let rotary = Rotary::new(10_000.0, 4, 1.0, None);
        let table = rotary.table(&[0, 2]);
        assert_eq!(table[0], [1.0, 0.0]);
        assert_eq!(table[2], [2f64.cos() as f32, 2f64.sin() as f32]);
        assert_eq!(table[3], [0.02f64.cos() as f32, 0.02f64.sin() as f32]);
    }
}
