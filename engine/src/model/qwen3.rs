//! Qwen3: a llama whose queries and keys are normalised head by head, rotated in halves, with heads of a width of their own.

use super::config::ModelConfig;
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "qwen3")?;
    config.slide(keys)?;
    Ok(ModelConfig { has_head_norms: true, ..config })
}
