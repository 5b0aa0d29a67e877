//! Mistral, as Hugging Face names it: a llama whose first version sees a sliding window in every layer. GGUF's files of it are
//! of architecture `llama`.

use super::config::ModelConfig;
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "mistral")?;
    let window = keys.window()?;
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(config)
}
