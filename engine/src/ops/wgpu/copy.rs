//! Moving whole KV blocks between the device's pool and canonical payloads on the host.
//!
//! Called before a step for what the scheduler decided. The copies are recorded in front of the step's own work and read back
//! after it, so that a step waits for the device once. Invariant: the buffers take `COPY_BYTES` each way, or one block where
//! that is more: what goes beyond is copied and read in turns.

use bytes::Bytes;

use super::{DeviceError, WgpuOps};
use crate::kernels::{self, GpuBuffer};
use crate::kv::{BlockId, COPY_BYTES, Load};

/// Buffers of the copies, grown when needed.
#[derive(Default)]
pub(super) struct CopyBuffers {
    outgoing: Buffers,
    incoming: Buffers,
    /// Blocks in `outgoing` that were not read back.
    num_outgoing: usize,
    /// What was read back before the last recorded copy out.
    read: Vec<Bytes>,
}

/// Payloads, and which blocks they are of.
#[derive(Default)]
struct Buffers {
    payloads: Option<GpuBuffer>,
    ids: Option<GpuBuffer>,
}

impl WgpuOps {
    /// Blocks that one copy can hold: its buffer is one binding.
    fn most_blocks(&self) -> usize {
        (COPY_BYTES.min(self.gpu.max_binding_bytes()) as usize / self.layout.payload_bytes()).max(1)
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

    /// Buffers with room for so many blocks.
    fn copy_buffers(&mut self, current: Buffers, num_blocks: usize) -> Result<(GpuBuffer, GpuBuffer), DeviceError> {
        let payloads = self.room(current.payloads, "KV blocks", (self.layout.payload_bytes() * num_blocks) as u64)?;
        Ok((payloads, self.room(current.ids, "block ids", num_blocks as u64 * 4)?))
    }

    /// Records the copy of blocks out; [`Self::read_blocks`] brings them.
    pub(super) fn record_stores(&mut self, block_ids: &[BlockId]) -> Result<(), DeviceError> {
        for block_ids in block_ids.chunks(self.most_blocks()) {
            self.read_outgoing()?;
            let buffers = std::mem::take(&mut self.copies.outgoing);
            let (payloads, ids) = self.copy_buffers(buffers, block_ids.len())?;
            self.gpu.write(&ids, 0, bytemuck::cast_slice(block_ids));
            for (layer, cache) in self.cache.iter().enumerate() {
                let (encoder, count) = (&mut self.encoder, block_ids.len() as u32);
                let (key, value) = (&cache.key, &cache.value);
                kernels::gather_blocks(encoder, &self.plan, key, value, &ids, &payloads, &self.layout, layer, count)?;
            }
            self.copies.outgoing = Buffers { payloads: Some(payloads), ids: Some(ids) };
            self.copies.num_outgoing = block_ids.len();
        }
        Ok(())
    }

    /// Records the copy of blocks in.
    pub(super) fn record_loads(&mut self, loads: &[Load]) -> Result<(), DeviceError> {
        for loads in loads.chunks(self.most_blocks()) {
            let payload_bytes = self.layout.payload_bytes();
            let buffers = std::mem::take(&mut self.copies.incoming);
            let (incoming, ids) = self.copy_buffers(buffers, loads.len())?;
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
            self.copies.incoming = Buffers { payloads: Some(incoming), ids: Some(ids) };
            // What the next chunk writes would land before this one's commands.
            self.encoder.submit()?;
        }
        Ok(())
    }

    /// Reads back what was recorded last and not read.
    fn read_outgoing(&mut self) -> Result<(), DeviceError> {
        let num_blocks = std::mem::take(&mut self.copies.num_outgoing);
        let Some(payloads) = self.copies.outgoing.payloads.as_ref().filter(|_| num_blocks > 0) else { return Ok(()) };
        self.encoder.submit()?;
        let payload_bytes = self.layout.payload_bytes();
        for read in self.gpu.read(&[(payloads, (payload_bytes * num_blocks) as u64)])? {
            // Each is kept alone, so that a tier that keeps one keeps no other.
            self.copies.read.extend(read.chunks_exact(payload_bytes).map(Bytes::copy_from_slice));
        }
        Ok(())
    }

    /// The payloads of the recorded stores, in their order.
    pub(super) fn read_blocks(&mut self) -> Result<Vec<Bytes>, DeviceError> {
        self.read_outgoing()?;
        Ok(std::mem::take(&mut self.copies.read))
    }
}
