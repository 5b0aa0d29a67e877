//! Moving whole KV blocks between the device's pool and canonical payloads on the host.
//!
//! Called before a step for what the scheduler decided. The copies are recorded in front of the step's own work and read back
//! after it, so that a step waits for the device once.

use bytes::Bytes;

use super::{DeviceError, WgpuOps};
use crate::kernels::{self, GpuBuffer};
use crate::kv::{BlockId, Load};

/// Buffers of the copies, grown when needed.
#[derive(Default)]
pub(super) struct CopyBuffers {
    outgoing: Option<GpuBuffer>,
    incoming: Option<GpuBuffer>,
    outgoing_ids: Option<GpuBuffer>,
    incoming_ids: Option<GpuBuffer>,
    /// Blocks in `outgoing` that were not read back.
    num_outgoing: usize,
}

impl WgpuOps {
    /// Blocks that one copy can hold: its buffer is one binding.
    fn most_blocks(&self) -> usize {
        (self.gpu.max_binding_bytes() as usize / self.layout.payload_bytes()).max(1)
    }

    fn room(&mut self, current: Option<GpuBuffer>, what: &str, bytes: u64) -> Result<GpuBuffer, DeviceError> {
        match current {
            Some(buffer) if buffer.size >= bytes => Ok(buffer),
            current => {
                if let Some(buffer) = &current {
                    self.encoder.forget(buffer);
                }
                self.gpu.allocate(what, self.gpu.grown(bytes))
            }
        }
    }

    /// Records the copy of blocks out; [`Self::read_blocks`] brings them.
    pub(super) fn record_stores(&mut self, block_ids: &[BlockId]) -> Result<(), DeviceError> {
        assert!(block_ids.len() <= self.most_blocks(), "{} blocks are copied at once", block_ids.len());
        let bytes = (self.layout.payload_bytes() * block_ids.len()) as u64;
        let outgoing = self.copies.outgoing.take();
        let outgoing = self.room(outgoing, "outgoing KV blocks", bytes)?;
        let ids = self.copies.outgoing_ids.take();
        let ids = self.room(ids, "outgoing block ids", block_ids.len() as u64 * 4)?;
        self.gpu.write(&ids, 0, bytemuck::cast_slice(block_ids));
        for (layer, cache) in self.cache.iter().enumerate() {
            let (encoder, count) = (&mut self.encoder, block_ids.len() as u32);
            let (key, value) = (&cache.key, &cache.value);
            kernels::gather_blocks(encoder, &self.plan, key, value, &ids, &outgoing, &self.layout, layer, count)?;
        }
        (self.copies.outgoing, self.copies.outgoing_ids) = (Some(outgoing), Some(ids));
        self.copies.num_outgoing = block_ids.len();
        Ok(())
    }

    /// Records the copy of blocks in.
    pub(super) fn record_loads(&mut self, loads: &[Load]) -> Result<(), DeviceError> {
        for loads in loads.chunks(self.most_blocks()) {
            let payload_bytes = self.layout.payload_bytes();
            let incoming = self.copies.incoming.take();
            let incoming = self.room(incoming, "incoming KV blocks", (payload_bytes * loads.len()) as u64)?;
            let ids = self.copies.incoming_ids.take();
            let ids = self.room(ids, "incoming block ids", loads.len() as u64 * 4)?;
            let block_ids: Vec<BlockId> = loads.iter().map(|load| load.block_id).collect();
            self.gpu.write(&ids, 0, bytemuck::cast_slice(&block_ids));
            for (index, load) in loads.iter().enumerate() {
                assert_eq!(load.payload.len(), payload_bytes, "the payload of block {}", load.block_id);
                self.gpu.write(&incoming, (index * payload_bytes) as u64, &load.payload);
            }
            for (layer, cache) in self.cache.iter().enumerate() {
                let (encoder, count) = (&mut self.encoder, loads.len() as u32);
                let (key, value) = (&cache.key, &cache.value);
                kernels::scatter_blocks(encoder, &self.plan, &incoming, &ids, key, value, &self.layout, layer, count)?;
            }
            (self.copies.incoming, self.copies.incoming_ids) = (Some(incoming), Some(ids));
            // What the next chunk writes would land before this one's commands.
            self.encoder.submit()?;
        }
        Ok(())
    }

    /// The payloads of the last recorded stores, in their order.
    pub(super) fn read_blocks(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        let num_blocks = std::mem::take(&mut self.copies.num_outgoing);
        let Some(outgoing) = self.copies.outgoing.as_ref().filter(|_| num_blocks > 0) else { return Ok(Vec::new()) };
        self.encoder.submit()?;
        let payload_bytes = self.layout.payload_bytes();
        let read = self.gpu.read(&[(outgoing, (payload_bytes * num_blocks) as u64)])?;
        // One allocation holds them all; each is kept alone, so that a tier that keeps one keeps no other.
        let all = read.first().map_or(&[][..], Vec::as_slice);
        Ok(all.chunks_exact(payload_bytes).map(Bytes::copy_from_slice).collect())
    }
}
