//! Which block makes room: S3-FIFO, with a small queue of half the blocks.
//!
//! Owned by whoever holds blocks; pure. New blocks enter the small queue; those used again while in it move to the main
//! queue, the others leave and their keys are remembered by a ghost list; what comes back from there enters the main
//! queue at once, in which a used block gets another round. Source: Yang et al., "FIFO queues are all you need for cache
//! eviction", SOSP 2023. The paper's small queue is a tenth; on the production trace of `benches/eviction.rs` a half is
//! better than LRU at every size, a tenth is worse than LRU where the cache is large.

use std::collections::VecDeque;

/// Uses beyond this are not told apart.
pub const MAX_USES: u8 = 3;

/// What the owner knows of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residency {
    /// It left by another way.
    Gone,
    /// It cannot leave now: it is being read, or leased.
    Held,
    /// It can, and was used so often since it was last asked about.
    Uses(u8),
}

/// Where the owner keeps it.
pub trait Residents {
    /// What is known of a block.
    fn residency(&self, id: u32) -> Residency;
    /// Sets the count of its uses.
    fn set_uses(&mut self, id: u32, uses: u8);
}

/// The queue that a victim came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Used once: its key is worth remembering.
    Small,
    /// Used again, long ago.
    Main,
}

/// Two queues of ids.
#[derive(Debug, Default)]
pub struct Eviction {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
}

impl Eviction {
    /// Ids in both queues.
    pub fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a block: to the main queue where its key was remembered.
    pub fn insert(&mut self, id: u32, was_remembered: bool) {
        if was_remembered { self.main.push_back(id) } else { self.small.push_back(id) }
    }

    /// Forgets blocks that the owner lets go.
    pub fn retain(&mut self, mut keep: impl FnMut(u32) -> bool) {
        self.small.retain(|&id| keep(id));
        self.main.retain(|&id| keep(id));
    }

    /// The block that leaves, taken out of its queue; `None` where all are held.
    pub fn victim(&mut self, residents: &mut impl Residents) -> Option<(u32, Queue)> {
        // Every id is passed at most once for each of its uses and once more.
        let mut left = self.len() * (usize::from(MAX_USES) + 2);
        while left > 0 && !self.is_empty() {
            left -= 1;
            let from_small = self.small.len() > self.main.len() || self.main.is_empty();
            let queue = if from_small { &mut self.small } else { &mut self.main };
            let Some(id) = queue.pop_front() else { break };
            match (residents.residency(id), from_small) {
                (Residency::Gone, _) => {}
                (Residency::Held, true) => self.small.push_back(id),
                (Residency::Held, false) => self.main.push_back(id),
                (Residency::Uses(0), true) => return Some((id, Queue::Small)),
                (Residency::Uses(0), false) => return Some((id, Queue::Main)),
                (Residency::Uses(_), true) => {
                    residents.set_uses(id, 0);
                    self.main.push_back(id);
                }
                (Residency::Uses(uses), false) => {
                    residents.set_uses(id, uses - 1);
                    self.main.push_back(id);
                }
            }
        }
        None
    }

    /// Bytes that it takes.
    pub fn memory_bytes(&self) -> usize {
        (self.small.capacity() + self.main.capacity()) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[derive(Default)]
    struct Known(HashMap<u32, Residency>);

    impl Residents for Known {
        fn residency(&self, id: u32) -> Residency {
            self.0.get(&id).copied().unwrap_or(Residency::Gone)
        }

        fn set_uses(&mut self, id: u32, uses: u8) {
            self.0.insert(id, Residency::Uses(uses));
        }
    }

    #[test]
    fn what_was_used_again_gets_another_round() {
        let (mut eviction, mut known) = (Eviction::default(), Known::default());
        for id in 0..6 {
            eviction.insert(id, id == 5);
            known.set_uses(id, u8::from(id == 0 || id == 3));
        }
        let mut order = Vec::new();
        while let Some((id, queue)) = eviction.victim(&mut known) {
            order.push((id, queue));
        }
        let small = |id| (id, Queue::Small);
        let main = |id| (id, Queue::Main);
        // The small queue is down to its half when 4 is next in it.
        assert_eq!(order, [small(1), small(2), main(5), main(0), main(3), small(4)]);
    }

    #[test]
    fn what_is_held_stays_and_what_is_gone_is_passed() {
        let (mut eviction, mut known) = (Eviction::default(), Known::default());
        (0..4).for_each(|id| eviction.insert(id, false));
        known.0.insert(0, Residency::Held);
        known.0.insert(2, Residency::Uses(0));
        known.0.insert(3, Residency::Held);
        assert_eq!(eviction.victim(&mut known), Some((2, Queue::Small)));
        assert_eq!((eviction.victim(&mut known), eviction.len()), (None, 2), "all held: no endless search");
    }
}
