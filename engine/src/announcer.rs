//! Which chunks of prompt chains this engine holds, as routers are told: from blocks that get and lose their names.
//!
//! Owned by the engine loop, fed after each step, and by the server after each answer. Knows no socket and no clock.
//! Invariants: a chunk is held exactly while the block that holds the last full block of its tokens has that name, and what was
//! published is what a reader of the snapshot and of all changes since arrives at.

use std::collections::HashMap;
use std::sync::Arc;

use protocol::worker_event::MAX_CHUNKS;
use protocol::{BlockHash, HeldChunk, WorkerEvent};
use tokio::sync::broadcast;

use crate::kv::BLOCK_SIZE;

/// Chunks that end in one block and are told of.
const MAX_CHUNKS_A_BLOCK: usize = 32;
/// Changes that a slow reader may be behind; one that is further behind starts again.
const MAX_BEHIND: usize = 1024;

/// Where a chunk of a prompt ends in its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PromptChunk {
    /// Of the prompt's chain.
    pub hash: u64,
    /// Tokens up to its end.
    pub num_tokens: u32,
}

impl PromptChunk {
    /// The last full block of its tokens; the first, where not even that is full.
    pub fn block_index(&self, block_size: usize) -> usize {
        (self.num_tokens as usize / block_size).max(1) - 1
    }
}

/// A chunk and the block that must be held for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// The chunk.
    pub chunk: PromptChunk,
    /// The block.
    pub block: BlockHash,
}

/// What a new reader begins with.
#[derive(Debug)]
pub struct Subscription {
    /// All that is held.
    pub held: Vec<HeldChunk>,
    /// The number of the last change in it.
    pub sequence: u64,
    /// Changes from then on.
    pub changes: broadcast::Receiver<Arc<WorkerEvent>>,
}

/// The books.
#[derive(Debug)]
pub struct Announcer {
    by_chunk: HashMap<u64, (BlockHash, u32)>,
    by_block: HashMap<BlockHash, Vec<u64>>,
    sequence: u64,
    changes: broadcast::Sender<Arc<WorkerEvent>>,
    /// What was not published yet, by chunk: whether it is held.
    pending: HashMap<u64, bool>,
}

impl Default for Announcer {
    fn default() -> Self {
        let changes = broadcast::Sender::new(MAX_BEHIND);
        Self { by_chunk: HashMap::new(), by_block: HashMap::new(), sequence: 0, changes, pending: HashMap::new() }
    }
}

impl Announcer {
    /// A chunk's block is held.
    pub fn hold(&mut self, announcement: Announcement) {
        let Announcement { chunk: PromptChunk { hash, num_tokens }, block } = announcement;
        // What ends before its block does lies in many: the first that is held stands for it.
        if (num_tokens as usize) < BLOCK_SIZE && self.by_chunk.contains_key(&hash) {
            return;
        }
        match self.by_chunk.insert(hash, (block, num_tokens)) {
            Some(before) if before == (block, num_tokens) => return,
            Some((before, _)) => self.unlink(hash, &before),
            None => {}
        }
        let hashes = self.by_block.entry(block).or_default();
        hashes.push(hash);
        self.pending.insert(hash, true);
        // Each question behind one prompt that all share ends in the same block: the last ones are told.
        if hashes.len() > MAX_CHUNKS_A_BLOCK {
            let oldest = hashes.remove(0);
            self.by_chunk.remove(&oldest);
            self.pending.insert(oldest, false);
        }
    }

    /// A block lost its name: what ends in it is held no longer.
    pub fn forget(&mut self, block: &BlockHash) {
        for hash in self.by_block.remove(block).unwrap_or_default() {
            self.by_chunk.remove(&hash);
            self.pending.insert(hash, false);
        }
    }

    /// A request has this chunk, and its own blocks: where the one that was said is not among them, at its place, the chunk is
    /// withdrawn until the request's is held.
    pub fn contradict(&mut self, hash: u64, blocks: &[BlockHash]) {
        let Some(&(block, num_tokens)) = self.by_chunk.get(&hash) else { return };
        let place = PromptChunk { hash, num_tokens }.block_index(BLOCK_SIZE);
        if (num_tokens as usize) < BLOCK_SIZE || blocks.get(place) == Some(&block) {
            return;
        }
        self.by_chunk.remove(&hash);
        self.unlink(hash, &block);
        self.pending.insert(hash, false);
    }

    fn unlink(&mut self, hash: u64, block: &BlockHash) {
        if let Some(hashes) = self.by_block.get_mut(block) {
            hashes.retain(|other| *other != hash);
            if hashes.is_empty() {
                self.by_block.remove(block);
            }
        }
    }

    /// Chunks that are held.
    pub fn num_held(&self) -> usize {
        self.by_chunk.len()
    }

    /// Tells readers what has changed since this was last called.
    pub fn publish(&mut self) {
        if self.pending.is_empty() {
            return;
        }
        let pending: Vec<(u64, bool)> = self.pending.drain().collect();
        for part in pending.chunks(MAX_CHUNKS) {
            let removed = part.iter().filter(|(_, held)| !held).map(|(hash, _)| *hash).collect();
            let held = |(hash, held): &(u64, bool)| {
                let (_, num_tokens) = self.by_chunk.get(hash).filter(|_| *held)?;
                Some(HeldChunk { hash: *hash, num_tokens: *num_tokens, tier: 0 })
            };
            let stored = part.iter().filter_map(held).collect();
            self.sequence += 1;
            // Nobody may listen.
            let _unheard =
                self.changes.send(Arc::new(WorkerEvent::Change { sequence: self.sequence, removed, stored }));
        }
    }

    /// All that is held, and every change from now on.
    pub fn subscribe(&mut self) -> Subscription {
        self.publish();
        let held = |(&hash, &(_, num_tokens)): (&u64, &(BlockHash, u32))| HeldChunk { hash, num_tokens, tier: 0 };
        let held = self.by_chunk.iter().map(held).collect();
        Subscription { held, sequence: self.sequence, changes: self.changes.subscribe() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use protocol::Salt;

    use super::*;

    fn block(number: u32) -> BlockHash {
        BlockHash::root(&Salt::default()).child(&[number])
    }

    fn said(hash: u64, number: u32) -> Announcement {
        Announcement { chunk: PromptChunk { hash, num_tokens: number * 16 }, block: block(number) }
    }

    #[test]
    fn a_chunk_needs_the_last_full_block_of_its_tokens() {
        let index = |num_tokens| PromptChunk { hash: 0, num_tokens }.block_index(16);
        assert_eq!([1, 15, 16, 31, 32, 100].map(index), [0, 0, 0, 0, 1, 5]);
    }

    #[test]
    fn a_contradicted_chunk_is_withdrawn_until_its_new_block_is_held() {
        let mut announcer = Announcer::default();
        announcer.hold(said(1, 3));
        let mut changes = announcer.subscribe().changes;
        let blocks = |third: u32| vec![block(0), block(1), block(third)];
        announcer.contradict(1, &blocks(3));
        announcer.publish();
        assert!(changes.try_recv().is_err(), "it said the same");
        announcer.contradict(1, &blocks(4));
        announcer.forget(&block(3));
        announcer.publish();
        let change = |sequence, removed: &[u64], stored: &[HeldChunk]| {
            Arc::new(WorkerEvent::Change { sequence, removed: removed.into(), stored: stored.into() })
        };
        assert_eq!(changes.try_recv().unwrap(), change(2, &[1], &[]));
        announcer.hold(said(1, 4));
        announcer.publish();
        assert_eq!(changes.try_recv().unwrap(), change(3, &[], &[HeldChunk { hash: 1, num_tokens: 64, tier: 0 }]));
        announcer.forget(&block(4));
        assert_eq!((announcer.num_held(), announcer.by_block.len()), (0, 0));
    }

    #[test]
    fn a_block_that_all_share_tells_of_the_last_questions_only() {
        let mut announcer = Announcer::default();
        (0..100).for_each(|question| announcer.hold(said(question, 2)));
        assert_eq!(announcer.num_held(), MAX_CHUNKS_A_BLOCK);
        assert!(announcer.by_chunk.contains_key(&99) && !announcer.by_chunk.contains_key(&0));
        // What is shorter than a block is in whichever block it was first, and nobody contradicts that.
        let short = |number| Announcement { chunk: PromptChunk { hash: 500, num_tokens: 7 }, block: block(number) };
        announcer.hold(short(5));
        announcer.hold(short(6));
        announcer.contradict(500, &[block(7)]);
        assert_eq!(announcer.by_chunk[&500].0, block(5));
    }

    /// What a reader makes of a subscription.
    struct Follower {
        held: BTreeMap<u64, u32>,
        sequence: u64,
        changes: broadcast::Receiver<Arc<WorkerEvent>>,
    }

    impl Follower {
        fn new(subscription: Subscription) -> Self {
            let Subscription { held, sequence, changes } = subscription;
            Self { held: held.iter().map(|chunk| (chunk.hash, chunk.num_tokens)).collect(), sequence, changes }
        }

        fn follow(&mut self) {
            while let Ok(event) = self.changes.try_recv() {
                let WorkerEvent::Change { sequence, removed, stored } = &*event else { panic!("{event:?}") };
                assert_eq!(*sequence, self.sequence + 1);
                self.sequence = *sequence;
                self.held.retain(|hash, _| !removed.contains(hash));
                self.held.extend(stored.iter().map(|chunk| (chunk.hash, chunk.num_tokens)));
            }
        }
    }

    #[test]
    fn readers_arrive_at_what_is_held_under_random_operations() {
        let (mut announcer, mut state, mut followers) = (Announcer::default(), 7u64, Vec::new());
        for round in 0..5_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (chunk, number) = ((state >> 33) % 40, (state >> 50) as u32 % 12);
            match (state >> 40) % 4 {
                0 | 1 => announcer.hold(said(chunk, number)),
                2 => announcer.forget(&block(number)),
                _ => announcer.contradict(chunk, &vec![block(number); 12]),
            }
            if round % 7 == 0 {
                announcer.publish();
            }
            if round % 1000 == 0 {
                followers.push(Follower::new(announcer.subscribe()));
            }
            followers.iter_mut().for_each(Follower::follow);
        }
        announcer.publish();
        let held = announcer.by_chunk.iter().map(|(hash, (_, num_tokens))| (*hash, *num_tokens));
        let truth: BTreeMap<u64, u32> = held.collect();
        for follower in &mut followers {
            follower.follow();
            assert_eq!(follower.held, truth);
        }
        let linked: BTreeSet<u64> = announcer.by_block.values().flatten().copied().collect();
        assert!(linked == truth.keys().copied().collect() && announcer.by_block.values().all(|all| !all.is_empty()));
    }
}
