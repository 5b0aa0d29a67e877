//! The layout of KV memory: `[block, kv_head, offset, head_dim]` f16, one K and one V buffer a layer.
//!
//! Used by both devices' ops. Only this file, the kernels and the shaders know it (invariant 2).

use crate::model::ModelConfig;

/// Tokens a block. The kernels are rendered with it.
pub const BLOCK_SIZE: usize = 16;

/// Shape of the whole cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Transformer blocks.
    pub num_layers: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Query heads, which share K and V heads in groups.
    pub num_heads: usize,
    /// K and V heads.
    pub num_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// Tokens a block.
    pub block_size: usize,
}

impl KvLayout {
    /// The cache of `num_blocks` blocks of a model.
    pub fn new(config: &ModelConfig, num_blocks: usize) -> Self {
        Self {
            num_layers: config.num_layers,
            num_blocks,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
        }
    }

    /// Values of one block in one layer's K (or V) buffer.
    pub fn block_values(&self) -> usize {
        self.num_kv_heads * self.block_size * self.head_dim
    }

    /// Bytes of one block's canonical payload: layer-major, K then V, `[kv_head, offset, head_dim]`, f16.
    pub fn payload_bytes(&self) -> usize {
        self.block_values() * 2 * 2 * self.num_layers
    }

    /// Bytes of one layer's K (or V) buffer.
    pub fn layer_bytes(&self) -> u64 {
        (self.num_blocks * self.block_values() * 2) as u64
    }

    /// Bytes of the whole cache.
    pub fn total_bytes(&self) -> u64 {
        self.layer_bytes() * 2 * self.num_layers as u64
    }

    /// Index of the first value of `slot`'s vector of `kv_head`.
    pub fn slot_base(&self, slot: usize, kv_head: usize) -> usize {
        let (block_id, offset) = (slot / self.block_size, slot % self.block_size);
        ((block_id * self.num_kv_heads + kv_head) * self.block_size + offset) * self.head_dim
    }
}
