//! Llama, and the models that are plain decoders of its family (SmolLM2 and many others): norms before each layer, rotary
//! positions, grouped heads, a gated feed-forward layer with SiLU. Biases are taken where a file has them.

use super::config::{ModelConfig, PairOrder};
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "llama")?;
    // GGUF's converter reorders each head so that neighbours are rotated; Hugging Face's files have halves.
    if !keys.is_hugging_face() {
        config.pair_order = PairOrder::Neighbours;
    }
    // Files of Mistral's first models are of this architecture, with a window in every layer.
    let window = keys.window()?;
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    Ok(config)
}
