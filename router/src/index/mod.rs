//! The exact index: which worker holds which chunks of prompts, of all workers in one structure.
//!
//! Written by each worker's event stream, read for each request. Invariants: it holds what workers have said and not taken back,
//! bounded by `capacity`; a walk along a chain answers for all workers at once; nothing here waits for the network.

mod sets;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use hashbrown::HashTable;
use hashbrown::hash_table::Entry as TableEntry;
use protocol::HeldChunk;
use protocol::prompt_chain::Chunk;
pub use sets::Slot;
use sets::{SetId, Sets};

/// Parts with a lock each: a worker's chunks are swept part by part while requests go on.
const NUM_SHARDS: usize = 64;

/// A chunk, its tokens and who holds it.
#[derive(Clone, Copy, Debug)]
struct Entry {
    hash: u64,
    num_tokens: u32,
    set: SetId,
}

/// How much of a prompt a worker holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The worker.
    pub slot: Slot,
    /// Leading chunks.
    pub num_chunks: usize,
    /// Tokens up to the end of the last of them.
    pub num_tokens: u32,
}

/// The index.
#[derive(Debug)]
pub struct Index {
    shards: Vec<RwLock<HashTable<Entry>>>,
    /// Locked before a shard, always.
    sets: RwLock<Sets>,
    num_entries: AtomicUsize,
    capacity: usize,
    num_refused: AtomicU64,
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// The table takes the low bits and the top seven; the shard has its own.
fn shard_of(hash: u64) -> usize {
    (hash >> 48) as usize % NUM_SHARDS
}

impl Index {
    /// An index of at most `capacity` chunks.
    pub fn new(capacity: usize) -> Self {
        let shards = (0..NUM_SHARDS).map(|_| RwLock::default()).collect();
        let (num_entries, num_refused) = (AtomicUsize::new(0), AtomicU64::new(0));
        Self { shards, sets: RwLock::default(), num_entries, capacity, num_refused }
    }

    /// A worker holds these.
    pub fn store(&self, slot: Slot, chunks: &[HeldChunk]) {
        let mut sets = write(&self.sets);
        for chunk in chunks {
            let mut shard = write(&self.shards[shard_of(chunk.hash)]);
            match shard.entry(chunk.hash, |entry| entry.hash == chunk.hash, |entry| entry.hash) {
                TableEntry::Occupied(mut entry) => {
                    let entry = entry.get_mut();
                    entry.set = sets.step(entry.set, slot, true);
                    entry.num_tokens = chunk.num_tokens;
                }
                TableEntry::Vacant(place) => {
                    if self.num_entries.load(Ordering::Relaxed) >= self.capacity {
                        self.num_refused.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    let set = sets.step(0, slot, true);
                    place.insert(Entry { hash: chunk.hash, num_tokens: chunk.num_tokens, set });
                    self.num_entries.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// A worker holds these no longer.
    pub fn remove(&self, slot: Slot, hashes: &[u64]) {
        let mut sets = write(&self.sets);
        for &hash in hashes {
            let mut shard = write(&self.shards[shard_of(hash)]);
            if let Ok(mut entry) = shard.find_entry(hash, |entry| entry.hash == hash) {
                entry.get_mut().set = sets.step(entry.get().set, slot, false);
                if entry.get().set == 0 {
                    entry.remove();
                    self.num_entries.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Takes all that a worker holds.
    pub fn remove_worker(&self, slot: Slot) {
        for shard in &self.shards {
            let mut sets = write(&self.sets);
            let mut shard = write(shard);
            let before = shard.len();
            shard.retain(|entry| {
                entry.set = sets.step(entry.set, slot, false);
                entry.set != 0
            });
            self.num_entries.fetch_sub(before - shard.len(), Ordering::Relaxed);
            // What a worker that is gone took is given back.
            if shard.capacity() > 4 * shard.len() + 64 {
                shard.shrink_to_fit(|entry| entry.hash);
            }
        }
    }

    /// How much of a prompt each worker holds, in no order; those that hold nothing are not named.
    pub fn held(&self, chain: &[Chunk]) -> Vec<Held> {
        let sets = read(&self.sets);
        let (mut done, mut alive): (Vec<Held>, Vec<Slot>) = (Vec::new(), Vec::new());
        let (mut last_set, mut num_tokens) = (0, 0);
        for (num_chunks, chunk) in chain.iter().enumerate() {
            let shard = read(&self.shards[shard_of(chunk.hash)]);
            let found = shard.find(chunk.hash, |entry| entry.hash == chunk.hash).copied();
            drop(shard);
            let set = found.map_or(0, |entry| entry.set);
            if num_chunks == 0 {
                alive.extend_from_slice(sets.members(set));
            } else if set != last_set {
                // Both are in order, and mostly the same.
                let mut members = sets.members(set).iter().peekable();
                alive.retain(|slot| {
                    while members.next_if(|&member| member < slot).is_some() {}
                    let stays = members.next_if(|&member| member == slot).is_some();
                    if !stays {
                        done.push(Held { slot: *slot, num_chunks, num_tokens });
                    }
                    stays
                });
            }
            let Some(entry) = found.filter(|_| !alive.is_empty()) else { break };
            (last_set, num_tokens) = (set, entry.num_tokens);
        }
        done.extend(alive.into_iter().map(|slot| Held { slot, num_chunks: chain.len(), num_tokens }));
        done
    }

    /// Chunks that anybody holds.
    pub fn len(&self) -> usize {
        self.num_entries.load(Ordering::Relaxed)
    }

    /// Whether nobody holds anything.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Chunks that found no room.
    pub fn num_refused(&self) -> u64 {
        self.num_refused.load(Ordering::Relaxed)
    }

    /// Bytes in memory, about.
    pub fn num_bytes(&self) -> usize {
        // A table keeps a byte a place beside its entries, and an eighth of its places free.
        let table = |shard: &RwLock<HashTable<Entry>>| read(shard).capacity() * 8 / 7 * (size_of::<Entry>() + 1);
        self.shards.iter().map(table).sum::<usize>() + read(&self.sets).num_bytes()
    }
}

#[cfg(test)]
mod tests;
