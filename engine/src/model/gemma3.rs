//! Gemma 3: as Gemma 2 without soft caps, with queries and keys normalised head by head; five of six layers see a sliding
//! window and have rotary frequencies of their own.

use super::config::ModelConfig;
use super::gemma2;
use super::keys::Keys;
use super::rotary_config::RotaryConfig;
use crate::model_file::{ModelFileError, Value};

/// Without a list in the file, the last of so many layers sees everything.
const PERIOD: usize = 6;
/// Base of the frequencies in layers with a window, where a file does not tell.
const LOCAL_THETA: f64 = 10_000.0;
/// Its 27B model has so many layers.
const LAYERS_OF_27B: usize = 62;

/// Reads the configuration.
pub(super) fn config(keys: &Keys<'_>) -> Result<ModelConfig, ModelFileError> {
    let mut config = gemma2::shared(keys, "gemma3", LAYERS_OF_27B)?;
    config.has_head_norms = true;
    config.attention_soft_cap = keys.soft_cap("attn_logit_softcapping", None)?;
    config.final_soft_cap = keys.soft_cap("final_logit_softcapping", None)?;
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
