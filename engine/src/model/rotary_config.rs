//! How positions are turned into angles: base, width and scaling, as metadata states them. `ops/rotary` makes the table.

use super::keys::Keys;
use crate::model_file::ModelFileError;

/// What is done to the frequencies so that longer texts fit.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// Positions are divided.
    Linear {
        /// By this.
        factor: f64,
    },
    /// The base grows as vLLM has it: for the longest text of all, whatever the present one's length.
    Dynamic {
        /// How much longer texts are.
        factor: f64,
        /// Tokens that the model was trained on.
        original: f64,
    },
    /// Llama 3: low frequencies are divided, high ones kept, between them a blend.
    Llama3 {
        /// Of the low ones.
        factor: f64,
        /// Wavelengths over `original` / this are low.
        low: f64,
        /// Wavelengths under `original` / this are high.
        high: f64,
        /// Tokens that the model was trained on.
        original: f64,
    },
    /// YaRN (Peng and others, 2023).
    Yarn {
        /// How much longer texts are.
        factor: f64,
        /// Tokens that the model was trained on.
        original: f64,
        /// Rotations from which on frequencies are kept.
        beta_fast: f64,
        /// Rotations up to which frequencies are divided.
        beta_slow: f64,
        /// What sines and cosines are multiplied by.
        attention_factor: f64,
    },
    /// A divisor a frequency: those for texts up to `original` tokens, and those for longer ones.
    Factors {
        /// For short texts.
        short: Vec<f64>,
        /// For long ones.
        long: Vec<f64>,
        /// Where long begins; the choice is made once, by the longest text that is allowed.
        original: usize,
        /// What sines and cosines are multiplied by, for long texts as for short ones.
        attention_factor: f64,
    },
}

/// One rotary table.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Values of a head that are rotated, from its front.
    pub dim: usize,
    /// What is done for longer texts.
    pub scaling: RopeScaling,
}

impl RotaryConfig {
    /// A plain table.
    pub fn plain(theta: f64, dim: usize) -> Self {
        Self { theta, dim, scaling: RopeScaling::None }
    }

    /// The table that a file's keys state.
    ///
    /// # Errors
    /// When the scaling is of a kind that is not supported, or lacks a number.
    pub(super) fn of(keys: &Keys<'_>, head_dim: usize) -> Result<Self, ModelFileError> {
        let dim = match keys.optional_number("rope.partial_factor")? {
            Some(part) => (head_dim as f64 * part) as usize,
            None => keys.optional_size("rope.dimension_count")?.unwrap_or(head_dim),
        };
        if dim == 0 || dim > head_dim {
            return Err(keys.error("rope.dimension_count", format!("is {dim}, heads have {head_dim} values")));
        }
        let theta = keys.optional_number("rope.freq_base")?.unwrap_or(10_000.0);
        Ok(Self { theta, dim, scaling: scaling(keys, dim)? })
    }

    /// Whether the numbers make sense, or the key of one that does not, and why.
    pub(super) fn check(&self, head_dim: usize) -> Result<(), (&'static str, String)> {
        if self.dim == 0 || !self.dim.is_multiple_of(2) || self.dim > head_dim {
            return Err(("rope.dimension_count", format!("is {}, heads have {head_dim} values", self.dim)));
        }
        if !(self.theta.is_finite() && self.theta > 0.0) {
            return Err(("rope.freq_base", format!("is {}", self.theta)));
        }
        let positive = |values: &[f64]| values.iter().all(|value| value.is_finite() && *value > 0.0);
        let sound = match &self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => positive(&[*factor]),
            RopeScaling::Dynamic { factor, original } => *factor >= 1.0 && positive(&[*factor, *original]),
            RopeScaling::Llama3 { factor, low, high, original } => {
                positive(&[*factor, *low, *high, *original]) && high > low
            }
            RopeScaling::Yarn { factor, original, beta_fast, beta_slow, attention_factor } => {
                positive(&[*factor, *original, *beta_fast, *beta_slow, *attention_factor])
            }
            RopeScaling::Factors { short, long, attention_factor, .. } => {
                positive(short) && positive(long) && positive(&[*attention_factor])
            }
        };
        if sound { Ok(()) } else { Err(("rope.scaling.factor", format!("makes no sense: {:?}", self.scaling))) }
    }
}

fn scaling(keys: &Keys<'_>, dim: usize) -> Result<RopeScaling, ModelFileError> {
    let number = |name: &str| keys.number(&format!("rope.scaling.{name}"));
    let optional = |name: &str| keys.optional_number(&format!("rope.scaling.{name}"));
    let factors = keys.factors("rope.factors", super::ROPE_FACTORS, dim / 2)?;
    let longest = keys.size("context_length")? as f64;
    // What a model was trained on, where it is not told, is what the scaling makes of it.
    let original = optional("original_context_length")?;
    let short = keys.factors("rope.short_factors", super::ROPE_FACTORS_SHORT, dim / 2)?;
    let long = keys.factors("rope.long_factors", super::ROPE_FACTORS_LONG, dim / 2)?;
    if let (Some(short), Some(long)) = (short, long) {
        let original = original.unwrap_or(longest);
        let ratio = longest / original;
        let default = if ratio > 1.0 { (1.0 + ratio.ln() / original.ln()).sqrt() } else { 1.0 };
        let attention_factor = optional("attn_factor")?.unwrap_or(default);
        return Ok(RopeScaling::Factors { short, long, original: original as usize, attention_factor });
    }
    let kind = keys.optional_text("rope.scaling.type")?.filter(|kind| *kind != "none");
    if let Some(factors) = factors {
        if let Some(kind) = kind {
            let reason = format!("is `{kind}` beside factors of the frequencies: both at once are not supported");
            return Err(keys.error("rope.scaling.type", reason));
        }
        let (short, long) = (factors.clone(), factors);
        return Ok(RopeScaling::Factors { short, long, original: usize::MAX, attention_factor: 1.0 });
    }
    Ok(match kind {
        // A GGUF file's factor alone is a linear one; older files have it under another name.
        None => match optional("factor")?.or(keys.optional_number("rope.scale_linear")?) {
            Some(factor) if !keys.is_hugging_face() => RopeScaling::Linear { factor },
            _ => RopeScaling::None,
        },
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("dynamic") => RopeScaling::Dynamic { factor: number("factor")?, original: original.unwrap_or(longest) },
        Some("llama3") => RopeScaling::Llama3 {
            factor: number("factor")?,
            low: number("low_freq_factor")?,
            high: number("high_freq_factor")?,
            original: number("original_context_length")?,
        },
        Some("yarn") => {
            let factor = number("factor")?;
            let usual = 0.1 * factor.ln() + 1.0;
            // GGUF's number multiplies the usual one, Hugging Face's stands in its place.
            let attention_factor = match optional("attn_factor")? {
                Some(own) if keys.is_hugging_face() => own,
                own => own.unwrap_or(1.0) * usual,
            };
            RopeScaling::Yarn {
                factor,
                original: original.unwrap_or(longest),
                beta_fast: optional("yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: optional("yarn_beta_slow")?.unwrap_or(1.0),
                attention_factor,
            }
        }
        Some(other) => {
            let known = "none, linear, dynamic, llama3, yarn, longrope with its factors";
            return Err(keys.error("rope.scaling.type", format!("is `{other}`; supported are {known}")));
        }
    })
}
