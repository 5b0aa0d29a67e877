//! Moving whole KV blocks between the pool and canonical payloads.
//!
//! A block's part of one layer is contiguous in both, so each is 2 × layers copies.

use bytes::Bytes;

use super::CpuOps;
use crate::kv::{BlockId, Load};

impl CpuOps {
    /// A block's canonical payload.
    pub(super) fn gather_block(&self, block_id: BlockId) -> Bytes {
        let len = self.layout.block_bytes() / 2;
        let block = block_id as usize * len..(block_id as usize + 1) * len;
        let mut payload = Vec::with_capacity(self.layout.payload_bytes());
        for layer in &self.cache {
            for cache in [&layer.key, &layer.value] {
                extend_le(&mut payload, &cache[block.clone()]);
            }
        }
        Bytes::from(payload)
    }

    /// Writes a block's canonical payload into its place.
    pub(super) fn scatter_block(&mut self, load: &Load) {
        let len = self.layout.block_bytes() / 2;
        let block = load.block_id as usize * len..(load.block_id as usize + 1) * len;
        assert_eq!(load.payload.len(), self.layout.payload_bytes(), "the payload of block {}", load.block_id);
        let mut parts = load.payload.chunks_exact(len * 2);
        for layer in &mut self.cache {
            for cache in [&mut layer.key, &mut layer.value] {
                let part = parts.next().unwrap_or_default();
                for (value, bytes) in cache[block.clone()].iter_mut().zip(part.chunks_exact(2)) {
                    *value = u16::from_le_bytes([bytes[0], bytes[1]]);
                }
            }
        }
    }
}

#[cfg(target_endian = "little")]
fn extend_le(payload: &mut Vec<u8>, values: &[u16]) {
    payload.extend_from_slice(bytemuck::cast_slice(values));
}

#[cfg(not(target_endian = "little"))]
fn extend_le(payload: &mut Vec<u8>, values: &[u16]) {
    payload.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}
