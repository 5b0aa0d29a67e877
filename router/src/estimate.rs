//! What servers probably hold that tell nothing of it: chunks of prompts that were sent to them.
//!
//! Filled by dispatch, read beside the exact index. Invariant: bounded by worker, the oldest goes first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use tokio::time::Instant;

use protocol::HeldChunk;
use protocol::prompt_chain::Chunk;

use crate::index::{Held, Index, Slot};

/// Chunks of another server: 32 MB of text, some eight million tokens.
const MAX_ESTIMATED: usize = 128 << 10;

/// Chunks that were sent to one worker.
#[derive(Debug, Default)]
struct Sent {
    /// The oldest first.
    queue: VecDeque<(u64, Instant)>,
    /// When each was sent last.
    last: HashMap<u64, Instant>,
}

impl Sent {
    /// Takes the oldest; its hash, unless it was sent again since.
    fn pop(&mut self) -> Option<u64> {
        let (hash, at) = self.queue.pop_front()?;
        if self.last.get(&hash) != Some(&at) {
            return None;
        }
        self.last.remove(&hash);
        Some(hash)
    }
}

/// The estimates.
#[derive(Debug)]
pub struct Estimates {
    index: Index,
    sent: Mutex<HashMap<Slot, Sent>>,
}

impl Default for Estimates {
    fn default() -> Self {
        Self { index: Index::new(usize::MAX), sent: Mutex::default() }
    }
}

impl Estimates {
    /// A prompt goes to a worker.
    pub fn sent(&self, slot: Slot, chain: &[Chunk], num_tokens: f64) {
        let a_chunk = num_tokens / chain.len().max(1) as f64;
        let held = |(chunk, number): (&Chunk, u32)| HeldChunk {
            hash: chunk.hash,
            num_tokens: (f64::from(number) * a_chunk) as u32,
            tier: 0,
        };
        let held: Vec<HeldChunk> = chain.iter().zip(1..).map(held).collect();
        let now = Instant::now();
        let mut all = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = all.entry(slot).or_default();
        let mut gone = Vec::new();
        while !sent.queue.is_empty() && sent.queue.len() + held.len() > MAX_ESTIMATED {
            gone.extend(sent.pop());
        }
        sent.queue.extend(held.iter().map(|chunk| (chunk.hash, now)));
        sent.last.extend(held.iter().map(|chunk| (chunk.hash, now)));
        self.index.remove(slot, &gone);
        self.index.store(slot, &held);
    }

    /// How much of a prompt each worker may hold.
    pub fn held(&self, chain: &[Chunk]) -> Vec<Held> {
        self.index.held(chain)
    }

    /// A worker is gone, or has lost what it held.
    pub fn forget(&self, slot: Slot) {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner).remove(&slot);
        self.index.remove_worker(slot);
    }

    /// Bytes in memory, about.
    pub fn num_bytes(&self) -> usize {
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = |sent: &Sent| (sent.queue.capacity() + 2 * sent.last.capacity()) * size_of::<(u64, Instant)>();
        sent.values().map(bytes).sum::<usize>() + self.index.num_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(prompt: u64, len: u64) -> Vec<Chunk> {
        let hash = |at: u64| twox_hash::XxHash3_64::oneshot(&[prompt.to_le_bytes(), at.to_le_bytes()].concat());
        (0..len).map(|at| Chunk { hash: hash(at), message: 0, end: 0 }).collect()
    }

    #[test]
    fn what_was_sent_is_expected_there_until_newer_takes_its_room() {
        let estimates = Estimates::default();
        estimates.sent(3, &chain(1, 4), 200.0);
        assert_eq!(estimates.held(&chain(1, 4)), [Held { slot: 3, num_chunks: 4, num_tokens: 200 }]);
        for prompt in 2..140 {
            estimates.sent(3, &chain(prompt, 1024), 1.0);
        }
        assert_eq!(estimates.held(&chain(1, 4)), []);
        assert_eq!(estimates.held(&chain(139, 1024))[0].num_chunks, 1024);
        assert!(estimates.index.len() <= MAX_ESTIMATED);
        estimates.forget(3);
        assert!(estimates.index.is_empty());
    }
}
