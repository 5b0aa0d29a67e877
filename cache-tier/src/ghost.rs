//! Keys that were seen and are not held: a bounded memory of what would have been a hit.
//!
//! Used for admission on the second touch and by S3-FIFO, which puts a key that comes back soon after its eviction into
//! the main queue. Keys are kept as 64 bits: a false memory admits a block too early, no more.

use std::collections::{HashSet, VecDeque};

/// The last keys that were noted.
#[derive(Debug, Default)]
pub struct Ghost {
    order: VecDeque<u64>,
    present: HashSet<u64>,
    capacity: usize,
}

impl Ghost {
    /// Remembers up to `capacity` keys.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Notes a key; the oldest are forgotten.
    pub fn note(&mut self, key: u64) {
        if self.capacity == 0 || !self.present.insert(key) {
            return;
        }
        self.order.push_back(key);
        // A taken key stays in the order until it is passed.
        while self.order.len() > self.capacity {
            if let Some(oldest) = self.order.pop_front() {
                self.present.remove(&oldest);
            }
        }
    }

    /// Whether a key is remembered.
    pub fn contains(&self, key: u64) -> bool {
        self.present.contains(&key)
    }

    /// Whether a key was noted; it is forgotten.
    pub fn take(&mut self, key: u64) -> bool {
        self.present.remove(&key)
    }

    /// Bytes that it takes, about.
    pub fn memory_bytes(&self) -> usize {
        self.order.capacity() * 8 + self.present.capacity() * 8 / 7 * 9
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_remembers_the_last_keys_and_each_once() {
        let mut ghost = Ghost::new(3);
        (0..5).for_each(|key| ghost.note(key));
        assert!(!ghost.take(1) && ghost.take(2) && !ghost.take(2) && ghost.take(4));
        for key in 10..10_000 {
            ghost.note(key);
            ghost.take(key);
        }
        assert!(ghost.order.len() <= 3 && ghost.present.is_empty());
    }
}
