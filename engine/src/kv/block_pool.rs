//! The fixed array of KV blocks: which are free, how many sequences hold each, and which have a name.
//!
//! Owned by the block manager; knows no GPU, clock or thread. Every operation is O(1). Invariants: a block is free exactly
//! when its reference count is zero; free + used = all; a name leads to the one block that has it. A free block keeps its
//! name, and so its contents, until it is taken: the least recently released first.

use std::collections::HashMap;

use protocol::BlockHash;

/// Physical block number.
pub type BlockId = u32;

/// No block: the ends of the free list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Block {
    ref_count: u32,
    hash: Option<BlockHash>,
    /// Neighbours in the free list.
    previous: u32,
    next: u32,
}

/// Reference counts, names, and the free blocks in the order in which they are taken.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: HashMap<BlockHash, BlockId>,
    first_free: u32,
    last_free: u32,
    num_free: usize,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks without names.
    pub fn new(num_blocks: usize) -> Self {
        let block = Block { ref_count: 0, hash: None, previous: NONE, next: NONE };
        let blocks = vec![block; num_blocks];
        let mut pool = Self { blocks, by_hash: HashMap::new(), first_free: NONE, last_free: NONE, num_free: 0 };
        (0..num_blocks as BlockId).for_each(|block_id| pool.link_last(block_id));
        pool
    }

    /// All blocks.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks that no sequence holds.
    pub fn num_free(&self) -> usize {
        self.num_free
    }

    /// Blocks with a name, held or free.
    pub fn num_named(&self) -> usize {
        self.by_hash.len()
    }

    /// The block of this name.
    pub fn find(&self, hash: &BlockHash) -> Option<BlockId> {
        self.by_hash.get(hash).copied()
    }

    /// Whether no sequence holds the block.
    pub fn is_free(&self, block_id: BlockId) -> bool {
        self.blocks[block_id as usize].ref_count == 0
    }

    /// The block's name.
    pub fn hash(&self, block_id: BlockId) -> Option<BlockHash> {
        self.blocks[block_id as usize].hash
    }

    /// Takes the next free block, if there is one; what it held is forgotten.
    pub fn take(&mut self) -> Option<BlockId> {
        if self.first_free == NONE {
            return None;
        }
        let block_id = self.first_free;
        self.unlink(block_id);
        let block = &mut self.blocks[block_id as usize];
        assert_eq!(block.ref_count, 0, "block {block_id} was on the free list with {} holders", block.ref_count);
        block.ref_count = 1;
        if let Some(hash) = block.hash.take() {
            self.by_hash.remove(&hash);
        }
        Some(block_id)
    }

    /// Holds a block once more: one that another sequence holds, or a free one that still has its contents.
    pub fn hold(&mut self, block_id: BlockId) {
        if self.is_free(block_id) {
            self.unlink(block_id);
        }
        self.blocks[block_id as usize].ref_count += 1;
    }

    /// Gives up one hold of a block. A free block without a name is taken before all others.
    ///
    /// # Panics
    /// When nobody holds the block: it would be handed out twice.
    pub fn release(&mut self, block_id: BlockId) {
        let block = &mut self.blocks[block_id as usize];
        assert!(block.ref_count > 0, "block {block_id} released without a holder");
        block.ref_count -= 1;
        let (is_free, is_named) = (block.ref_count == 0, block.hash.is_some());
        match (is_free, is_named) {
            (true, true) => self.link_last(block_id),
            (true, false) => self.link_first(block_id),
            (false, _) => {}
        }
    }

    /// Names a held block, whose contents are complete. A name that another block has already stays there.
    pub fn name(&mut self, block_id: BlockId, hash: BlockHash) {
        let block = &mut self.blocks[block_id as usize];
        assert!(block.ref_count > 0, "block {block_id} named without a holder");
        if block.hash.is_none() && !self.by_hash.contains_key(&hash) {
            block.hash = Some(hash);
            self.by_hash.insert(hash, block_id);
        }
    }

    /// Takes a block's name, if it has one.
    pub fn forget_name(&mut self, block_id: BlockId) {
        if let Some(hash) = self.blocks[block_id as usize].hash.take() {
            self.by_hash.remove(&hash);
        }
    }

    fn link_last(&mut self, block_id: BlockId) {
        let last = self.last_free;
        let block = &mut self.blocks[block_id as usize];
        (block.previous, block.next) = (last, NONE);
        match self.blocks.get_mut(last as usize) {
            Some(last) => last.next = block_id,
            None => self.first_free = block_id,
        }
        self.last_free = block_id;
        self.num_free += 1;
    }

    fn link_first(&mut self, block_id: BlockId) {
        let first = self.first_free;
        let block = &mut self.blocks[block_id as usize];
        (block.previous, block.next) = (NONE, first);
        match self.blocks.get_mut(first as usize) {
            Some(first) => first.previous = block_id,
            None => self.last_free = block_id,
        }
        self.first_free = block_id;
        self.num_free += 1;
    }

    fn unlink(&mut self, block_id: BlockId) {
        let Block { previous, next, .. } = self.blocks[block_id as usize];
        match self.blocks.get_mut(previous as usize) {
            Some(previous) => previous.next = next,
            None => self.first_free = next,
        }
        match self.blocks.get_mut(next as usize) {
            Some(next) => next.previous = previous,
            None => self.last_free = previous,
        }
        self.num_free -= 1;
    }

    /// Holders of each block as the caller counts them are compared with the books: for tests.
    ///
    /// # Panics
    /// When an invariant does not hold.
    pub fn check(&self, holders: &HashMap<BlockId, u32>) {
        let (mut free, mut at, mut before) = (0, self.first_free, NONE);
        while at != NONE {
            let block = &self.blocks[at as usize];
            assert_eq!((block.ref_count, block.previous), (0, before), "free block {at}");
            (before, at) = (at, block.next);
            free += 1;
        }
        assert_eq!((free, before), (self.num_free, self.last_free), "the free list");
        let mut named = 0;
        for (block_id, block) in (0..).zip(&self.blocks) {
            assert_eq!(block.ref_count, holders.get(&block_id).copied().unwrap_or(0), "holders of block {block_id}");
            if let Some(hash) = block.hash {
                assert_eq!(self.by_hash.get(&hash), Some(&block_id), "the name of block {block_id}");
                named += 1;
            }
        }
        assert_eq!(named, self.by_hash.len(), "a name without its block");
        assert_eq!(self.num_free + holders.len(), self.blocks.len(), "free and used are all");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::Salt;

    fn hash(number: u32) -> BlockHash {
        BlockHash::root(&Salt::default()).child(&[number])
    }

    #[test]
    fn random_operations_keep_the_books() {
        let mut pool = BlockPool::new(7);
        let mut holders: HashMap<BlockId, u32> = HashMap::new();
        let mut state = 1u64;
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (kind, pick) = ((state >> 33) % 4, (state >> 40) as usize);
            let held = holders.keys().min_by_key(|&&id| (u64::from(id) * 31 + pick as u64) % 7).copied();
            match (kind, held) {
                (0, _) => match pool.take() {
                    Some(block_id) => assert_eq!(holders.insert(block_id, 1), None, "handed out twice"),
                    None => assert_eq!(holders.len(), 7),
                },
                (1, _) => {
                    if let Some(block_id) = pool.find(&hash(pick as u32 % 12)) {
                        pool.hold(block_id);
                        *holders.entry(block_id).or_default() += 1;
                    }
                }
                (2, Some(block_id)) if pick.is_multiple_of(9) => pool.forget_name(block_id),
                (2, Some(block_id)) => pool.name(block_id, hash(pick as u32 % 12)),
                (_, Some(block_id)) => {
                    pool.release(block_id);
                    holders.entry(block_id).and_modify(|count| *count -= 1);
                    holders.retain(|_, count| *count > 0);
                }
                (_, None) => {}
            }
            pool.check(&holders);
        }
    }

    #[test]
    fn the_least_recently_released_is_taken_first_and_nameless_blocks_before_it() {
        let mut pool = BlockPool::new(3);
        let ids: Vec<BlockId> = (0..3).filter_map(|_| pool.take()).collect();
        pool.name(ids[0], hash(0));
        pool.name(ids[1], hash(1));
        for &id in &ids {
            pool.release(id);
        }
        assert_eq!((pool.take(), pool.find(&hash(0))), (Some(ids[2]), Some(ids[0])));
        assert_eq!((pool.take(), pool.find(&hash(0)), pool.find(&hash(1))), (Some(ids[0]), None, Some(ids[1])));
        pool.hold(ids[1]);
        assert_eq!((pool.num_free(), pool.take()), (0, None));
    }

    #[test]
    #[should_panic(expected = "without a holder")]
    fn a_second_release_is_a_bug() {
        let mut pool = BlockPool::new(1);
        let block_id = pool.take().unwrap();
        pool.release(block_id);
        pool.release(block_id);
    }
}
