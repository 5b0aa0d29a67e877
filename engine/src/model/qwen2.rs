//! Qwen2 and Qwen2.5: a llama with biases on queries, keys and values, rotated in halves.

use super::config::ModelConfig;
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "qwen2")?;
    if let Some(slides) = keys.by_layer("attention.sliding_window_pattern", config.num_layers)? {
        let window = keys.window()?;
        let layers = config.layers.iter_mut().zip(slides);
        layers.filter(|(_, slides)| *slides).for_each(|(layer, _)| layer.window = window);
    }
    Ok(config)
}
