//! What workers will hold soon, or probably hold: chunks of prompts that were sent to them.
//!
//! Filled by dispatch, read beside the exact index. For our engines it bridges the time until they tell; for others it is all
//! there is. Invariant: bounded by worker, the oldest goes first.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use protocol::HeldChunk;
use protocol::prompt_chain::Chunk;

use crate::index::{Held, Index, Slot};

/// Our engines tell by then.
const BRIDGE: Duration = Duration::from_secs(5);
/// How often it is looked for what is too old.
const LOOK: Duration = Duration::from_millis(500);
/// Chunks of one of our engines.
const MAX_BRIDGED: usize = 16 << 10;
/// Chunks of another server: 32 MB of text, some eight million tokens.
const MAX_ESTIMATED: usize = 128 << 10;

/// Chunks that were sent to one worker.
#[derive(Debug, Default)]
struct Sent {
    /// The oldest first.
    queue: VecDeque<(u64, Instant)>,
    /// When each was sent last.
    last: HashMap<u64, Instant>,
    /// Whether the worker tells what it holds.
    tells: bool,
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
    /// When it was last looked for what is too old.
    looked: Mutex<Option<Instant>>,
}

impl Default for Estimates {
    fn default() -> Self {
        Self { index: Index::new(usize::MAX), sent: Mutex::default(), looked: Mutex::default() }
    }
}

impl Estimates {
    /// A prompt goes to a worker; `tells` says whether that will tell what it holds.
    pub fn sent(&self, slot: Slot, chain: &[Chunk], num_tokens: f64, tells: bool) {
        let most = if tells { MAX_BRIDGED } else { MAX_ESTIMATED };
        // The longest part that fits: what goes first is what others share.
        let chain = &chain[..chain.len().min(most)];
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
        sent.tells = tells;
        let mut gone = Vec::new();
        while !sent.queue.is_empty() && sent.queue.len() + held.len() > most {
            gone.extend(sent.pop());
        }
        sent.queue.extend(held.iter().map(|chunk| (chunk.hash, now)));
        sent.last.extend(held.iter().map(|chunk| (chunk.hash, now)));
        self.index.remove(slot, &gone);
        self.index.store(slot, &held);
    }

    /// How much of a prompt each worker may hold.
    pub fn held(&self, chain: &[Chunk]) -> Vec<Held> {
        self.drop_old();
        self.index.held(chain)
    }

    /// What our engines have told of by now is expected no longer.
    fn drop_old(&self) {
        let now = Instant::now();
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        if looked.is_some_and(|looked| now.duration_since(looked) < LOOK) {
            return;
        }
        *looked = Some(now);
        drop(looked);
        let mut all = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        for (&slot, sent) in all.iter_mut().filter(|(_, sent)| sent.tells) {
            let mut gone = Vec::new();
            while sent.queue.front().is_some_and(|(_, at)| now.duration_since(*at) > BRIDGE) {
                gone.extend(sent.pop());
            }
            self.index.remove(slot, &gone);
        }
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
        estimates.sent(3, &chain(1, 4), 200.0, true);
        assert_eq!(estimates.held(&chain(1, 4)), [Held { slot: 3, num_chunks: 4, num_tokens: 200 }]);
        for prompt in 2..40 {
            estimates.sent(3, &chain(prompt, 1024), 1.0, true);
        }
        assert_eq!(estimates.held(&chain(1, 4)), []);
        assert_eq!(estimates.held(&chain(39, 1024))[0].num_chunks, 1024);
        assert!(estimates.index.len() <= MAX_BRIDGED);
        estimates.forget(3);
        assert!(estimates.index.is_empty());
    }
}
