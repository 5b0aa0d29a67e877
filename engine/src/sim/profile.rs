//! What a simulated device is like: a TOML file, or one of the profiles that are built in.
//!
//! Latencies are of the order that published measurements of the named hardware have for an 8B model in f16.

use std::path::{Path, PathBuf};

use protocol::ModelFingerprint;
use protocol::fingerprint::FingerprintParts;
use serde::Deserialize;

use crate::error::LoadError;
use crate::kv::BLOCK_SIZE;

/// Profiles by name.
const BUILT_IN: [(&str, &str); 4] = [
    ("h100", include_str!("profiles/h100.toml")),
    ("l40s", include_str!("profiles/l40s.toml")),
    ("laptop", include_str!("profiles/laptop.toml")),
    ("instant", include_str!("profiles/instant.toml")),
];

/// A simulated device.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SimProfile {
    /// What it is called.
    pub name: String,
    /// Milliseconds that a step takes whatever it holds.
    pub step_ms: f64,
    /// Milliseconds that a step with streams takes more.
    pub decode_ms: f64,
    /// Milliseconds for each stream.
    pub decode_ms_per_sequence: f64,
    /// Milliseconds for each prompt token.
    pub prefill_ms_per_token: f64,
    /// Bytes of KV state a token, which moving a block is charged by.
    #[serde(default = "kv_bytes_per_token")]
    pub kv_bytes_per_token: f64,
    /// Gigabytes a second between device and host.
    #[serde(default = "transfer_gb_per_s")]
    pub transfer_gb_per_s: f64,
    /// KV blocks of 16 tokens.
    pub kv_blocks: usize,
    /// Longest sequence.
    pub max_model_len: usize,
    /// Latencies vary by this part, up and down.
    #[serde(default)]
    pub jitter: f64,
    /// Seed of the variation.
    #[serde(default)]
    pub seed: u64,
    /// Mean length of an answer that `max_tokens` does not end first; 0 is endless.
    #[serde(default)]
    pub mean_output_tokens: u32,
    /// A GGUF file whose tokeniser and chat template are used in place of four bytes a token.
    #[serde(default)]
    pub model: Option<PathBuf>,
    /// What goes wrong.
    #[serde(default)]
    pub faults: Faults,
}

/// An 8B model with grouped heads in f16.
fn kv_bytes_per_token() -> f64 {
    131_072.0
}

/// Half of what a PCIe 4.0 slot of 16 lanes can do.
fn transfer_gb_per_s() -> f64 {
    16.0
}

/// Faults, each after so many tokens (prompt and answer) since the start.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Faults {
    /// The device is lost.
    pub die_after_tokens: Option<u64>,
    /// A step never ends.
    pub hang_after_tokens: Option<u64>,
    /// Steps take `slow_factor` times as long.
    pub slow_after_tokens: Option<u64>,
    /// How much slower; 10 where not given.
    pub slow_factor: Option<f64>,
    /// New requests are refused.
    pub refuse_after_tokens: Option<u64>,
}

impl SimProfile {
    /// The profile of a name, or of a TOML file.
    ///
    /// # Errors
    /// When there is none, or the file cannot be read; the error names what there is.
    pub fn load(name: &str) -> Result<Self, LoadError> {
        let fail = |reason: String| LoadError::Setting(format!("--device sim:{name}: {reason}"));
        if let Some((_, text)) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name) {
            return Self::parse(text).map_err(fail);
        }
        if !Path::new(name).exists() {
            let names: Vec<&str> = BUILT_IN.iter().map(|(built_in, _)| *built_in).collect();
            return Err(fail(format!("is no file and none of the profiles {}", names.join(", "))));
        }
        let text = std::fs::read_to_string(name).map_err(|error| fail(error.to_string()))?;
        Self::parse(&text).map_err(fail)
    }

    /// Reads a profile's TOML.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        let profile: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        let times = [
            ("step_ms", profile.step_ms),
            ("decode_ms", profile.decode_ms),
            ("decode_ms_per_sequence", profile.decode_ms_per_sequence),
            ("prefill_ms_per_token", profile.prefill_ms_per_token),
            ("faults.slow_factor", profile.faults.slow_factor.unwrap_or(1.0)),
        ];
        if let Some((name, value)) = times.iter().find(|(_, value)| !(0.0..=1e6).contains(value)) {
            return Err(format!("{name} = {value}: must be a number from 0 to 1000000"));
        }
        if !(1e-3..=1e6).contains(&profile.transfer_gb_per_s) || !(0.0..=1e9).contains(&profile.kv_bytes_per_token) {
            return Err("transfer_gb_per_s must be 0.001 to 1000000, and kv_bytes_per_token 0 to 1000000000".into());
        }
        if !(0.0..=1.0).contains(&profile.jitter) {
            return Err(format!("jitter = {}: must be 0 to 1", profile.jitter));
        }
        if profile.kv_blocks == 0 || profile.kv_blocks > u32::MAX as usize / BLOCK_SIZE || profile.max_model_len == 0 {
            return Err("kv_blocks and max_model_len must be at least 1, and kv_blocks fit 32 bits of tokens".into());
        }
        Ok(profile)
    }

    /// The longest sequence: what was asked for, else the profile's cut to its cache.
    ///
    /// # Errors
    /// When what was asked for does not fit.
    pub fn max_model_len(&self, asked: Option<usize>) -> Result<usize, LoadError> {
        let capacity = self.kv_blocks * BLOCK_SIZE;
        match asked {
            Some(len) if len == 0 || len > self.max_model_len.min(capacity) => {
                let Self { name, max_model_len, .. } = self;
                Err(LoadError::Setting(format!(
                    "--max-model-len {len}: sim:{name} has sequences of up to {max_model_len} and a KV cache of {capacity} tokens"
                )))
            }
            Some(len) => Ok(len),
            None => Ok(self.max_model_len.min(capacity)),
        }
    }

    /// Names its KV state: that of every profile with the same tokens.
    pub fn fingerprint(&self) -> ModelFingerprint {
        let model = self.model.as_ref().map_or_else(String::new, |model| model.to_string_lossy().into_owned());
        ModelFingerprint::of(&FingerprintParts {
            weights: *blake3::hash(model.as_bytes()).as_bytes(),
            architecture: "sim",
            kv_dtype: "sim",
            num_layers: 1,
            num_kv_heads: 1,
            head_dim: 4,
            block_size: BLOCK_SIZE,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_is_valid_and_named_as_it_is_asked_for() {
        for (name, _) in BUILT_IN {
            assert_eq!(SimProfile::load(name).unwrap().name, name);
        }
    }

    #[test]
    fn a_wrong_profile_is_refused_with_what_is_wrong() {
        let error = |name: &str| SimProfile::load(name).unwrap_err().to_string();
        assert!(error("nonesuch").contains("none of the profiles h100, l40s"), "{}", error("nonesuch"));
        let text = BUILT_IN[0].1;
        let parse = |from: &str, to: &str| SimProfile::parse(&text.replace(from, to)).unwrap_err();
        assert!(parse("step_ms", "stop_ms").contains("stop_ms"));
        assert!(SimProfile::parse(&format!("{text}\njitter = 2.0")).is_err());
    }
}
