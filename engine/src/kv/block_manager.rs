//! A sequence's blocks: how many it needs, its block table, and giving them back.
//!
//! Called by the scheduler; pure bookkeeping over the pool. A sequence reserves blocks for its prompt and `max_tokens`
//! when it starts, so that a running sequence never waits for a block.

use super::block_pool::{BlockId, BlockPool};

/// Physical blocks of one sequence, in order. Not cloneable: a table is given back exactly once.
#[derive(Debug, Default)]
pub struct BlockTable {
    block_ids: Vec<BlockId>,
}

impl BlockTable {
    /// The blocks in order.
    pub fn block_ids(&self) -> &[BlockId] {
        &self.block_ids
    }
}

/// Owner of the pool.
#[derive(Debug)]
pub struct BlockManager {
    pool: BlockPool,
    block_size: usize,
}

impl BlockManager {
    /// Manages `num_blocks` blocks of `block_size` tokens.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self { pool: BlockPool::new(num_blocks), block_size }
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// All blocks.
    pub fn num_blocks(&self) -> usize {
        self.pool.num_blocks()
    }

    /// Blocks that are free.
    pub fn num_free_blocks(&self) -> usize {
        self.pool.num_free()
    }

    /// Tokens that the whole pool holds.
    pub fn capacity_tokens(&self) -> usize {
        self.pool.num_blocks() * self.block_size
    }

    /// Whether `num_tokens` tokens fit into the free blocks.
    pub fn can_allocate(&self, num_tokens: usize) -> bool {
        num_tokens.div_ceil(self.block_size) <= self.pool.num_free()
    }

    /// Takes the blocks of `num_tokens` tokens; `None`, and nothing taken, where they are not free.
    pub fn allocate(&mut self, num_tokens: usize) -> Option<BlockTable> {
        if !self.can_allocate(num_tokens) {
            return None;
        }
        let block_ids = (0..num_tokens.div_ceil(self.block_size)).map_while(|_| self.pool.take()).collect();
        Some(BlockTable { block_ids })
    }

    /// Gives a sequence's blocks back, last first.
    pub fn free(&mut self, table: BlockTable) {
        for block_id in table.block_ids.into_iter().rev() {
            self.pool.release(block_id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocation_is_all_or_nothing() {
        let mut manager = BlockManager::new(4, 16);
        let first = manager.allocate(33).unwrap();
        assert_eq!((first.block_ids().len(), manager.num_free_blocks()), (3, 1));
        assert!(manager.allocate(17).is_none());
        assert_eq!(manager.num_free_blocks(), 1);
        manager.free(first);
        assert_eq!(manager.num_free_blocks(), 4);
    }
}
