//! The fixed array of KV blocks: which are free, and how many sequences hold each.
//!
//! Owned by the block manager; knows no GPU, clock or thread. Costs: take and release O(1). Invariant: a block is free
//! exactly when its reference count is zero, and free + used = all.

/// Physical block number.
pub type BlockId = u32;

/// Reference counts and the free list.
#[derive(Debug)]
pub struct BlockPool {
    ref_counts: Vec<u32>,
    /// Last in, first out: a block just released is the one whose memory is warm.
    free: Vec<BlockId>,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks.
    pub fn new(num_blocks: usize) -> Self {
        Self { ref_counts: vec![0; num_blocks], free: (0..num_blocks as BlockId).rev().collect() }
    }

    /// All blocks.
    pub fn num_blocks(&self) -> usize {
        self.ref_counts.len()
    }

    /// Blocks that no sequence holds.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Takes a free block, if there is one.
    pub fn take(&mut self) -> Option<BlockId> {
        let block_id = self.free.pop()?;
        let count = &mut self.ref_counts[block_id as usize];
        assert_eq!(*count, 0, "block {block_id} was on the free list with {count} holders");
        *count = 1;
        Some(block_id)
    }

    /// Gives up one hold of a block.
    ///
    /// # Panics
    /// When nobody holds the block: it would be handed out twice.
    pub fn release(&mut self, block_id: BlockId) {
        let count = &mut self.ref_counts[block_id as usize];
        assert!(*count > 0, "block {block_id} released without a holder");
        *count -= 1;
        if *count == 0 {
            self.free.push(block_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn random_takes_and_releases_keep_the_books() {
        let mut pool = BlockPool::new(7);
        let mut held: Vec<BlockId> = Vec::new();
        let mut state = 1u64;
        for _ in 0..10_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            if (state >> 33).is_multiple_of(2) {
                match pool.take() {
                    Some(block_id) => held.push(block_id),
                    None => assert_eq!(held.len(), 7),
                }
            } else if !held.is_empty() {
                pool.release(held.swap_remove((state >> 40) as usize % held.len()));
            }
            let distinct: HashSet<_> = held.iter().collect();
            assert_eq!(distinct.len(), held.len(), "a block was handed out twice");
            assert_eq!(pool.num_free() + held.len(), pool.num_blocks());
        }
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
