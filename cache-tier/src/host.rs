//! Blocks in memory of the host: frames by name, within a number of bytes.
//!
//! The first place below the device. Frames are shared, not copied: what is handed out stays alive when it is evicted. What
//! leaves is handed to the caller, who offers it to the places below.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{BoxFuture, ready};
use protocol::{BlockKey, KvFrame, Lookup, Prefix, PutOutcome, PutReason};
use tokio::time::Instant;

use crate::eviction::{Eviction, MAX_USES, Queue, Residency, Residents};
use crate::ghost::Ghost;
use crate::policy::Place;
use crate::store::{PlaceStats, Store};

/// What a frame takes beside its payload: header, entry and queue place, about.
const OVERHEAD: u64 = 512;
/// Keys that are remembered after they left.
const REMEMBERED: usize = 1 << 16;

#[derive(Debug)]
struct Entry {
    frame: KvFrame,
    uses: u8,
    leased_until: Option<Instant>,
}

#[derive(Debug, Default)]
struct Entries(HashMap<u32, Entry>);

impl Residents for Entries {
    fn residency(&self, id: u32) -> Residency {
        match self.0.get(&id) {
            None => Residency::Gone,
            Some(entry) if entry.leased_until.is_some_and(|until| Instant::now() < until) => Residency::Held,
            Some(entry) => Residency::Uses(entry.uses),
        }
    }

    fn set_uses(&mut self, id: u32, uses: u8) {
        if let Some(entry) = self.0.get_mut(&id) {
            entry.uses = uses;
        }
    }
}

#[derive(Debug)]
struct State {
    ids: HashMap<BlockKey, u32>,
    entries: Entries,
    eviction: Eviction,
    ghost: Ghost,
    next_id: u32,
    bytes: u64,
    stats: PlaceStats,
}

/// The store.
#[derive(Debug)]
pub struct HostStore {
    state: Mutex<State>,
    capacity_bytes: u64,
}

fn bytes_of(frame: &KvFrame) -> u64 {
    frame.payload.len() as u64 + OVERHEAD
}

impl State {
    fn get(&mut self, key: &BlockKey) -> Option<KvFrame> {
        let entry = self.entries.0.get_mut(self.ids.get(key)?)?;
        entry.uses = (entry.uses + 1).min(MAX_USES);
        Some(entry.frame.clone())
    }

    /// Takes a block in; those that made room for it are handed out.
    fn insert(&mut self, frame: KvFrame, capacity: u64, left: &mut Vec<KvFrame>) -> PutOutcome {
        let key = frame.header.identity.key;
        if self.get(&key).is_some() {
            return PutOutcome::Present;
        }
        let bytes = bytes_of(&frame);
        if bytes > capacity {
            return PutOutcome::Refused;
        }
        while self.bytes + bytes > capacity {
            let Some((id, queue)) = self.eviction.victim(&mut self.entries) else { return PutOutcome::Busy };
            let Some(entry) = self.entries.0.remove(&id) else { continue };
            let key = entry.frame.header.identity.key;
            self.ids.remove(&key);
            self.bytes -= bytes_of(&entry.frame);
            self.stats.evicted += 1;
            if queue == Queue::Small {
                self.ghost.note(key.short());
            }
            left.push(entry.frame);
        }
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.bytes += bytes;
        self.ids.insert(key, id);
        self.entries.0.insert(id, Entry { frame, uses: 0, leased_until: None });
        self.eviction.insert(id, self.ghost.take(key.short()));
        PutOutcome::Stored
    }
}

impl HostStore {
    /// An empty store of at most so many bytes.
    pub fn new(capacity_bytes: u64) -> Self {
        let state = State {
            ids: HashMap::new(),
            entries: Entries::default(),
            eviction: Eviction::default(),
            ghost: Ghost::new(REMEMBERED),
            next_id: 0,
            bytes: 0,
            stats: PlaceStats::new(Place::Host),
        };
        Self { state: Mutex::new(state), capacity_bytes }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes blocks in. Beside the outcomes: the blocks that made room.
    pub fn insert(&self, frames: Vec<KvFrame>) -> (Vec<PutOutcome>, Vec<KvFrame>) {
        let mut state = self.state();
        let mut left = Vec::new();
        let mut outcomes = Vec::with_capacity(frames.len());
        for frame in frames {
            let bytes = frame.encoded_len() as u64;
            let outcome = state.insert(frame, self.capacity_bytes, &mut left);
            state.stats.count_put(outcome, bytes);
            outcomes.push(outcome);
        }
        (outcomes, left)
    }

    /// The names of all its blocks, the most used first, then the latest: what a drain goes through.
    pub fn keys_by_value(&self) -> Vec<BlockKey> {
        let state = self.state();
        let mut ids: Vec<(&u32, &Entry)> = state.entries.0.iter().collect();
        ids.sort_by_key(|(id, entry)| (Reverse(entry.uses), Reverse(**id)));
        ids.into_iter().map(|(_, entry)| entry.frame.header.identity.key).collect()
    }
}

impl Store for HostStore {
    fn place(&self) -> Place {
        Place::Host
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix> {
        let state = self.state();
        let num_blocks = keys.iter().take_while(|key| state.ids.contains_key(key)).count();
        Box::pin(ready(Prefix { num_blocks, busy: false }))
    }

    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        let mut state = self.state();
        let found: Vec<Lookup<KvFrame>> =
            keys.iter().map(|key| state.get(key).map_or(Lookup::Miss, Lookup::Hit)).collect();
        state.stats.count_lookups(&found);
        Box::pin(ready(found))
    }

    fn put(&self, frames: Vec<KvFrame>, _reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>> {
        Box::pin(ready(self.insert(frames).0))
    }

    fn lease<'a>(&'a self, keys: &'a [BlockKey], millis: u32) -> BoxFuture<'a, usize> {
        let until = Instant::now() + Duration::from_millis(u64::from(millis));
        let State { ids, entries, .. } = &mut *self.state();
        let mut leased = 0;
        for id in keys.iter().filter_map(|key| ids.get(key)) {
            if let Some(entry) = entries.0.get_mut(id) {
                entry.leased_until = entry.leased_until.max(Some(until));
                leased += 1;
            }
        }
        Box::pin(ready(leased))
    }

    fn stats(&self) -> Vec<PlaceStats> {
        let state = self.state();
        let (num_blocks, used_bytes) = (state.ids.len() as u64, state.bytes);
        vec![PlaceStats { num_blocks, used_bytes, capacity_bytes: self.capacity_bytes, ..state.stats }]
    }
}
