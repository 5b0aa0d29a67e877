//! Blocks on a local disk: a directory of mapped segments under a hard cap, which outlives the process.
//!
//! Opened by the engine (`--kv-disk`) and by `pagoda cache`. `slots` decides, `segment` is a file, the writer thread alone
//! writes, the reader threads alone touch mapped bytes. Invariants: a directory belongs to one process; the files never pass
//! the cap; what `put` called stored is found again after a kill -9 (it is in the system's page cache: `sync` brings it
//! to the medium, as a drain does, and a checksum tells what a power loss tore); a block is found under its whole key only.

mod fault;
mod maintenance;
mod reader;
mod recovery;
mod segment;
pub mod slots;
mod writer;

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use futures_util::future::{BoxFuture, join_all};
use protocol::{BlockKey, Buffers, KvFrame, Lookup, Prefix, PutOutcome, PutReason};
use tokio::sync::{mpsc, oneshot};

use crate::policy::{Place, touches};
use crate::store::{PlaceStats, Store};
pub use maintenance::{Compacted, Verified};
use reader::ReadJob;
use segment::Segment;
use slots::{ShortKey, Slots};
use writer::WriteJob;

/// Reader threads: one waits for the disk while the other copies.
const NUM_READERS: usize = 2;
/// Jobs that wait for each thread.
const QUEUE: usize = 64;
/// Keys of one read: a reader asks the disk for all of them before it waits for the first.
const KEYS_A_JOB: usize = 8;
/// So long a put or get waits for its place in a queue; then the answer is busy.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(2);
/// So long a block that is being sent is kept from being overwritten.
const PIN_SECONDS: u32 = 60;
/// Longest lease.
const MAX_LEASE_SECONDS: u32 = 600;
/// Size of a segment, unless the cap is very small or large.
const SEGMENT_BYTES: u64 = 64 << 20;
/// The file that is locked.
const LOCK_FILE: &str = "lock";

/// Settings of a store on disk.
#[derive(Clone, Debug)]
pub struct DiskConfig {
    /// Its directory, made where there is none.
    pub directory: PathBuf,
    /// Most bytes of its files.
    pub capacity_bytes: u64,
}

/// A directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The system refuses.
    #[error("{path}: {error}")]
    Io {
        /// File or directory.
        path: String,
        /// The system's words.
        error: std::io::Error,
    },
    /// Another process has it.
    #[error("{0} is in use by another process: a KV directory belongs to one")]
    InUse(String),
    /// The cap is smaller than one block can be.
    #[error("a capacity of {0} bytes holds no block: at least 1 MiB")]
    TooSmall(u64),
}

impl DiskError {
    fn io(path: &Path, error: std::io::Error) -> Self {
        Self::Io { path: path.display().to_string(), error }
    }
}

/// What the threads share.
#[derive(Debug)]
struct Inner {
    config: DiskConfig,
    segment_bytes: u64,
    slots: Mutex<Slots<Arc<Segment>>>,
    stats: Mutex<PlaceStats>,
    /// Bytes of all files, those that are skipped included.
    allocated: AtomicU64,
    /// Files that cannot be used, and their bytes: they are left alone until their room is needed.
    skipped: Mutex<Vec<(PathBuf, u64)>>,
    /// The disk refused a file: no more are made until then, in seconds of the store's clock.
    no_growth_until: AtomicU64,
    buffers: Arc<Buffers>,
    next_stamp: AtomicU64,
    next_file: AtomicU64,
    started: Instant,
    /// Held as long as this is.
    _lock: File,
}

impl Inner {
    fn slots(&self) -> MutexGuard<'_, Slots<Arc<Segment>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stats(&self) -> MutexGuard<'_, PlaceStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds of the store's clock.
    fn now(&self) -> u32 {
        // From one, so that a deadline of zero has passed.
        (self.started.elapsed().as_secs() + 1).min(u64::from(u32::MAX / 2)) as u32
    }

    /// Leaves a file alone until its room is needed.
    fn skip(&self, path: PathBuf, bytes: u64) {
        self.skipped.lock().unwrap_or_else(PoisonError::into_inner).push((path, bytes));
    }

    /// Bytes that are left of the cap.
    fn room(&self) -> u64 {
        self.config.capacity_bytes.saturating_sub(self.allocated.load(Ordering::Relaxed))
    }

    /// Frees the slot of a block that is damaged, so that it is not found at the next start either.
    fn drop_damaged(&self, pin: slots::Pin, segment: &Segment) {
        self.stats().damaged += 1;
        // Claimed, the slot is nobody else's to write.
        if self.slots().condemn(pin) {
            // Where that fails, it is found out again.
            drop(segment.clear(pin.slot.index()));
            self.slots().release(pin.slot);
        }
    }

    /// Takes a segment out whose file fails.
    fn lose(&self, number: usize, segment: &Segment) {
        let removed = self.slots().remove_segment(number, |found| std::ptr::eq(&**found, segment));
        if removed.is_some() {
            self.allocated.fetch_sub(segment.num_bytes(), Ordering::Relaxed);
            tracing::warn!(path = %segment.path().display(), "a KV segment cannot be read: its blocks are recomputed");
            // Left in place, it would be tried again at the next start.
            drop(std::fs::remove_file(segment.path()));
        }
    }
}

/// The store. Its threads end when it is dropped.
#[derive(Debug)]
pub struct DiskStore {
    inner: Arc<Inner>,
    writes: Option<mpsc::Sender<WriteJob>>,
    reads: Vec<mpsc::Sender<ReadJob>>,
    next_reader: AtomicUsize,
    threads: Vec<JoinHandle<()>>,
}

impl DiskStore {
    /// Whether a directory has been a store.
    pub fn is_at(directory: &Path) -> bool {
        directory.join(LOCK_FILE).is_file()
    }

    /// Opens a directory and finds what is in it.
    ///
    /// # Errors
    /// When it cannot be used, or another process has it.
    pub fn open(config: DiskConfig) -> Result<Self, DiskError> {
        if config.capacity_bytes < 1 << 20 {
            return Err(DiskError::TooSmall(config.capacity_bytes));
        }
        let inner = Arc::new(recovery::open(config)?);
        let (writes, receiver) = mpsc::channel(QUEUE);
        let mut threads = vec![spawn("kv-writer", Arc::clone(&inner), |inner| writer::run(inner, receiver))?];
        let mut reads = Vec::new();
        for _ in 0..NUM_READERS {
            let (sender, receiver) = mpsc::channel(QUEUE);
            threads.push(spawn("kv-reader", Arc::clone(&inner), |inner| reader::run(inner, receiver))?);
            reads.push(sender);
        }
        Ok(Self { inner, writes: Some(writes), reads, next_reader: AtomicUsize::new(0), threads })
    }

    /// The blocks of these keys: copied and checked, or as slices of the map that are pinned until they are dropped, whose
    /// receiver checks them.
    pub async fn read(&self, keys: &[BlockKey], copy: bool) -> Vec<Lookup<KvFrame>> {
        let jobs = keys.chunks(KEYS_A_JOB).map(|keys| self.read_job(keys.to_vec(), copy));
        let found: Vec<Lookup<KvFrame>> = join_all(jobs).await.into_iter().flatten().collect();
        self.inner.stats().count_lookups(&found);
        found
    }

    async fn read_job(&self, keys: Vec<BlockKey>, copy: bool) -> Vec<Lookup<KvFrame>> {
        let num_keys = keys.len();
        // What is not there needs no reader.
        if !keys.iter().any(|key| self.inner.slots().contains(ShortKey::of(key))) {
            return vec![Lookup::Miss; num_keys];
        }
        let (reply, answer) = oneshot::channel();
        let reader = &self.reads[self.next_reader.fetch_add(1, Ordering::Relaxed) % self.reads.len()];
        let sent = reader.send_timeout(ReadJob { keys, copy, reply }, QUEUE_TIMEOUT).await;
        let answer = if sent.is_ok() { answer.await.ok() } else { None };
        answer.unwrap_or_else(|| vec![Lookup::Busy; num_keys])
    }

    async fn write_job(&self, frame: KvFrame, reason: PutReason) -> PutOutcome {
        let key = frame.header.identity.key;
        let doubt = self.inner.slots().take_doubt(ShortKey::of(&key));
        match doubt {
            None => {}
            Some(false) => return PutOutcome::Present,
            // Whoever puts it anew may have found that what it got is damaged: it is looked at, and dropped if so.
            Some(true) => {
                let found = self.read_job(vec![key], true).await;
                if found.iter().any(|lookup| *lookup != Lookup::Miss) {
                    return PutOutcome::Present;
                }
            }
        }
        let Some(writes) = &self.writes else { return PutOutcome::Refused };
        let (reply, answer) = oneshot::channel();
        let job = WriteJob::Frame { frame, touches: touches(reason), reply };
        if writes.send_timeout(job, QUEUE_TIMEOUT).await.is_err() {
            return PutOutcome::Busy;
        }
        answer.await.unwrap_or(PutOutcome::Refused)
    }

    /// Bytes of memory that the index takes.
    pub fn index_bytes(&self) -> usize {
        self.inner.slots().memory_bytes()
    }

    /// Reads every block and drops those that are damaged. Blocks this thread.
    pub fn verify(&self) -> Verified {
        maintenance::verify(&self.inner)
    }

    /// Moves blocks out of segments that are nearly empty and deletes those.
    pub async fn compact(&self) -> Compacted {
        let (reply, answer) = oneshot::channel();
        let Some(writes) = &self.writes else { return Compacted::default() };
        if writes.send(WriteJob::Compact { reply }).await.is_err() {
            return Compacted::default();
        }
        answer.await.unwrap_or_default()
    }
}

fn spawn(
    name: &str,
    inner: Arc<Inner>,
    work: impl FnOnce(&Arc<Inner>) + Send + 'static,
) -> Result<JoinHandle<()>, DiskError> {
    let directory = inner.config.directory.clone();
    let thread = std::thread::Builder::new().name(name.into()).spawn(move || work(&inner));
    thread.map_err(|error| DiskError::io(&directory, error))
}

impl Store for DiskStore {
    fn place(&self) -> Place {
        Place::Disk
    }

    fn lookup<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Prefix> {
        let slots = self.inner.slots();
        let num_blocks = keys.iter().take_while(|key| slots.contains(ShortKey::of(key))).count();
        Box::pin(std::future::ready(Prefix { num_blocks, busy: false }))
    }

    fn get<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        Box::pin(self.read(keys, true))
    }

    fn get_to_send<'a>(&'a self, keys: &'a [BlockKey]) -> BoxFuture<'a, Vec<Lookup<KvFrame>>> {
        Box::pin(self.read(keys, false))
    }

    fn put(&self, frames: Vec<KvFrame>, reason: PutReason) -> BoxFuture<'_, Vec<PutOutcome>> {
        Box::pin(async move {
            let bytes: Vec<u64> = frames.iter().map(|frame| frame.encoded_len() as u64).collect();
            let outcomes = join_all(frames.into_iter().map(|frame| self.write_job(frame, reason))).await;
            let mut stats = self.inner.stats();
            outcomes.iter().zip(bytes).for_each(|(&outcome, bytes)| stats.count_put(outcome, bytes));
            outcomes
        })
    }

    fn lease<'a>(&'a self, keys: &'a [BlockKey], millis: u32) -> BoxFuture<'a, usize> {
        let until = self.inner.now() + millis.div_ceil(1000).min(MAX_LEASE_SECONDS);
        let mut slots = self.inner.slots();
        let leased = keys.iter().filter(|key| slots.lease(ShortKey::of(key), until)).count();
        Box::pin(std::future::ready(leased))
    }

    fn stats(&self) -> Vec<PlaceStats> {
        let num_blocks = self.inner.slots().len() as u64;
        let used_bytes = self.inner.allocated.load(Ordering::Relaxed);
        let capacity_bytes = self.inner.config.capacity_bytes;
        vec![PlaceStats { num_blocks, used_bytes, capacity_bytes, ..*self.inner.stats() }]
    }

    fn sync(&self) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let (reply, answer) = oneshot::channel();
            let Some(writes) = &self.writes else { return };
            if writes.send(WriteJob::Sync { reply }).await.is_ok() {
                drop(answer.await);
            }
        })
    }
}

impl Drop for DiskStore {
    fn drop(&mut self) {
        self.writes = None;
        self.reads.clear();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so; the store is gone either way.
            drop(thread.join());
        }
    }
}

/// Takes a directory for this process.
fn lock(directory: &Path) -> Result<File, DiskError> {
    std::fs::create_dir_all(directory).map_err(|error| DiskError::io(directory, error))?;
    let path = directory.join(LOCK_FILE);
    let file = File::options().create(true).truncate(false).write(true).open(&path);
    let file = file.map_err(|error| DiskError::io(&path, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(DiskError::InUse(directory.display().to_string())),
        Err(TryLockError::Error(error)) => Err(DiskError::io(&path, error)),
    }
}
