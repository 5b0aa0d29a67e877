//! A sequence's blocks: which cached ones it starts with, growing its table as tokens appear, naming what is full, and
//! giving all back.
//!
//! Called by the scheduler; pure bookkeeping over the pool. Invariant: only full blocks have names, and only after the
//! step that filled them, so that a shared block is never written.

use std::collections::VecDeque;

use protocol::{BlockHash, PutReason};

use super::block_copies::{BlockName, Store};
use super::block_pool::{BlockId, BlockPool};

/// Physical blocks of one sequence, in order. Not cloneable: a table is given back exactly once.
#[derive(Debug, Default)]
pub struct BlockTable {
    block_ids: Vec<BlockId>,
    /// How many of them, from the first, have been offered to the pool under their names.
    num_named: usize,
}

impl BlockTable {
    /// The blocks in order.
    pub fn block_ids(&self) -> &[BlockId] {
        &self.block_ids
    }
}

/// Evicted blocks that are put down before one step; more are lost.
const MAX_EVICTED: usize = 64;

/// What the pool holds of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CachedPrefix {
    /// Leading blocks that are there.
    pub num_blocks: usize,
    /// How many of them no sequence holds: taking them uses free blocks up.
    pub num_free: usize,
}

/// Owner of the pool.
#[derive(Debug)]
pub struct BlockManager {
    pool: BlockPool,
    block_size: usize,
    keeps_stores: bool,
    /// What a drain has still to put down, once one began.
    draining: Option<VecDeque<(BlockId, BlockHash)>>,
    /// Blocks that were used a second time and wait to be put down.
    used_again: VecDeque<(BlockId, BlockHash)>,
}

impl BlockManager {
    /// Manages `num_blocks` blocks of `block_size` tokens.
    pub fn new(num_blocks: usize, block_size: usize) -> Self {
        Self {
            pool: BlockPool::new(num_blocks),
            block_size,
            keeps_stores: false,
            draining: None,
            used_again: VecDeque::new(),
        }
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

    /// Blocks whose contents have a name, held or free.
    pub fn num_cached_blocks(&self) -> usize {
        self.pool.num_named()
    }

    /// Tokens that the whole pool holds.
    pub fn capacity_tokens(&self) -> usize {
        self.pool.num_blocks() * self.block_size
    }

    /// Blocks of `num_tokens` tokens.
    pub fn blocks_of(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.block_size)
    }

    /// The longest prefix of `hashes` that the pool holds.
    pub fn cached_prefix(&self, hashes: &[BlockHash]) -> CachedPrefix {
        let mut cached = CachedPrefix::default();
        for block_id in hashes.iter().map_while(|hash| self.pool.find(hash)) {
            cached.num_blocks += 1;
            cached.num_free += usize::from(self.pool.is_free(block_id));
        }
        cached
    }

    /// A table that starts with the cached blocks of `hashes`, all of which the pool holds.
    pub fn start(&mut self, hashes: &[BlockHash]) -> BlockTable {
        let block_ids: Vec<BlockId> = hashes.iter().map_while(|hash| self.pool.find(hash)).collect();
        for (&block_id, &hash) in block_ids.iter().zip(hashes) {
            self.pool.hold(block_id);
            let (uses, is_stored) = self.pool.touch(block_id);
            // Each once, while it waits; as many as there are blocks.
            if self.keeps_stores && uses == 2 && !is_stored && self.used_again.len() < self.pool.num_blocks() {
                self.used_again.push_back((block_id, hash));
            }
        }
        BlockTable { num_named: block_ids.len(), block_ids }
    }

    /// Makes room in a table for `num_tokens` tokens in all; false, and nothing taken, where too few blocks are free.
    pub fn grow(&mut self, table: &mut BlockTable, num_tokens: usize) -> bool {
        let missing = self.blocks_of(num_tokens).saturating_sub(table.block_ids.len());
        if missing > self.pool.num_free() {
            return false;
        }
        table.block_ids.extend((0..missing).map_while(|_| self.pool.take()));
        true
    }

    /// Tokens that a table can come to hold with the blocks that are free now.
    pub fn room(&self, table: &BlockTable) -> usize {
        (table.block_ids.len() + self.pool.num_free()) * self.block_size
    }

    /// Names the blocks that `num_computed_tokens` tokens have filled; `name_of` tells the name of the sequence's block of an
    /// index.
    pub fn name_full_blocks(
        &mut self,
        table: &mut BlockTable,
        num_computed_tokens: usize,
        name_of: impl Fn(usize) -> Option<BlockName>,
    ) {
        let full = (num_computed_tokens / self.block_size).min(table.block_ids.len());
        for index in table.num_named..full {
            let Some(name) = name_of(index) else { break };
            self.pool.name(table.block_ids[index], name);
            table.num_named = index + 1;
        }
    }

    /// Grows a table by one block, which a payload from elsewhere will fill before the next step computes, and names it.
    /// `None`, and nothing taken, where no block is free.
    pub fn load(&mut self, table: &mut BlockTable, name: BlockName) -> Option<BlockId> {
        let block_id = self.pool.take()?;
        table.block_ids.push(block_id);
        table.num_named = table.block_ids.len();
        self.pool.name(block_id, name);
        self.pool.set_stored(block_id);
        Some(block_id)
    }

    /// From now on what goes down is told by [`Self::take_stores`]. What was written through is told again when it is evicted:
    /// the tier may not have had time for it, memory was passed over, and where it is, it is not written again.
    pub fn keep_stores(&mut self) {
        self.keeps_stores = true;
        self.pool.keep_evicted(MAX_EVICTED);
    }

    /// Blocks that go down before the next step: all that were evicted, and of those that were used a second time as many as
    /// `max_written_through`.
    pub fn take_stores(&mut self, max_written_through: usize) -> Vec<Store> {
        let mut stores = self.pool.take_evicted();
        let mut left = max_written_through;
        while left > 0
            && let Some((block_id, hash)) = self.used_again.pop_front()
        {
            if let Some(store) = self.pool.store(block_id, &hash, PutReason::WriteThrough) {
                stores.push(store);
                left -= 1;
            }
        }
        stores
    }

    /// Whether blocks wait to be written through.
    pub fn has_used_again(&self) -> bool {
        !self.used_again.is_empty()
    }

    /// Up to `most` blocks that are nowhere else, the most valuable first, as put down for a drain.
    pub fn drain(&mut self, most: usize) -> Vec<Store> {
        // Put in order once; a block that left meanwhile is passed over.
        let left = self.draining.get_or_insert_with(|| self.pool.unstored().into());
        let mut stores = Vec::new();
        while stores.len() < most
            && let Some((block_id, hash)) = left.pop_front()
        {
            stores.extend(self.pool.store(block_id, &hash, PutReason::Drain));
        }
        stores.iter().for_each(|store| self.pool.set_stored(store.block_id));
        stores
    }

    /// The blocks of these names that the pool holds, in order, up to the first that it does not.
    pub fn held(&self, hashes: &[BlockHash], most: usize) -> Vec<BlockId> {
        hashes.iter().take(most).map_while(|hash| self.pool.find(hash)).collect()
    }

    /// Notes that a table's sequence lost its place and will be back.
    pub fn set_preempted(&mut self, table: &BlockTable) {
        table.block_ids.iter().for_each(|&block_id| self.pool.set_preempted(block_id));
    }

    /// How many of a table's blocks, from the first, are there under their names.
    pub fn num_named(&self, table: &BlockTable) -> usize {
        table.num_named
    }

    /// From now on names that are lost are told by [`Self::take_forgotten`].
    pub fn keep_forgotten(&mut self) {
        self.pool.keep_forgotten();
    }

    /// Names that blocks have lost since this was last called.
    pub fn take_forgotten(&mut self) -> Vec<BlockHash> {
        self.pool.take_forgotten()
    }

    /// Takes the names of a table's blocks, so that nobody starts with their contents.
    pub fn forget_names(&mut self, table: &BlockTable) {
        table.block_ids.iter().for_each(|&block_id| self.pool.forget_name(block_id));
    }

    /// Gives a sequence's blocks back, last first: the tail of a chain is reused before its head.
    pub fn free(&mut self, table: BlockTable) {
        for block_id in table.block_ids.into_iter().rev() {
            self.pool.release(block_id);
        }
    }

    /// The pool, for tests of its books.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use protocol::Salt;

    fn chain(tokens: &[u32]) -> Vec<BlockHash> {
        BlockHash::root(&Salt::default()).chain(tokens, 16)
    }

    fn names(hashes: &[BlockHash], index: usize) -> BlockName {
        let parent = if index == 0 { BlockHash::root(&Salt::default()) } else { hashes[index - 1] };
        BlockName { hash: hashes[index], parent, token_ids: [].into() }
    }

    #[test]
    fn growing_is_all_or_nothing() {
        let mut manager = BlockManager::new(4, 16);
        let mut table = BlockTable::default();
        assert!(manager.grow(&mut table, 33));
        assert_eq!((table.block_ids().len(), manager.num_free_blocks()), (3, 1));
        assert!(manager.grow(&mut table, 48) && !manager.grow(&mut table, 65));
        assert_eq!((manager.num_free_blocks(), manager.room(&table)), (1, 64));
        manager.free(table);
        assert_eq!(manager.num_free_blocks(), 4);
    }

    #[test]
    fn a_released_prefix_is_found_until_its_tail_is_reused() {
        let mut manager = BlockManager::new(4, 16);
        let tokens: Vec<u32> = (0..64).collect();
        let hashes = chain(&tokens);
        let mut table = BlockTable::default();
        assert!(manager.grow(&mut table, 64));
        assert_eq!(manager.cached_prefix(&hashes), CachedPrefix::default(), "nothing is named before it is computed");
        let name_of = |index: usize| Some(names(&hashes, index));
        manager.name_full_blocks(&mut table, 63, name_of);
        assert_eq!(manager.cached_prefix(&hashes).num_blocks, 3, "a block that is not full has no name");
        manager.name_full_blocks(&mut table, 64, name_of);
        let head = table.block_ids()[0];
        manager.free(table);
        assert_eq!(manager.cached_prefix(&hashes), CachedPrefix { num_blocks: 4, num_free: 4 });
        let mut other = BlockTable::default();
        assert!(manager.grow(&mut other, 32));
        assert_eq!(manager.cached_prefix(&hashes), CachedPrefix { num_blocks: 2, num_free: 2 }, "the tail went first");
        let shared = manager.start(&hashes[..2]);
        let again = manager.start(&hashes[..2]);
        assert_eq!((shared.block_ids()[0], again.block_ids()), (head, shared.block_ids()));
        assert_eq!((manager.num_free_blocks(), manager.cached_prefix(&hashes).num_free), (0, 0));
        manager.free(shared);
        assert_eq!(manager.num_free_blocks(), 0, "still held by the other");
        manager.free(again);
        manager.free(other);
        assert_eq!(manager.num_free_blocks(), 4);
    }
}
