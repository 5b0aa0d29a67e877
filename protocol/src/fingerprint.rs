//! Which model and which format a KV block belongs to: state of different models is never mixed.
//!
//! Made by the engine when it loads a model, part of every [`crate::BlockKey`] and of the worker report.

use std::fmt;

/// BLAKE3 over everything that decides what a block's bytes mean.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModelFingerprint([u8; 32]);

/// What the fingerprint covers.
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "the names say it")]
pub struct FingerprintParts<'a> {
    /// BLAKE3 of the model's tensor bytes.
    pub weights: [u8; 32],
    /// Its name and settings (positions, norms, windows, ...), as a text that differs where any of them does.
    pub architecture: &'a str,
    pub kv_dtype: &'a str,
    pub num_layers: usize,
    pub num_kv_heads: usize,
    pub head_dim: usize,
    pub block_size: usize,
}

/// Grows when the canonical payload of a block changes.
pub const LAYOUT_VERSION: u32 = 1;

impl ModelFingerprint {
    /// Of these parts: each text behind its length, each number as u64 LE.
    pub fn of(parts: &FingerprintParts<'_>) -> Self {
        let mut hasher = blake3::Hasher::new();
        let mut number = |value: u64| {
            hasher.update(&value.to_le_bytes());
        };
        number(u64::from(LAYOUT_VERSION));
        for value in [parts.num_layers, parts.num_kv_heads, parts.head_dim, parts.block_size] {
            number(value as u64);
        }
        for text in [parts.architecture, parts.kv_dtype] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        hasher.update(&parts.weights);
        Self(*hasher.finalize().as_bytes())
    }

    /// A fingerprint that was read: from a frame, or a request.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for ModelFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for ModelFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ModelFingerprint({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts() -> FingerprintParts<'static> {
        FingerprintParts {
            weights: [1; 32],
            architecture: "llama",
            kv_dtype: "f16",
            num_layers: 30,
            num_kv_heads: 3,
            head_dim: 64,
            block_size: 16,
        }
    }

    #[test]
    fn it_is_golden_and_every_part_counts() {
        let all = ModelFingerprint::of(&parts());
        assert_eq!(all.to_string(), "b880c0eed43defa7b9dbd871d1c067b629c9bf8837980695011b445fcd4358de");
        let others = [
            FingerprintParts { weights: [2; 32], ..parts() },
            FingerprintParts { architecture: "qwen2", ..parts() },
            FingerprintParts { kv_dtype: "q8_0", ..parts() },
            FingerprintParts { num_layers: 31, ..parts() },
            FingerprintParts { num_kv_heads: 4, ..parts() },
            FingerprintParts { head_dim: 128, ..parts() },
            FingerprintParts { block_size: 32, ..parts() },
        ];
        assert!(others.iter().all(|other| ModelFingerprint::of(other) != all));
    }
}
