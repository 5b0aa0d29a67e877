//! Which blocks leave the device and which arrive before a step: what the scheduler decided, for the runner.
//!
//! Made by `Engine::begin`, carried out by the model runner in this order: what leaves is read before anything is written,
//! then what arrives is written, then the step computes.

use bytes::Bytes;
use protocol::{BlockHash, PutReason};

use super::BlockId;

/// Bytes of a device's buffer for copies out, and of that for copies in; the pool is sized with both in mind.
pub const COPY_BYTES: u64 = 64 << 20;

/// The name of a block, and what it is the name of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockName {
    /// Its name.
    pub hash: BlockHash,
    /// The name of the block before it.
    pub parent: BlockHash,
    /// Its tokens.
    pub token_ids: Box<[u32]>,
}

/// A block that is put down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Store {
    /// Where it lies.
    pub block_id: BlockId,
    /// What it is.
    pub name: BlockName,
    /// Why it goes.
    pub reason: PutReason,
}

/// A block that is taken up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// Where it goes.
    pub block_id: BlockId,
    /// Its canonical payload, checked.
    pub payload: Bytes,
}

/// Both, for one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockCopies {
    /// Read first.
    pub stores: Vec<Store>,
    /// Written then. No block comes twice.
    pub loads: Vec<Load>,
}

impl BlockCopies {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.stores.is_empty() && self.loads.is_empty()
    }
}
