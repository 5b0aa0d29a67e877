//! The name of a KV block: a chain hash of every token before and in it, the same on every machine.
//!
//! Computed by the engine for each sequence, compared by its block manager. Invariant: this file is the only place that
//! computes a [`BlockHash`], and golden values pin it.

use std::fmt;

use crate::fingerprint::ModelFingerprint;

/// Name of one full block: BLAKE3 over the parent's name and the block's token ids as u32 LE.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash([u8; 32]);

/// What keeps equal tokens apart: state under different salts is never shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Salt {
    /// Content fingerprint of the LoRA adapter; `None` is the bare model.
    pub adapter: Option<[u8; 32]>,
    /// The request's `cache_salt`; empty is shared by all.
    pub cache_salt: String,
}

impl BlockHash {
    /// The parent of a chain's first block: BLAKE3 of the salt, each part behind its length as u64 LE.
    pub fn root(salt: &Salt) -> Self {
        let mut hasher = blake3::Hasher::new();
        for part in [salt.adapter.as_ref().map_or(&[][..], |adapter| &adapter[..]), salt.cache_salt.as_bytes()] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The block of `token_ids` after this one.
    pub fn child(&self, token_ids: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.0);
        for id in token_ids {
            hasher.update(&id.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// The names of all full blocks of `token_ids`, in order, from the chain's root.
    pub fn chain(self, token_ids: &[u32], block_size: usize) -> Vec<Self> {
        let mut parent = self;
        let full_blocks = token_ids.chunks_exact(block_size);
        full_blocks
            .map(|block| {
                parent = parent.child(block);
                parent
            })
            .collect()
    }
}

impl BlockHash {
    /// A name that was read: from a frame, or a request.
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

/// The name of a block's state: which model made it, and of which tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockKey {
    /// Weights, shape and format.
    pub model: ModelFingerprint,
    /// Tokens.
    pub block: BlockHash,
}

impl BlockKey {
    /// 64 bits of it, for memories that may err.
    pub fn short(&self) -> u64 {
        let part = |bytes: &[u8; 32]| bytes[..8].iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        part(self.block.as_bytes()) ^ part(self.model.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn salted(cache_salt: &str) -> BlockHash {
        BlockHash::root(&Salt { cache_salt: cache_salt.into(), ..Default::default() })
    }

    /// Computed once with Python's `blake3` from the definition above.
    #[test]
    fn names_are_golden() {
        let tokens: Vec<u32> = (0..48).collect();
        let chain = BlockHash::root(&Salt::default()).chain(&tokens, 16);
        let golden = [
            "310bba08f31849c823f7748567210ae425ec0d27fba2191e6c481b2918179b6d",
            "3e455f7b2d339971b2cb4de2e77f14ab1039803398f4f5b168171f0d48700280",
            "cf6b6a9c41e25d7b30b2666d4c94c68ffc1ede606a18069c9044f9b61ead5bf2",
        ];
        assert_eq!(chain.iter().map(BlockHash::to_string).collect::<Vec<_>>(), golden);
        let adapter = Some([7; 32]);
        let root = BlockHash::root(&Salt { adapter, cache_salt: "tenant-a".into() });
        assert_eq!(root.to_string(), "8e300d1790cedd890bd21a50f0904874beac08bfbe5c2196ae5b99a6104944df");
        assert_eq!(
            root.child(&[u32::MAX; 16]).to_string(),
            "b0753c5f2225c238d8087941bac3876a6eac46b82844d3dbe45eb913fac97a2b"
        );
    }

    #[test]
    fn equal_prefixes_have_equal_names_and_others_differ() {
        let (a, b): (Vec<u32>, Vec<u32>) = ((0..64).collect(), (0..64).map(|i| if i == 40 { 7 } else { i }).collect());
        let (a, b) = (salted("").chain(&a, 16), salted("").chain(&b, 16));
        assert_eq!(a[..2], b[..2]);
        assert!(a[2] != b[2] && a[3] != b[3], "all that follows a difference differs");
        assert_eq!(salted("").chain(&[1; 31], 16).len(), 1, "only full blocks have names");
    }

    #[test]
    fn salts_keep_apart_and_their_parts_cannot_be_shifted() {
        assert_ne!(salted("a"), salted("b"));
        let adapter = BlockHash::root(&Salt { adapter: Some([b'a'; 32]), cache_salt: String::new() });
        assert_ne!(adapter, salted(&"a".repeat(32)));
    }
}
