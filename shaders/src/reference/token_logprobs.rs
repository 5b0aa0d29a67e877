//! Reference of `token_logprobs.wgsl`.

/// One row: (the token's logit, log Σ exp, rank of the token from 1).
pub fn token_logprobs(logits: &[f32], token: u32) -> (f64, f64, u32) {
    let logit = logits[token as usize];
    let largest = f64::from(logits.iter().fold(f32::NEG_INFINITY, |largest, &x| largest.max(x)));
    let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
    let above = logits.iter().filter(|&&x| x > logit).count() as u32;
    (f64::from(logit), largest + sum.ln(), above + 1)
}
