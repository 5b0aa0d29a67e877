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
    /// Payloads and block ids, for each binding's worth of blocks.
    outgoing: Vec<(GpuBuffer, GpuBuffer)>,
    incoming: Option<GpuBuffer>,
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
        self.copies.num_outgoing = block_ids.len();
        let mut before = std::mem::take(&mut self.copies.outgoing).into_iter();
        for block_ids in block_ids.chunks(self.most_blocks()) {
            let bytes = (self.layout.payload_bytes() * block_ids.len()) as u64;
            let (payloads, ids) = before.next().unzip();
            let payloads = self.room(payloads, "outgoing KV blocks", bytes)?;
            let ids = self.room(ids, "outgoing block ids", block_ids.len() as u64 * 4)?;
            self.gpu.write(&ids, 0, bytemuck::cast_slice(block_ids));
            for (layer, cache) in self.cache.iter().enumerate() {
                let (encoder, count) = (&mut self.encoder, block_ids.len() as u32);
                let (key, value) = (&cache.key, &cache.value);
                kernels::gather_blocks(encoder, &self.plan, key, value, &ids, &payloads, &self.layout, layer, count)?;
            }
            self.copies.outgoing.push((payloads, ids));
        }
        self.copies.outgoing.extend(before);
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
        let mut num_blocks = std::mem::take(&mut self.copies.num_outgoing);
        let mut all = Vec::with_capacity(num_blocks);
        if num_blocks > 0 {
            self.encoder.submit()?;
        }
        let payload_bytes = self.layout.payload_bytes();
        for (payloads, _) in &self.copies.outgoing {
            let here = num_blocks.min(self.most_blocks());
            if here == 0 {
                break;
            }
            num_blocks -= here;
            for read in self.gpu.read(&[(payloads, (payload_bytes * here) as u64)])? {
                // Each is kept alone, so that a tier that keeps one keeps no other.
                all.extend(read.chunks_exact(payload_bytes).map(Bytes::copy_from_slice));
            }
        }
        Ok(all)
    }
}
