//! Gemma 2: norms before and after each layer, soft caps on scores and logits, scaled embeddings, GELU, and a sliding window in
//! every other layer.

use super::config::{Activation, ModelConfig};
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Where a GGUF file does not tell.
const WINDOW: usize = 4096;
/// Its 27B model has so many layers.
const LAYERS_OF_27B: usize = 46;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = shared(keys, "gemma2", LAYERS_OF_27B)?;
    config.attention_soft_cap = keys.soft_cap("attn_logit_softcapping", Some(50.0))?;
    config.final_soft_cap = keys.soft_cap("final_logit_softcapping", Some(30.0))?;
    let window = match keys.value("attention.sliding_window") {
        None if !keys.is_hugging_face() => Some(WINDOW),
        _ => keys.window()?,
    };
    let slides = keys.by_layer("attention.sliding_window_pattern", config.num_layers)?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let slides = slides.as_ref().map_or(index % 2 == 0, |slides| slides[index]);
        layer.window = window.filter(|_| slides);
    }
    Ok(config)
}

/// What Gemma 2 and 3 have in common.
///
/// # Errors
/// When a key is missing or makes no sense.
pub(super) fn shared(
    keys: &Keys<'_>,
    architecture: &'static str,
    layers_of_27b: usize,
) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, architecture)?;
    config.activation = Activation::Gelu;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    // GGUF's converter stores the weights of norms with their one added.
    config.norm_offset = if keys.is_hugging_face() { 1.0 } else { 0.0 };
    config.has_post_norms = true;
    // The 27B models' scores are scaled by the width of the model over the heads, those of the others by that of a head.
    if !keys.is_hugging_face() && config.num_layers == layers_of_27b {
        config.attention_scale = ((config.hidden_size / config.num_heads) as f32).powf(-0.5);
    }
    Ok(config)
}
