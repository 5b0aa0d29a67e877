//! Qwen2 and Qwen2.5: a llama with biases on queries, keys and values, rotated in halves.

use super::config::ModelConfig;
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "qwen2")?;
    config.slide(keys)?;
    Ok(config)
}
