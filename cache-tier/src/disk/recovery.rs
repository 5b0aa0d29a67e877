//! Finding what is in a directory at start: the fronts of its segments, and nothing else of them.
//!
//! Called once by `DiskStore::open`. A file that cannot be used is skipped with a line in the log, and deleted when its room
//! is needed; so are files over the cap, at once.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::segment::{Found, Segment, UNFINISHED};
use super::slots::{ShortKey, Slots};
use super::{DiskConfig, DiskError, Inner, SEGMENT_BYTES, lock};
use crate::policy::Place;
use crate::store::PlaceStats;

/// Extension of segment files, which are numbered.
pub(super) const EXTENSION: &str = "kvseg";
/// Keys that the ghost list remembers: at least these, and as many as there are blocks of 64 KiB in the cap.
const MIN_REMEMBERED: usize = 4096;

pub(super) fn open(config: DiskConfig) -> Result<Inner, DiskError> {
    let lock = lock(&config.directory)?;
    let started = Instant::now();
    let paths = segment_paths(&config.directory)?;
    let next_file = paths.iter().filter_map(|path| number_of(path)).max().map_or(0, |last| last + 1);
    let (mut segments, mut skipped, mut allocated) = (Vec::new(), Vec::new(), 0);
    // The newest files first: those over the cap are the oldest.
    for path in paths.into_iter().rev() {
        match Segment::open(&path) {
            Ok(segment) if allocated + segment.num_bytes() > config.capacity_bytes => {
                tracing::info!(path = %path.display(), capacity = config.capacity_bytes, "a KV segment is over the cap: deleted");
                drop(segment);
                std::fs::remove_file(&path).map_err(|error| DiskError::io(&path, error))?;
            }
            Ok(segment) => {
                allocated += segment.num_bytes();
                segments.push(segment);
            }
            Err(reason) => {
                tracing::warn!(path = %path.display(), reason, "a KV segment is skipped");
                let bytes = path.metadata().map_or(0, |metadata| metadata.len());
                allocated += bytes;
                skipped.push((path, bytes));
            }
        }
    }
    let remembered = usize::try_from(config.capacity_bytes >> 16).unwrap_or(usize::MAX).clamp(MIN_REMEMBERED, 1 << 22);
    let mut slots = Slots::new(remembered);
    let next_stamp = restore(&mut slots, segments, &mut skipped);
    tracing::info!(
        directory = %config.directory.display(),
        blocks = slots.len(),
        bytes = allocated,
        seconds = started.elapsed().as_secs_f64(),
        "KV blocks found on disk"
    );
    // A sixteenth of a small cap, so that segments can come and go; more than the usual where there would be too many.
    let segment_bytes = (config.capacity_bytes / 16).clamp(1 << 20, SEGMENT_BYTES).max(config.capacity_bytes / 2048);
    Ok(Inner {
        config,
        segment_bytes,
        slots: Mutex::new(slots),
        stats: Mutex::new(PlaceStats::new(Place::Disk)),
        allocated: AtomicU64::new(allocated),
        skipped: Mutex::new(skipped),
        no_growth_until: AtomicU64::new(0),
        buffers: Arc::default(),
        next_stamp: AtomicU64::new(next_stamp),
        next_file: AtomicU64::new(next_file),
        started: Instant::now(),
        _lock: lock,
    })
}

fn number_of(path: &Path) -> Option<u64> {
    path.file_stem()?.to_str()?.parse().ok()
}

/// Segment files, in the order in which they were made.
fn segment_paths(directory: &Path) -> Result<Vec<PathBuf>, DiskError> {
    let io = |error| DiskError::io(directory, error);
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.extension().is_some_and(|extension| extension == UNFINISHED) {
            // Its maker ended before it was whole.
            std::fs::remove_file(&path).map_err(|error| DiskError::io(&path, error))?;
            continue;
        }
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            paths.push(path);
        }
    }
    paths.sort_by_key(|path| number_of(path));
    Ok(paths)
}

/// Enters all blocks, the last written first to be kept; returns the next stamp.
fn restore(slots: &mut Slots<Arc<Segment>>, segments: Vec<Arc<Segment>>, skipped: &mut Vec<(PathBuf, u64)>) -> u64 {
    let mut blocks: Vec<(u64, u32, u32, ShortKey)> = Vec::new();
    for segment in segments {
        let found = match segment.recover() {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(path = %segment.path().display(), %error, "a KV segment is skipped");
                skipped.push((segment.path().to_owned(), segment.num_bytes()));
                continue;
            }
        };
        let class = slots.class(segment.shape());
        let num_slots = segment.num_slots();
        let Some(number) = slots.add_segment(class, Arc::clone(&segment), num_slots) else {
            skipped.push((segment.path().to_owned(), segment.num_bytes()));
            continue;
        };
        let entry = |Found { index, header, stamp }: Found| {
            (stamp, number as u32, index as u32, ShortKey::of(&header.identity.key))
        };
        blocks.extend(found.into_iter().map(entry));
    }
    // Of two slots with one key the later counts, and queues begin with what was written first.
    blocks.sort_unstable_by_key(|(stamp, ..)| std::cmp::Reverse(*stamp));
    let mut kept = Vec::with_capacity(blocks.len());
    let next_stamp = blocks.first().map_or(0, |(stamp, ..)| stamp.saturating_add(1));
    let mut seen = std::collections::HashSet::with_capacity(blocks.len());
    for block in blocks {
        if seen.insert(block.3.hash()) {
            kept.push(block);
        }
    }
    for (_, number, index, key) in kept.into_iter().rev() {
        slots.restore(number as usize, index as usize, key);
    }
    slots.settle();
    next_stamp
}
