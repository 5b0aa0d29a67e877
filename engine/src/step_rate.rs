//! How fast steps have been, and how many prompt tokens fit beside running streams.
//!
//! Fed by the engine loop with each step's duration; asked by `Engine::begin`. Pure: durations come in as values.

/// Weight of the newest step in the running means.
const NEWEST: f64 = 0.2;
/// Prompt tokens that a step takes beside streams before their cost is known, and at least ever: progress.
const LEAST_PREFILL: usize = 8;

/// Running means of what steps cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepRate {
    /// Seconds of a step that only decodes.
    decode_step_s: Option<f64>,
    /// Seconds a prompt token adds to a step.
    prefill_token_s: Option<f64>,
}

impl StepRate {
    /// Notes a step.
    pub fn observe(&mut self, num_decodes: usize, num_prefill_tokens: usize, seconds: f64) {
        if num_prefill_tokens == 0 {
            mix(&mut self.decode_step_s, seconds);
            return;
        }
        let decode_s = if num_decodes == 0 { 0.0 } else { self.decode_step_s.unwrap_or(0.0) };
        mix(&mut self.prefill_token_s, (seconds - decode_s).max(0.0) / num_prefill_tokens as f64);
    }

    /// Prompt tokens that a step may take so that it stays within `max_step_s`. Unbounded where nobody would wait for it.
    pub fn prefill_budget(&self, num_running: usize, max_step_s: f64) -> usize {
        if num_running == 0 {
            return usize::MAX;
        }
        let Some(token_s) = self.prefill_token_s.filter(|seconds| *seconds > 0.0) else { return LEAST_PREFILL };
        let left_s = max_step_s - self.decode_step_s.unwrap_or(0.0);
        ((left_s / token_s).max(0.0) as usize).max(LEAST_PREFILL)
    }

    /// Seconds of a step that only decodes; 0 until one ran.
    pub fn decode_step_s(&self) -> f64 {
        self.decode_step_s.unwrap_or(0.0)
    }

    /// Prompt tokens a second; 0 until some were computed.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        self.prefill_token_s.filter(|seconds| *seconds > 0.0).map_or(0.0, |seconds| 1.0 / seconds)
    }
}

fn mix(mean: &mut Option<f64>, value: f64) {
    *mean = Some(mean.map_or(value, |mean| mean + NEWEST * (value - mean)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_takes_as_many_prompt_tokens_as_fit_beside_the_streams() {
        let mut rate = StepRate::default();
        assert_eq!((rate.prefill_budget(0, 0.1), rate.prefill_budget(1, 0.1)), (usize::MAX, LEAST_PREFILL));
        rate.observe(0, 500, 0.5);
        rate.observe(8, 0, 0.04);
        assert_eq!(rate.prefill_budget(1, 0.1), 60, "60 ms are left, at 1 ms a token");
        assert_eq!(rate.prefill_budget(1, 0.01), LEAST_PREFILL, "progress, however slow the device");
        for _ in 0..100 {
            rate.observe(8, 60, 0.04 + 0.06 * 2.0);
        }
        assert_eq!(rate.prefill_budget(1, 0.1), 30, "it follows what steps cost");
        assert!((rate.prefill_tokens_per_s() - 500.0).abs() < 1.0 && (rate.decode_step_s() - 0.04).abs() < 1e-9);
    }
}
