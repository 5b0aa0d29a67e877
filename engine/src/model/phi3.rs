//! Phi-3, Phi-3.5 and Phi-4: a llama with fused projections, divisors of the frequencies for short and for long texts, and in
//! some a sliding window in every layer.

use super::config::ModelConfig;
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "phi3")?;
    // Files state a window as long as the context where there is none.
    let window = keys.window()?.filter(|&window| window < config.context_length);
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(config)
}
