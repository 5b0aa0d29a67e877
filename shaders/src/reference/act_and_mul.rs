//! Reference of `act_and_mul.wgsl`.

/// activation(gate) · up, of rows of `width` values of gate, then as many of up. `is_gelu` is the tanh form of GELU; else
/// SiLU.
pub fn act_and_mul(gate_up: &[f32], width: usize, is_gelu: bool) -> Vec<f64> {
    let activated = |x: f64| {
        if is_gelu {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
        } else {
            x / (1.0 + (-x).exp())
        }
    };
    gate_up
        .chunks(2 * width)
        .flat_map(|row| {
            let (gate, up) = row.split_at(width);
            gate.iter().zip(up).map(|(&gate, &up)| activated(f64::from(gate)) * f64::from(up)).collect::<Vec<_>>()
        })
        .collect()
}
