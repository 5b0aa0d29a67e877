//! The fixed array of KV blocks: which are free, how many sequences hold each, and which have a name.
//!
//! Owned by the block manager; knows no GPU, clock or thread. Every operation is O(1). Invariants: a block is free exactly
//! when its reference count is zero; free + used = all; a name leads to the one block that has it. A free block keeps its
//! name, and so its contents, until it is taken: the least recently released first.

use std::collections::HashMap;

use protocol::{BlockHash, PutReason};

use super::block_copies::{BlockName, Store};

/// Physical block number.
pub type BlockId = u32;

/// No block: the ends of the free list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Block {
    ref_count: u32,
    named: Option<Named>,
    /// Neighbours in the free list.
    previous: u32,
    next: u32,
}

/// A name, and what decides whether the contents are worth keeping elsewhere.
#[derive(Clone, Debug)]
struct Named {
    name: BlockName,
    /// Sequences that have used it.
    uses: u32,
    /// Whether it has been put down already, or was taken up from there.
    is_stored: bool,
    /// Whether it was last held by a sequence that will be back.
    is_preempted: bool,
}

/// Reference counts, names, and the free blocks in the order in which they are taken.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: HashMap<BlockHash, BlockId>,
    first_free: u32,
    last_free: u32,
    num_free: usize,
    /// Named blocks that were taken before they were put down: their contents are there until the next step.
    evicted: Vec<Store>,
    /// Whether `evicted` is kept, and how many at most.
    max_evicted: usize,
    num_lost: u64,
    /// Names that blocks have lost, where somebody asks for them.
    forgotten: Option<Vec<BlockHash>>,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks without names.
    pub fn new(num_blocks: usize) -> Self {
        let block = Block { ref_count: 0, named: None, previous: NONE, next: NONE };
        let blocks = vec![block; num_blocks];
        let mut pool = Self {
            blocks,
            by_hash: HashMap::new(),
            first_free: NONE,
            last_free: NONE,
            num_free: 0,
            evicted: Vec::new(),
            max_evicted: 0,
            num_lost: 0,
            forgotten: None,
        };
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
        self.blocks[block_id as usize].named.as_ref().map(|named| named.name.hash)
    }

    /// The block's name, and what it is the name of.
    pub fn name_of(&self, block_id: BlockId) -> Option<&BlockName> {
        self.blocks[block_id as usize].named.as_ref().map(|named| &named.name)
    }

    /// From now on blocks that lose their contents are told by [`Self::take_evicted`], up to so many between two calls.
    pub fn keep_evicted(&mut self, max_evicted: usize) {
        self.max_evicted = max_evicted;
    }

    /// Blocks that were taken since this was last called and hold contents that nobody else has.
    pub fn take_evicted(&mut self) -> Vec<Store> {
        std::mem::take(&mut self.evicted)
    }

    /// Blocks whose contents were lost because too many were taken at once.
    pub fn num_lost(&self) -> u64 {
        self.num_lost
    }

    /// Counts a use of a named block; how many there are now, and whether it has been put down. A sequence that was preempted
    /// and takes its own block back is no other user: it is not counted.
    pub fn touch(&mut self, block_id: BlockId) -> (u32, bool) {
        let Some(named) = self.blocks[block_id as usize].named.as_mut() else { return (0, true) };
        if std::mem::take(&mut named.is_preempted) {
            return (0, true);
        }
        named.uses += 1;
        (named.uses, named.is_stored)
    }

    /// Notes that a block's contents are elsewhere too.
    pub fn set_stored(&mut self, block_id: BlockId) {
        if let Some(named) = &mut self.blocks[block_id as usize].named {
            named.is_stored = true;
        }
    }

    /// Notes that a block's sequence lost its place.
    pub fn set_preempted(&mut self, block_id: BlockId) {
        if let Some(named) = &mut self.blocks[block_id as usize].named {
            named.is_preempted = true;
        }
    }

    /// A block as one that is put down, if it still has this name and has not been.
    pub fn store(&self, block_id: BlockId, hash: &BlockHash, reason: PutReason) -> Option<Store> {
        let named = self.blocks[block_id as usize].named.as_ref()?;
        let is_it = named.name.hash == *hash && !named.is_stored;
        is_it.then(|| Store { block_id, name: named.name.clone(), reason })
    }

    /// Named blocks that are nowhere else, the most valuable first: the most used, then those held, then the last released,
    /// whose chains' heads come before their tails.
    pub fn unstored(&self) -> Vec<(BlockId, BlockHash)> {
        let mut ids: Vec<BlockId> =
            (0..).zip(&self.blocks).filter(|(_, b)| b.ref_count > 0).map(|(id, _)| id).collect();
        let mut at = self.last_free;
        while at != NONE {
            ids.push(at);
            at = self.blocks[at as usize].previous;
        }
        let named =
            |&id: &BlockId| Some((id, self.blocks[id as usize].named.as_ref().filter(|named| !named.is_stored)?));
        let mut all: Vec<(BlockId, &Named)> = ids.iter().filter_map(named).collect();
        all.sort_by_key(|(_, named)| std::cmp::Reverse(named.uses));
        all.into_iter().map(|(id, named)| (id, named.name.hash)).collect()
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
        if let Some(named) = block.named.take() {
            self.unname(&named);
            self.note_evicted(block_id, named);
        }
        Some(block_id)
    }

    fn note_evicted(&mut self, block_id: BlockId, named: Named) {
        if named.is_stored || self.max_evicted == 0 {
            return;
        }
        if self.evicted.len() == self.max_evicted {
            self.num_lost += 1;
            return;
        }
        let reason = if named.is_preempted { PutReason::Preempt } else { PutReason::Evict };
        self.evicted.push(Store { block_id, name: named.name, reason });
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
        let (is_free, is_named) = (block.ref_count == 0, block.named.is_some());
        match (is_free, is_named) {
            (true, true) => self.link_last(block_id),
            (true, false) => self.link_first(block_id),
            (false, _) => {}
        }
    }

    /// Names a held block, whose contents are complete. A name that another block has already stays there.
    pub fn name(&mut self, block_id: BlockId, name: BlockName) {
        let block = &mut self.blocks[block_id as usize];
        assert!(block.ref_count > 0, "block {block_id} named without a holder");
        if block.named.is_none() && !self.by_hash.contains_key(&name.hash) {
            self.by_hash.insert(name.hash, block_id);
            block.named = Some(Named { name, uses: 1, is_stored: false, is_preempted: false });
        }
    }

    /// Takes a block's name, if it has one.
    pub fn forget_name(&mut self, block_id: BlockId) {
        if let Some(named) = self.blocks[block_id as usize].named.take() {
            self.unname(&named);
        }
    }

    fn unname(&mut self, named: &Named) {
        self.by_hash.remove(&named.name.hash);
        if let Some(forgotten) = &mut self.forgotten {
            forgotten.push(named.name.hash);
        }
    }

    /// From now on names that are lost are told by [`Self::take_forgotten`].
    pub fn keep_forgotten(&mut self) {
        self.forgotten.get_or_insert_default();
    }

    /// Names that blocks have lost since this was last called.
    pub fn take_forgotten(&mut self) -> Vec<BlockHash> {
        self.forgotten.as_mut().map(std::mem::take).unwrap_or_default()
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
            if let Some(Named { name, .. }) = &block.named {
                assert_eq!(self.by_hash.get(&name.hash), Some(&block_id), "the name of block {block_id}");
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

    fn name(number: u32) -> BlockName {
        let parent = BlockHash::root(&Salt::default());
        BlockName { hash: parent.child(&[number]), parent, token_ids: [number].into() }
    }

    fn hash(number: u32) -> BlockHash {
        name(number).hash
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
                (2, Some(block_id)) => pool.name(block_id, name(pick as u32 % 12)),
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
        pool.name(ids[0], name(0));
        pool.name(ids[1], name(1));
        for &id in &ids {
            pool.release(id);
        }
        assert_eq!((pool.take(), pool.find(&hash(0))), (Some(ids[2]), Some(ids[0])));
        assert_eq!((pool.take(), pool.find(&hash(0)), pool.find(&hash(1))), (Some(ids[0]), None, Some(ids[1])));
        pool.hold(ids[1]);
        assert_eq!((pool.num_free(), pool.take()), (0, None));
    }

    #[test]
    fn what_is_nowhere_else_is_told_when_it_is_taken() {
        let mut pool = BlockPool::new(4);
        let ids: Vec<BlockId> = (0..4).filter_map(|_| pool.take()).collect();
        (0..4).for_each(|number| pool.name(ids[number as usize], name(number)));
        assert_eq!(pool.touch(ids[2]), (2, false));
        pool.set_stored(ids[1]);
        for &id in &ids {
            pool.release(id);
        }
        assert_eq!(pool.unstored().iter().map(|(id, _)| *id).collect::<Vec<_>>(), [ids[2], ids[3], ids[0]]);
        pool.set_preempted(ids[2]);
        pool.keep_evicted(2);
        assert_eq!((0..4).filter_map(|_| pool.take()).count(), 4);
        let told: Vec<_> = pool.take_evicted().into_iter().map(|store| (store.block_id, store.reason)).collect();
        assert_eq!(told, [(ids[0], PutReason::Evict), (ids[2], PutReason::Preempt)]);
        assert_eq!((pool.num_lost(), pool.store(ids[3], &hash(3), PutReason::Drain)), (1, None));
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
