//! Reference of `adjust_logits.wgsl`.

use crate::params::LogitEntry;

/// The logits after all `entries`.
pub fn adjust_logits(entries: &[LogitEntry], logits: &[f32]) -> Vec<f64> {
    let mut adjusted: Vec<f64> = logits.iter().map(|&logit| f64::from(logit)).collect();
    for entry in entries {
        let logit = &mut adjusted[entry.index as usize];
        *logit += f64::from(entry.bias);
        let repetition = f64::from(entry.repetition);
        *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
        *logit -= f64::from(entry.subtract);
    }
    adjusted
}
