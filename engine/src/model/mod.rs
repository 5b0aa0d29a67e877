//! Model definitions: what each architecture's configuration says, and the decoder that all of them are.

mod config;
mod decoder;
mod gemma2;
mod gemma3;
mod keys;
mod llama;
mod loader;
mod mistral;
mod phi3;
mod qwen2;
mod qwen3;
mod rotary_config;
mod smollm3;

pub use config::{Activation, LayerConfig, ModelConfig, PairOrder};
pub use decoder::Decoder;
pub use rotary_config::{RopeScaling, RotaryConfig};

/// Divisors of the rotary frequencies, where a file has them.
const ROPE_FACTORS: &str = "rope_freqs.weight";
/// Those for short texts, where it has two kinds.
const ROPE_FACTORS_SHORT: &str = "rope_factors_short.weight";
/// Those for long ones.
const ROPE_FACTORS_LONG: &str = "rope_factors_long.weight";
