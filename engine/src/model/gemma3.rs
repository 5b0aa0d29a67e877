//! Gemma 3: as Gemma 2 without soft caps, with queries and keys normalised head by head; five of six layers see a sliding
//! window and have rotary frequencies of their own.

use super::config::{Activation, ModelConfig};
use super::keys::Keys;
use super::rotary_config::RotaryConfig;
use crate::model_file::{ModelFileError, Value};

/// Without a list in the file, the last of so many layers sees everything.
const PERIOD: usize = 6;
/// Base of the frequencies in layers with a window, where a file does not tell.
const LOCAL_THETA: f64 = 10_000.0;
/// The 27B model's scores are scaled by the width of the model, those of the others by that of a head.
const LAYERS_OF_27B: usize = 62;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = ModelConfig::plain(keys, "gemma3")?;
    config.activation = Activation::Gelu;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    // GGUF's converter stores the weights of norms with their one added.
    config.norm_offset = if keys.is_hugging_face() { 1.0 } else { 0.0 };
    config.has_head_norms = true;
    config.has_post_norms = true;
    config.attention_soft_cap = keys.soft_cap("attn_logit_softcapping", None)?;
    config.final_soft_cap = keys.soft_cap("final_logit_softcapping", None)?;
    if !keys.is_hugging_face() && config.num_layers == LAYERS_OF_27B {
        config.attention_scale = ((config.hidden_size / config.num_heads) as f32).powf(-0.5);
    }
    let local = keys.optional_number("rope.freq_base_swa")?.unwrap_or(LOCAL_THETA);
    config.rotaries.push(RotaryConfig::plain(local, config.rotaries[0].dim));
    let pattern = "attention.sliding_window_pattern";
    let slides = keys.by_layer(pattern, config.num_layers)?;
    let period = keys.value(pattern).and_then(Value::as_u64).map_or(PERIOD, |period| period.max(1) as usize);
    let window = keys.window()?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        let slides = slides.as_ref().map_or((index + 1) % period != 0, |slides| slides[index]);
        layer.window = window.filter(|_| slides);
        layer.rotary = Some(usize::from(slides));
    }
    Ok(config)
}
