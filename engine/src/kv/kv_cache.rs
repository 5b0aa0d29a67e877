//! The layout of KV memory: `[block, kv_head, offset, head_dim]`, one K and one V buffer a layer; f16, or signed bytes whose
//! scales lie behind the rows of a block's head.
//!
//! Used by both devices' ops. Only this file, the kernels and the shaders know it (invariant 2).

use crate::model::ModelConfig;

/// Tokens a block. The kernels are rendered with it.
pub const BLOCK_SIZE: usize = 16;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvCacheDtype {
    /// As f16.
    #[default]
    F16,
    /// As signed bytes, each block of 32 values with a scale in f16: as GGUF's type of that name.
    Q8_0,
}

impl KvCacheDtype {
    /// The placeholder's value, and what people call it.
    pub fn word(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Bytes of a row of one head: its values and, rounded up to words, their scales.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            Self::F16 => 2 * head_dim,
            Self::Q8_0 => head_dim + 4 * head_dim.div_ceil(2 * SCALED_VALUES),
        }
    }
}

/// What a block's canonical payload is made of: heads of equal bytes, in each of which halves (f16) lie behind the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PayloadShape {
    /// Bytes of the payload.
    pub bytes: usize,
    /// Bytes of a head.
    head_bytes: usize,
    /// Where its halves begin: at its end where it has none.
    first_half: usize,
}

impl PayloadShape {
    /// So many bytes of which nothing is known.
    pub fn opaque(bytes: usize) -> Self {
        Self { bytes, head_bytes: bytes.max(1), first_half: bytes.max(1) }
    }

    /// Whether all halves of a payload are finite: none has all bits of its exponent set.
    pub fn is_finite(&self, payload: &[u8]) -> bool {
        let finite = |half: &[u8]| half[1] & 0x7c != 0x7c;
        payload.chunks_exact(self.head_bytes).all(|head| head[self.first_half..].chunks_exact(2).all(finite))
    }
}

/// Values that have a scale together.
pub const SCALED_VALUES: usize = 32;

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
    /// How values are stored.
    pub dtype: KvCacheDtype,
}

impl KvLayout {
    /// The cache of `num_blocks` blocks of a model.
    pub fn new(config: &ModelConfig, dtype: KvCacheDtype, num_blocks: usize) -> Self {
        Self {
            num_layers: config.num_layers,
            num_blocks,
            num_heads: config.num_heads,
            num_kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
            dtype,
        }
    }

    /// Bytes of one head of a block, K or V.
    pub fn head_bytes(&self) -> usize {
        self.block_size * self.dtype.row_bytes(self.head_dim)
    }

    /// Bytes of one block in one layer's K (or V) buffer.
    pub fn block_bytes(&self) -> usize {
        self.num_kv_heads * self.head_bytes()
    }

    /// Bytes of one block's canonical payload: layer-major, K then V, each as in the cache.
    pub fn payload_bytes(&self) -> usize {
        self.block_bytes() * 2 * self.num_layers
    }

    /// What such a payload is made of.
    pub fn payload_shape(&self) -> PayloadShape {
        let first_half = match self.dtype {
            KvCacheDtype::F16 => 0,
            KvCacheDtype::Q8_0 => self.block_size * self.head_dim,
        };
        PayloadShape { bytes: self.payload_bytes(), head_bytes: self.head_bytes(), first_half }
    }

    /// Bytes of one layer's K (or V) buffer.
    pub fn layer_bytes(&self) -> u64 {
        (self.num_blocks * self.block_bytes()) as u64
    }

    /// Bytes of the whole cache.
    pub fn total_bytes(&self) -> u64 {
        self.layer_bytes() * 2 * self.num_layers as u64
    }

    /// What the cache adds to the name of a device's arithmetic, a letter: blocks of one type are no others'.
    pub fn numerics(&self) -> &'static str {
        match self.dtype {
            KvCacheDtype::F16 => "",
            KvCacheDtype::Q8_0 => "q",
        }
    }

    /// Where the head of `slot`'s block begins, and which row in it is the slot's.
    pub fn head_of(&self, slot: usize, kv_head: usize) -> (usize, usize) {
        let (block_id, offset) = (slot / self.block_size, slot % self.block_size);
        ((block_id * self.num_kv_heads + kv_head) * self.head_bytes(), offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn a_nan_or_an_infinity_is_seen_where_halves_lie() {
        for dtype in [KvCacheDtype::F16, KvCacheDtype::Q8_0] {
            let layout = KvLayout {
                num_layers: 2,
                num_blocks: 1,
                num_heads: 2,
                num_kv_heads: 2,
                head_dim: 32,
                block_size: 16,
                dtype,
            };
            let shape = layout.payload_shape();
            assert_eq!(shape.bytes, layout.payload_bytes());
            let mut payload = vec![0u8; shape.bytes];
            // The last half of the third head of eight.
            let last = 3 * layout.head_bytes() - 2;
            for (value, is_finite) in [(65_504.0, true), (-6e-8, true), (f32::NAN, false), (f32::NEG_INFINITY, false)] {
                payload[last..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
                assert_eq!(shape.is_finite(&payload), is_finite, "{dtype:?} {value}");
            }
        }
        // Codes are no halves: -1 twice would be a NaN.
        let layout = KvLayout {
            num_layers: 1,
            num_blocks: 1,
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 32,
            block_size: 16,
            dtype: KvCacheDtype::Q8_0,
        };
        let mut payload = vec![0xff; 16 * 32];
        payload.resize(layout.payload_bytes(), 0);
        assert!(layout.payload_shape().is_finite(&payload));
        assert!(PayloadShape::opaque(7).is_finite(&[0xff; 7]) && PayloadShape::opaque(0).is_finite(&[]));
    }
}
