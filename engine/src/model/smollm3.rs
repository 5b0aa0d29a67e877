//! SmolLM3: a llama that leaves every fourth layer without positions.

use super::config::{ModelConfig, PairOrder};
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Without a list in the file, each such layer is the last of so many.
const PERIOD: usize = 4;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "smollm3")?;
    if !keys.is_hugging_face() {
        config.pair_order = PairOrder::Neighbours;
    }
    let rotated = keys.by_layer("rope.layers", config.num_layers)?;
    let rotated = rotated.unwrap_or_else(|| (1..=config.num_layers).map(|layer| layer % PERIOD != 0).collect());
    for (layer, rotated) in config.layers.iter_mut().zip(rotated) {
        layer.rotary = rotated.then_some(0);
    }
    config.slide(keys)?;
    Ok(config)
}
