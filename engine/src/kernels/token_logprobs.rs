//! Wrapper of `token_logprobs.wgsl`: how likely each row's token was.

use shaders::{TOKEN_LOGPROBS, params};

use super::{Encoder, GpuBuffer, Plan};
use crate::ops::DeviceError;

/// Invocations a workgroup: a row has tens of thousands of logits.
const WORKGROUP_SIZE: u32 = 256;

/// `logprobs[row]` = (logit bits of `tokens[row]`, bits of log Σ exp, rank, 0) for `num_rows` rows of `width` logits.
///
/// # Errors
/// When the kernel does not compile or the device has failed.
pub fn token_logprobs(
    encoder: &mut Encoder,
    plan: &Plan,
    logits: &GpuBuffer,
    tokens: &GpuBuffer,
    logprobs: &GpuBuffer,
    width: u32,
    num_rows: u32,
) -> Result<(), DeviceError> {
    let rows = u64::from(num_rows);
    assert!(u64::from(width) * rows * 4 <= logits.size && rows * 4 <= tokens.size && rows * 16 <= logprobs.size);
    let kernel = encoder.kernel(&plan.reduction(&TOKEN_LOGPROBS, WORKGROUP_SIZE))?;
    let params = params::TokenLogprobs { width, ..Default::default() };
    let work = u64::from(width) * rows * 4;
    encoder.dispatch(&kernel, &[logits, tokens, logprobs], &params, [num_rows, 1, 1], work)
}
