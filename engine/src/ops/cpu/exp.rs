//! The exponential in plain f32 operations: the same bits on every machine, and a loop of it becomes vector instructions.
//!
//! Used by attention's softmax, the activations and the soft caps. Range reduction by ln 2 in two parts and a polynomial of degree six on
//! the rest (Cephes' expf, Moshier 1989), within two units in the last place.

/// e^x; 0 below −87, infinity above 88.7; NaN stays NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Adding and subtracting it rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 89.0);
    let n = clamped.mul_add(std::f32::consts::LOG2_E, ROUND) - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, clamped));
    let mut p = 1.987_569_1e-4f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p.mul_add(r, coefficient);
    }
    let y = p.mul_add(r * r, r) + 1.0;
    // 2ⁿ in two factors, since 2¹²⁸ is no f32 while the product may be.
    let half = (n * 0.5) as i32;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let scaled = y * power(half) * power(n as i32 - half);
    if x < -87.0 { 0.0 } else { scaled }
}

/// cap · tanh(x / cap), by the exponential.
#[inline(always)]
pub(super) fn soft_cap(x: f32, cap: f32) -> f32 {
    cap * (1.0 - 2.0 / (exp(2.0 * x / cap) + 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in -870_000..887_000 {
            let x = i as f32 * 1e-4;
            let (got, expected) = (f64::from(exp(x)), f64::from(x).exp());
            worst = worst.max((got - expected).abs() / expected);
        }
        assert!(worst < 2.4e-7, "relative error {worst:e}");
    }

    #[test]
    fn soft_caps_are_those_of_the_hyperbolic_tangent() {
        for x in [-1e6f32, -60.0, -1.0, -1e-3, 0.0, 0.5, 49.0, 200.0, f32::INFINITY] {
            let expected = 50.0 * (f64::from(x) / 50.0).tanh();
            assert!((f64::from(soft_cap(x, 50.0)) - expected).abs() < 2e-5, "{x}");
        }
        assert!(soft_cap(f32::NAN, 50.0).is_nan());
    }

    #[test]
    fn ends_are_what_they_should_be() {
        assert_eq!((exp(0.0), exp(-1e30), exp(f32::NEG_INFINITY), exp(200.0)), (1.0, 0.0, 0.0, f32::INFINITY));
        assert!(exp(f32::NAN).is_nan());
    }
}
