//! Model definitions: configuration, weights and the list of ops of each architecture.

mod config;
mod llama;

pub use config::ModelConfig;

/// Divisors of the rotary frequencies, where a file has them.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";
pub use llama::Llama;
