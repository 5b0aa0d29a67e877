//! The places below the device as one: nearest first, with what is found copied up and what leaves offered down.
//!
//! Held by the engine's offload task and served on its `/kv/v1`. `policy` decides, this file moves. Invariant: a place that
//! is slow or gone delays the caller by no more than its own deadline, and never fails it.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use protocol::codec::Codec;
use protocol::{BlockKey, KvFrame, Lookup, Prefix, PutOutcome, PutReason};

use crate::disk::DiskStore;
use crate::host::HostStore;
use crate::policy::{self, Place};
use crate::store::{PlaceStats, Store};

/// Frames of one step of a drain.
const DRAIN_BATCH: usize = 16;

/// Host, disk and remote, as far as they are there.
pub struct TieredStore {
    host: Option<HostStore>,
    below: Vec<Arc<dyn Store>>,
    there: Vec<Place>,
    codec: Option<Codec>,
}

impl TieredStore {
    /// These places; payloads for disk and network are packed where a codec is given.
    pub fn new(
        host: Option<HostStore>,
        disk: Option<Arc<DiskStore>>,
        remote: Option<Arc<dyn Store>>,
        codec: Option<Codec>,
    ) -> Self {
        let disk = disk.map(|disk| disk as Arc<dyn Store>);
        let below: Vec<Arc<dyn Store>> = disk.into_iter().chain(remote).collect();
        let there = host.iter().map(|_| Place::Host).chain(below.iter().map(|store| store.place())).collect();
        Self { host, below, there, codec }
    }

    /// Whether there is any place.
    pub fn is_empty(&self) -> bool {
        self.there.is_empty()
    }

    /// Whether any place outlives the process.
    pub fn outlives(&self) -> bool {
        !self.below.is_empty()
    }

    fn stores(&self) -> impl Iterator<Item = &dyn Store> {
        let host = self.host.as_ref().map(|host| host as &dyn Store);
        host.into_iter().chain(self.below.iter().map(|store| &**store))
    }

    async fn put_frames(&self, frames: Vec<KvFrame>, reason: PutReason) -> Vec<PutOutcome> {
        let mut outcomes = vec![PutOutcome::Refused; frames.len()];
        let mut left = Vec::new();
        if let Some(host) = self.host.as_ref().filter(|_| policy::goes_to(reason, Place::Host, &self.there)) {
            (outcomes, left) = host.insert(frames.clone());
        }
        if self.below.iter().any(|store| policy::goes_to(reason, store.place(), &self.there)) {
            let below = self.put_below(frames, reason).await;
            for (outcome, below) in outcomes.iter_mut().zip(below) {
                *outcome = below.max(*outcome);
            }
        }
        if !left.is_empty() {
            // What memory let go was seen once more on its way down.
            self.put_below(left, PutReason::Evict).await;
        }
        outcomes
    }

    async fn put_below(&self, frames: Vec<KvFrame>, reason: PutReason) -> Vec<PutOutcome> {
        let mut outcomes = vec![PutOutcome::Refused; frames.len()];
        let frames: Vec<KvFrame> = match self.codec {
            Some(codec) if !self.below.is_empty() => frames.iter().map(|frame| frame.packed(codec)).collect(),
            _ => frames,
        };
        for store in self.below.iter().filter(|store| policy::goes_to(reason, store.place(), &self.there)) {
            let below = store.put(frames.clone(), reason).await;
            for (outcome, below) in outcomes.iter_mut().zip(below) {
                *outcome = below.max(*outcome);
            }
        }
        outcomes
    }

    /// Copies what was found far away to the nearest place.
    async fn promote(&self, found: Place, frames: Vec<KvFrame>) {
        match policy::promotes_to(found, &self.there) {
            Some(Place::Host) => {
                if let Some(host) = &self.host {
                    let (_, left) = host.insert(frames);
                    if !left.is_empty() {
                        self.put_below(left, PutReason::Evict).await;
                    }
                }
            }
            Some(place) => {
                if let Some(store) = self.below.iter().find(|store| store.place() == place) {
                    store.put(frames, PutReason::WriteThrough).await;
                }
            }
            None => {}
        }
    }

    /// Brings what is only in memory to where it outlives the process, the most used first; how many blocks were put.
    pub async fn drain_host(&self) -> usize {
        let Some(host) = self.host.as_ref().filter(|_| self.outlives()) else { return 0 };
        let mut num_put = 0;
        for keys in host.keys_by_value().chunks(DRAIN_BATCH) {
            let frames = host.get(keys).await.into_iter().filter_map(Lookup::hit).collect();
            let outcomes = self.put_below(frames, PutReason::Drain).await;
            num_put += outcomes.iter().filter(|&&outcome| outcome == PutOutcome::Stored).count();
        }
        num_put
    }
}

impl Store for TieredStore {
    fn place(&self) -> Place {
        self.there.first().copied().unwrap_or(Place::Host)
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix> {
        Box::pin(async move {
            let mut prefix = Prefix::default();
            // A prefix may begin in memory and go on below, and the other way around.
            loop {
                let before = prefix.num_blocks;
                for store in self.stores() {
                    let further = store.lookup(&keys[prefix.num_blocks..]).await;
                    prefix.num_blocks += further.num_blocks;
                    prefix.busy |= further.busy;
                    if prefix.num_blocks == keys.len() {
                        return prefix;
                    }
                }
                if prefix.num_blocks == before || prefix.busy {
                    return prefix;
                }
            }
        })
    }

    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        Box::pin(async move {
            let mut answers = vec![Lookup::Miss; keys.len()];
            for store in self.stores() {
                let missing: Vec<usize> = (0..keys.len()).filter(|&i| !matches!(answers[i], Lookup::Hit(_))).collect();
                if missing.is_empty() {
                    break;
                }
                let wanted: Vec<BlockKey> = missing.iter().map(|&i| keys[i]).collect();
                let found = store.get(&wanted).await;
                let hits: Vec<KvFrame> = found.iter().filter_map(|lookup| lookup.clone().hit()).collect();
                for (i, lookup) in missing.into_iter().zip(found) {
                    if lookup != Lookup::Miss {
                        answers[i] = lookup;
                    }
                }
                if !hits.is_empty() {
                    self.promote(store.place(), hits).await;
                }
            }
            answers
        })
    }

    fn put(&self, frames: Vec<KvFrame>, reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>> {
        Box::pin(self.put_frames(frames, reason))
    }

    fn lease<'a>(&'a self, keys: &'a [BlockKey], millis: u32) -> BoxFuture<'a, usize> {
        Box::pin(async move {
            let mut most = 0;
            for store in self.stores() {
                most = most.max(store.lease(keys, millis).await);
            }
            most
        })
    }

    fn stats(&self) -> Vec<PlaceStats> {
        self.stores().flat_map(|store| store.stats()).collect()
    }

    fn sync(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            for store in self.stores() {
                store.sync().await;
            }
        })
    }
}
