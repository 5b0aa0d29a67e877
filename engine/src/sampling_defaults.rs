//! How tokens are chosen where a request does not say: as the model's authors recommend, in its file or directory
//! (`generation_config.json`), or else as OpenAI's API does.
//!
//! Read once at start, given to requests at the HTTP edge.

use protocol::openai::{usable_temperature, usable_top_p};

use crate::model_file::{ModelFile, ModelFileError};

/// Values for what a request leaves out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    pub temperature: f32,
    /// `None` is all tokens.
    pub top_k: Option<usize>,
    /// In (0, 1].
    pub top_p: f32,
    /// In [0, 1].
    pub min_p: f32,
    /// Above 0; 1 is off.
    pub repetition_penalty: f32,
}

impl Default for SamplingDefaults {
    /// OpenAI's, and everything else off.
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl SamplingDefaults {
    /// What the file recommends, under GGUF's `general.sampling` keys; a directory's configuration is read into these.
    ///
    /// # Errors
    /// When a value is one that no request may have.
    pub fn of(file: &ModelFile) -> Result<Self, ModelFileError> {
        let number = |key: &str, range: &str, is_valid: fn(f64) -> bool| {
            let key = format!("general.sampling.{key}");
            let Some(value) = file.optional(&key, "a number", |value| value.as_f64())? else { return Ok(None) };
            if is_valid(value) {
                return Ok(Some(value));
            }
            Err(file.key_error(&key, format!("is {value}, must be {range}; --generation-config none leaves it out")))
        };
        let usual = Self::default();
        let temperature = number("temp", "0 to 100", |t| (0.0..=100.0).contains(&t))?;
        let top_k = number("top_k", "a whole number, at least -1", |k| k >= -1.0 && k.fract() == 0.0)?;
        let top_p = number("top_p", "above 0, at most 1", |p| p > 0.0 && p <= 1.0)?;
        let min_p = number("min_p", "0 to 1", |p| (0.0..=1.0).contains(&p))?;
        let penalty = number("penalty_repeat", "0.01 to 100", |p| (0.01..=100.0).contains(&p))?;
        Ok(Self {
            temperature: temperature.map_or(usual.temperature, usable_temperature),
            // 0 and -1 are all tokens.
            top_k: top_k.filter(|k| *k > 0.0).map(|k| k as usize),
            top_p: top_p.map_or(usual.top_p, usable_top_p),
            min_p: min_p.map_or(usual.min_p, |p| p as f32),
            repetition_penalty: penalty.map_or(usual.repetition_penalty, |p| p as f32),
        })
    }
}
