//! The one thread that writes: takes a place for each block, fills it, and only then lets it be found.
//!
//! Fed by `DiskStore::put` through a bounded queue. A disk that refuses makes the cache smaller, never a caller fail.

use std::io::{self, ErrorKind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use protocol::{KvFrame, PutOutcome};
use tokio::sync::{mpsc, oneshot};

use super::Inner;
use super::maintenance::{self, Compacted};
use super::recovery::EXTENSION;
use super::segment::{self, Segment};
use super::slots::{Claim, ShortKey, SlotId, SlotShape};

/// Seconds after which a disk that refused a file is asked again.
const RETRY_SECONDS: u64 = 60;
/// Where a disk has no room for a segment of these bytes, it is full.
const SMALLEST_SEGMENT: usize = 1 << 20;

/// What the writer does next.
#[derive(Debug)]
pub(super) enum WriteJob {
    /// A block, and how often it was touched.
    Frame { frame: KvFrame, touches: u32, reply: oneshot::Sender<PutOutcome> },
    /// All that was written, to the medium.
    Sync { reply: oneshot::Sender<()> },
    /// Gives back what is nearly empty.
    Compact { reply: oneshot::Sender<Compacted> },
}

pub(super) fn run(inner: &Inner, mut jobs: mpsc::Receiver<WriteJob>) {
    while let Some(job) = jobs.blocking_recv() {
        // Who asked may be gone; the block is stored all the same.
        match job {
            WriteJob::Frame { frame, touches, reply } => drop(reply.send(put(inner, &frame, touches))),
            WriteJob::Sync { reply } => {
                sync(inner);
                let _gone = reply.send(());
            }
            WriteJob::Compact { reply } => drop(reply.send(maintenance::compact(inner))),
        }
    }
}

fn sync(inner: &Inner) {
    let segments: Vec<Arc<Segment>> = inner.slots().segments().map(|(_, segment, ..)| Arc::clone(segment)).collect();
    for segment in segments {
        if let Err(error) = segment.sync() {
            tracing::warn!(path = %segment.path().display(), %error, "a KV segment was not synced");
        }
    }
}

fn put(inner: &Inner, frame: &KvFrame, touches: u32) -> PutOutcome {
    let shape = segment::shape_of(&frame.header);
    let smallest = segment::file_bytes(shape, 1) as u64;
    if smallest > inner.config.capacity_bytes {
        return PutOutcome::Refused;
    }
    // A segment that was just made can be taken by nobody else: two rounds are enough, a third is for a stolen one.
    for _ in 0..3 {
        match claim(inner, frame, shape, touches) {
            Claim::Present => return PutOutcome::Present,
            Claim::NotAdmitted => return PutOutcome::NotAdmitted,
            Claim::Slot { slot, evicted } => {
                inner.stats().evicted += u64::from(evicted);
                let outcome = fill(inner, slot, frame, inner.next_stamp.fetch_add(1, Ordering::Relaxed));
                if evicted {
                    // Room that another size of blocks uses less is taken over, for the next.
                    take_over(inner, shape);
                }
                return outcome;
            }
            Claim::NeedsSegment => {
                if !grow(inner, shape) {
                    pause_growth(inner);
                }
            }
            Claim::Busy => {
                if !take_over(inner, shape) {
                    return PutOutcome::Busy;
                }
            }
        }
    }
    PutOutcome::Busy
}

fn claim(inner: &Inner, frame: &KvFrame, shape: SlotShape, touches: u32) -> Claim {
    let now = inner.now();
    let smallest = segment::file_bytes(shape, 1) as u64;
    forget_skipped(inner, smallest);
    let can_grow = inner.room() >= smallest && u64::from(now) >= inner.no_growth_until.load(Ordering::Relaxed);
    let mut slots = inner.slots();
    let class = slots.class(shape);
    slots.claim(class, ShortKey::of(&frame.header.identity.key), touches, can_grow, now)
}

/// Files that were skipped at start give way to those that are used.
fn forget_skipped(inner: &Inner, wanted: u64) {
    let mut skipped = inner.skipped.lock().unwrap_or_else(PoisonError::into_inner);
    while inner.room() < wanted
        && let Some((path, bytes)) = skipped.pop()
    {
        tracing::info!(path = %path.display(), bytes, "a KV segment that cannot be used made room: deleted");
        inner.allocated.fetch_sub(bytes, Ordering::Relaxed);
        // One that cannot be deleted takes room beyond the cap: there is nothing else to do about it.
        drop(std::fs::remove_file(path));
    }
}

/// Gives a class that has no slots, or far more puts for each, a segment of another class, where one can be had.
fn take_over(inner: &Inner, shape: SlotShape) -> bool {
    let mut slots = inner.slots();
    let class = slots.class(shape);
    let Some(number) = slots.segment_to_take(class, inner.now()) else { return false };
    let removed = slots.remove_segment(number, |_| true);
    drop(slots);
    if let Some((segment, num_blocks)) = removed {
        inner.stats().evicted += num_blocks as u64;
        delete(inner, &segment);
    }
    grow(inner, shape)
}

pub(super) fn delete(inner: &Inner, segment: &Segment) {
    inner.allocated.fetch_sub(segment.num_bytes(), Ordering::Relaxed);
    if let Err(error) = std::fs::remove_file(segment.path()) {
        tracing::warn!(path = %segment.path().display(), %error, "a KV segment was not deleted");
    }
}

/// Makes a segment of at most what is left of the cap; a smaller one where the disk has no room for a whole one.
fn grow(inner: &Inner, shape: SlotShape) -> bool {
    let room = inner.room();
    let mut num_slots = segment::slots_in(shape, inner.segment_bytes.min(room) as usize);
    while num_slots > 1 && segment::file_bytes(shape, num_slots) as u64 > room {
        num_slots -= 1;
    }
    if segment::file_bytes(shape, num_slots) as u64 > room {
        return false;
    }
    loop {
        let error = match make(inner, shape, num_slots) {
            Ok(added) => return added,
            Err(error) => error,
        };
        let used = inner.allocated.load(Ordering::Relaxed);
        let bytes = segment::file_bytes(shape, num_slots);
        let directory = inner.config.directory.display();
        let is_smallest = error.kind() != ErrorKind::StorageFull || num_slots == 1 || bytes <= SMALLEST_SEGMENT;
        if is_smallest {
            tracing::warn!(%directory, %error, bytes, used, "the KV cache on disk stays smaller than its cap");
            return false;
        }
        num_slots = num_slots.div_ceil(2);
    }
}

/// Makes a segment and adds it; false where there are too many.
fn make(inner: &Inner, shape: SlotShape, num_slots: usize) -> io::Result<bool> {
    let number = inner.next_file.fetch_add(1, Ordering::Relaxed);
    let path = inner.config.directory.join(format!("{number:08}.{EXTENSION}"));
    let segment = Segment::create(path, shape, num_slots)?;
    inner.allocated.fetch_add(segment.num_bytes(), Ordering::Relaxed);
    let mut slots = inner.slots();
    let class = slots.class(shape);
    let added = slots.add_segment(class, Arc::clone(&segment), num_slots).is_some();
    drop(slots);
    if !added {
        delete(inner, &segment);
    }
    Ok(added)
}

fn pause_growth(inner: &Inner) {
    inner.no_growth_until.store(u64::from(inner.now()) + RETRY_SECONDS, Ordering::Relaxed);
}

pub(super) fn fill(inner: &Inner, slot: SlotId, frame: &KvFrame, stamp: u64) -> PutOutcome {
    let Some(segment) = inner.slots().handle(slot) else { return PutOutcome::Busy };
    match segment.write(slot.index(), frame, stamp) {
        Ok(()) if inner.slots().publish(slot) => PutOutcome::Stored,
        Ok(()) => PutOutcome::Busy,
        Err(error) => {
            inner.slots().release(slot);
            tracing::warn!(path = %segment.path().display(), %error, "a KV block was not written");
            PutOutcome::Refused
        }
    }
}
