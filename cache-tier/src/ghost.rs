//! Keys that were seen and are not held: a bounded memory of what would have been a hit.
//!
//! Used for admission on the second touch and by S3-FIFO, which puts a key that comes back soon after its eviction into
//! the main queue. Keys are kept as 64 bits: a false memory admits a block too early, no more.

use std::collections::{HashMap, HashSet, VecDeque};

/// The last keys that were noted.
#[derive(Debug, Default)]
pub struct Ghost {
    order: VecDeque<u64>,
    present: HashSet<u64>,
    /// How many entries of the order are of keys that were taken since: they forget nothing when they are passed.
    stale: HashMap<u64, u32>,
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
        while self.order.len() > self.capacity {
            let Some(oldest) = self.order.pop_front() else { break };
            match self.stale.get_mut(&oldest) {
                Some(1) => {
                    self.stale.remove(&oldest);
                }
                Some(entries) => *entries -= 1,
                None => {
                    self.present.remove(&oldest);
                }
            }
        }
    }

    /// Whether a key is remembered.
    pub fn contains(&self, key: u64) -> bool {
        self.present.contains(&key)
    }

    /// Whether a key was noted; it is forgotten.
    pub fn take(&mut self, key: u64) -> bool {
        let was_noted = self.present.remove(&key);
        if was_noted {
            *self.stale.entry(key).or_default() += 1;
        }
        was_noted
    }

    /// Bytes that it takes, about.
    pub fn memory_bytes(&self) -> usize {
        self.order.capacity() * 8 + self.present.capacity() * 8 / 7 * 9 + self.stale.capacity() * 8 / 7 * 17
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
        // Noted, taken and noted again, it is as new as its last noting.
        let mut again = Ghost::new(2);
        again.note(1);
        again.take(1);
        (1..3).for_each(|key| again.note(key));
        assert!(again.contains(1) && again.contains(2));
        for key in 10..10_000 {
            ghost.note(key);
            ghost.take(key);
        }
        assert!(ghost.order.len() <= 3 && ghost.present.is_empty());
    }
}
