//! Gemma 2: norms before and after each layer, soft caps on scores and logits, scaled embeddings, GELU, and a sliding window in
//! every other layer.

use super::config::{Activation, ModelConfig};
use super::keys::Keys;
use crate::model_file::ModelFileError;

/// Where a GGUF file does not tell.
const WINDOW: usize = 4096;
/// The 27B model's scores are scaled by the width of the model, those of the others by that of a head.
const LAYERS_OF_27B: usize = 46;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "gemma2")?;
    config.activation = Activation::Gelu;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    // GGUF's converter stores the weights of norms with their one added.
    config.norm_offset = if keys.is_hugging_face() { 1.0 } else { 0.0 };
    config.has_post_norms = true;
    config.attention_soft_cap = keys.soft_cap("attn_logit_softcapping", Some(50.0))?;
    config.final_soft_cap = keys.soft_cap("final_logit_softcapping", Some(30.0))?;
    if !keys.is_hugging_face() && config.num_layers == LAYERS_OF_27B {
        config.attention_scale = ((config.hidden_size / config.num_heads) as f32).powf(-0.5);
    }
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
