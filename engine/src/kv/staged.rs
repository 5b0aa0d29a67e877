//! What the tiers have of a waiting sequence: blocks that the pool lacks, on the way or in memory.
//!
//! Kept by the sequence, filled by the engine loop, taken by the scheduler. Knows no tier and no clock.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;

/// A block's checked payload in memory, and its share of the room for such.
#[derive(Clone, Debug)]
pub struct StagedBlock {
    /// Canonical.
    pub payload: Bytes,
    /// Given back when the last of its blocks is gone.
    pub room: Option<Arc<OwnedSemaphorePermit>>,
}

/// Where a sequence stands with the tiers.
#[derive(Debug, Default)]
pub enum Staged {
    /// They have not been asked.
    #[default]
    Unasked,
    /// Blocks from this index on are on the way, and the sequence is held back; these have arrived.
    Arriving(usize, VecDeque<StagedBlock>),
    /// All that will come has: blocks from this index on.
    Here(usize, VecDeque<StagedBlock>),
}

impl Staged {
    /// Whether the sequence is held back.
    pub fn is_arriving(&self) -> bool {
        matches!(self, Self::Arriving(..))
    }

    /// Adds what arrived.
    pub fn push(&mut self, blocks: impl IntoIterator<Item = StagedBlock>) {
        if let Self::Arriving(_, arrived) = self {
            arrived.extend(blocks);
        }
    }

    /// Nothing more comes.
    pub fn close(&mut self) {
        if let Self::Arriving(first, arrived) = self {
            *self = Self::Here(*first, std::mem::take(arrived));
        }
    }

    /// How many blocks are here.
    pub fn len(&self) -> usize {
        match self {
            Self::Here(_, blocks) => blocks.len(),
            Self::Unasked | Self::Arriving(..) => 0,
        }
    }

    /// Whether none are.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops what the pool has as well, given how many leading blocks that is; all, where blocks between are missing.
    pub fn cut(&mut self, num_cached: usize) {
        if let Self::Here(first, blocks) = self {
            match num_cached.checked_sub(*first) {
                Some(surplus) => drop(blocks.drain(..surplus.min(blocks.len()))),
                None => blocks.clear(),
            }
            *first = num_cached;
        }
    }

    /// The next block.
    pub fn pop(&mut self) -> Option<StagedBlock> {
        match self {
            Self::Here(first, blocks) => {
                *first += 1;
                blocks.pop_front()
            }
            Self::Unasked | Self::Arriving(..) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here(first: usize, payloads: &[u8]) -> Staged {
        let block = |&byte: &u8| StagedBlock { payload: Bytes::copy_from_slice(&[byte]), room: None };
        let mut staged = Staged::Arriving(first, VecDeque::new());
        staged.push(payloads.iter().map(block));
        assert!(staged.is_arriving() && staged.is_empty());
        staged.close();
        staged
    }

    fn payloads(mut staged: Staged) -> Vec<u8> {
        std::iter::from_fn(|| staged.pop()).map(|block| block.payload[0]).collect()
    }

    #[test]
    fn what_the_pool_has_meanwhile_is_not_loaded_and_gaps_are_not_jumped() {
        let cut = |num_cached| {
            let mut staged = here(2, &[20, 21, 22]);
            staged.cut(num_cached);
            payloads(staged)
        };
        assert_eq!((cut(2), cut(3), cut(9), cut(1)), (vec![20, 21, 22], vec![21, 22], vec![], vec![]));
    }
}
