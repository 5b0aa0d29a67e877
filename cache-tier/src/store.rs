//! The one trait of all places that hold KV blocks below the scheduler's pool.
//!
//! Implemented by host memory, the disk, a remote tier, the chain of them, and the engine's own pool; called by the engine's
//! offload task and by the HTTP surface. Invariant: a place answers hit, miss or busy and never makes its caller fail.

use futures_util::future::BoxFuture;
use protocol::{BlockKey, KvFrame, Lookup, Prefix, PutOutcome, PutReason};
use serde::{Deserialize, Serialize};

use crate::policy::Place;

/// A place that holds blocks by name.
pub trait Store: Send + Sync + 'static {
    /// Where it is.
    fn place(&self) -> Place;

    /// How many leading keys it holds.
    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix>;

    /// The blocks of these keys, each answered, in order. They are whole: their checksums were compared here, or when they
    /// came in.
    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>>;

    /// The same for a receiver elsewhere, who compares checksums: without a copy, where the place can.
    fn get_to_send<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        self.get(keys)
    }

    /// Takes blocks, each answered, in order. `Stored` is said once the block is there: on a disk, so
    /// that the end of the process does not take it.
    fn put(&self, frames: Vec<KvFrame>, reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>>;

    /// Keeps the blocks of these keys from eviction for so many milliseconds; how many it holds and keeps.
    fn lease<'a>(&'a self, keys: &'a [BlockKey], millis: u32) -> BoxFuture<'a, usize>;

    /// What it holds and has done.
    fn stats(&self) -> Vec<PlaceStats>;

    /// Writes what is only in memory of the system to the medium, where there is one.
    fn sync(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// A place's numbers: what it holds now, then sums since the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceStats {
    /// Which.
    pub place: Place,
    /// Blocks held.
    pub num_blocks: u64,
    /// Bytes that they take, with what lies empty between them.
    pub used_bytes: u64,
    /// Most bytes.
    pub capacity_bytes: u64,
    /// Keys that were found.
    pub hits: u64,
    /// Keys that were not.
    pub misses: u64,
    /// Keys that could not be answered.
    pub busy: u64,
    /// Blocks that were found and are damaged or another's.
    pub damaged: u64,
    /// Blocks taken.
    pub stored: u64,
    /// Blocks seen once.
    pub not_admitted: u64,
    /// Blocks there was no room or time for.
    pub refused: u64,
    /// Blocks that made room.
    pub evicted: u64,
    /// Bytes handed out.
    pub read_bytes: u64,
    /// Bytes taken.
    pub written_bytes: u64,
}

impl PlaceStats {
    /// Nothing yet.
    pub fn new(place: Place) -> Self {
        Self {
            place,
            num_blocks: 0,
            used_bytes: 0,
            capacity_bytes: 0,
            hits: 0,
            misses: 0,
            busy: 0,
            damaged: 0,
            stored: 0,
            not_admitted: 0,
            refused: 0,
            evicted: 0,
            read_bytes: 0,
            written_bytes: 0,
        }
    }

    /// Counts a get's answers.
    pub fn count_lookups(&mut self, lookups: &[Lookup<KvFrame>]) {
        for lookup in lookups {
            match lookup {
                Lookup::Hit(frame) => {
                    self.hits += 1;
                    self.read_bytes += frame.payload.len() as u64;
                }
                Lookup::Miss => self.misses += 1,
                Lookup::Busy => self.busy += 1,
            }
        }
    }

    /// Counts a put's answer.
    pub fn count_put(&mut self, outcome: PutOutcome, bytes: u64) {
        match outcome {
            PutOutcome::Stored => {
                self.stored += 1;
                self.written_bytes += bytes;
            }
            PutOutcome::Present => {}
            PutOutcome::NotAdmitted => self.not_admitted += 1,
            PutOutcome::Busy | PutOutcome::Refused => self.refused += 1,
        }
    }
}
