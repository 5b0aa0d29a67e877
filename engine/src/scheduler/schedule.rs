//! What one step is made of: the scheduler's decision, as values.
//!
//! Made by `Scheduler::schedule`, laid out by `Engine::begin`. A schedule holds each sequence at most once.

use crate::kv::{BlockCopies, BlockName};
use crate::sequence::RequestId;

/// A sequence's place in every queue: the lower goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub(super) priority: i32,
    pub(super) arrival: u64,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: RequestId,
    /// Where it stands among those that run.
    pub place: Place,
    /// Tokens to compute, from its first that is not.
    pub num_tokens: usize,
    /// Whether it is in decode.
    pub is_decode: bool,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Shares, decodes first.
    pub batch: Vec<Scheduled>,
    /// Sequences that start or resume in it.
    pub admitted: Vec<RequestId>,
    /// Sequences that lost their blocks to it.
    pub preempted: Vec<RequestId>,
    /// Blocks that leave and arrive before it.
    pub copies: BlockCopies,
    /// Sequences whose next blocks the tiers are to be asked for; they are held back until they hear.
    pub wanted: Vec<Wanted>,
}

/// Blocks that the pool lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Whose.
    pub id: RequestId,
    /// In order: each follows on the one before.
    pub blocks: Vec<BlockName>,
}
