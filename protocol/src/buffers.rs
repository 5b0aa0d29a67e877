//! Memory for payloads, used again: fresh memory costs a fault a page, which is as much as the copy into it.
//!
//! Held by whoever reads many blocks: the disk's readers and the tier's client. A buffer comes back when the last `Bytes` of it
//! is dropped. Invariant: what waits to be used again is bounded.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Shorter payloads are not worth it.
const SMALLEST: usize = 32 << 10;
/// Bytes that wait at most.
const MOST_BYTES: usize = 64 << 20;

#[derive(Debug, Default)]
struct Free {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

/// Buffers that wait to be used again.
#[derive(Debug, Default)]
pub struct Buffers(Mutex<Free>);

impl Buffers {
    fn free(&self) -> MutexGuard<'_, Free> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An empty buffer with room for `len` bytes, and for twice as many at most: what is kept takes about what it counts.
    pub fn take(&self, len: usize) -> Vec<u8> {
        let mut free = self.free();
        let Some(index) = free
            .buffers
            .iter()
            .rposition(|buffer| (len..=2 * len).contains(&buffer.capacity()))
            .filter(|_| len >= SMALLEST)
        else {
            return Vec::with_capacity(len);
        };
        let buffer = free.buffers.swap_remove(index);
        free.bytes -= buffer.capacity();
        buffer
    }

    /// The bytes of a filled buffer, which comes back when they are dropped.
    pub fn freeze(self: &Arc<Self>, buffer: Vec<u8>) -> Bytes {
        if buffer.len() < SMALLEST {
            return Bytes::from(buffer);
        }
        Bytes::from_owner(Lent { buffer, buffers: Arc::clone(self) })
    }
}

/// A buffer in use.
struct Lent {
    buffer: Vec<u8>,
    buffers: Arc<Buffers>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let mut free = self.buffers.free();
        if free.bytes + buffer.capacity() <= MOST_BYTES {
            buffer.clear();
            free.bytes += buffer.capacity();
            free.buffers.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_used_again_and_what_waits_is_bounded() {
        let buffers = Arc::new(Buffers::default());
        let filled = |len: usize| {
            let mut buffer = buffers.take(len);
            buffer.resize(len, 7);
            buffers.freeze(buffer)
        };
        let bytes = filled(100_000);
        let (at, slice) = (bytes.as_ptr(), bytes.slice(5..9));
        drop(bytes);
        assert_ne!(filled(100_000).as_ptr(), at, "a part of it is still in use");
        drop(slice);
        assert_eq!(buffers.free().buffers.len(), 2);
        let again = filled(99_000);
        assert!(again.len() == 99_000 && buffers.free().buffers.len() == 1);
        drop((0..20).map(|_| filled(10 << 20)).collect::<Vec<Bytes>>());
        assert!(buffers.free().bytes <= MOST_BYTES);
        drop(filled(10));
        assert!(buffers.free().buffers.iter().all(|buffer| buffer.capacity() >= SMALLEST));
    }
}
