//! One file of slots: its layout, writing a slot, and reading one through the map.
//!
//! Written by the store's writer alone, read by its readers. The file: a page that says what it is, the headers of all slots
//! together (so that recovery reads nothing else), then the slots, each a whole frame. Order of a write: the old header at
//! the front is cleared, the frame goes into the slot, its header to the front. A process that ends in between leaves a
//! slot that is empty. Writes go through calls, which return errors where a full disk would raise a signal; the system's page
//! cache makes them visible in the map.

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use fs4::fs_std::FileExt as _;
use memmap2::{Mmap, MmapOptions};
use protocol::kv_frame::FrameHeader;
use protocol::{Codec, KvFrame};

use super::fault::Guarded;
use super::slots::{MAX_SLOTS, SlotShape};

const MAGIC: [u8; 8] = *b"PGDSEG\r\n";
/// Grows when the layout changes; a file of another version is skipped.
const VERSION: u32 = 1;
/// Reads as itself on a machine of the same byte order alone.
const ORDER: u32 = 0x0102_0304;
/// What is before the headers, and what slots are aligned to.
const PAGE: usize = 4096;
/// Extension of a file that is being made.
pub const UNFINISHED: &str = "kvnew";
/// Behind each header at the front: the order in which slots were written.
const STAMP: usize = 8;

/// A segment file, open and mapped.
#[derive(Debug)]
pub struct Segment {
    path: PathBuf,
    file: File,
    /// Before the map, so that its range is forgotten before it is another's.
    guarded: Option<Guarded>,
    map: Mmap,
    shape: SlotShape,
    num_slots: usize,
}

/// A slot that recovery found.
#[derive(Debug, PartialEq, Eq)]
pub struct Found {
    /// Its place.
    pub index: usize,
    /// What is in it.
    pub header: FrameHeader,
    /// When it was written, against others.
    pub stamp: u64,
}

/// Sizes of a slot for a frame.
pub fn shape_of(frame: &FrameHeader) -> SlotShape {
    let frame_len = frame.frame_len();
    let front_bytes = (frame.encoded_len() + STAMP).next_multiple_of(64);
    // Small frames (a simulated device's) share pages, others begin on their own; packed ones, whose lengths all differ, share
    // slots of a few sizes.
    let step = match frame.codec {
        _ if frame_len <= PAGE => 64,
        Codec::Raw => PAGE,
        Codec::Zstd => (frame_len.next_power_of_two() / 16).max(PAGE),
    };
    SlotShape { front_bytes, slot_bytes: frame_len.next_multiple_of(step).max(front_bytes) }
}

fn slots_start(shape: SlotShape, num_slots: usize) -> usize {
    PAGE + (shape.front_bytes * num_slots).next_multiple_of(PAGE)
}

/// Bytes of a file of so many slots.
pub fn file_bytes(shape: SlotShape, num_slots: usize) -> usize {
    slots_start(shape, num_slots) + shape.slot_bytes * num_slots
}

/// Slots of a file of about `bytes`, at least one.
pub fn slots_in(shape: SlotShape, bytes: usize) -> usize {
    (bytes.saturating_sub(2 * PAGE) / (shape.front_bytes + shape.slot_bytes)).clamp(1, MAX_SLOTS)
}

impl Segment {
    /// Makes a file and takes all of its room from the disk.
    ///
    /// # Errors
    /// When the disk is full or cannot be written; nothing is left behind.
    pub fn create(path: PathBuf, shape: SlotShape, num_slots: usize) -> io::Result<Arc<Self>> {
        // Under its name it is whole.
        let unfinished = path.with_extension(UNFINISHED);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&unfinished)?;
        let made = Self::preallocate(&file, shape, num_slots)
            .and_then(|()| std::fs::rename(&unfinished, &path))
            .and_then(|()| Self::map(path.clone(), file, shape, num_slots));
        if made.is_err() {
            // The error that is returned is the one that matters.
            drop(std::fs::remove_file(&unfinished).or_else(|_| std::fs::remove_file(&path)));
        }
        made.map(Arc::new)
    }

    fn preallocate(file: &File, shape: SlotShape, num_slots: usize) -> io::Result<()> {
        let len = file_bytes(shape, num_slots) as u64;
        file.allocate(len)?;
        file.set_len(len)?;
        let mut page = [0; 28];
        page[..8].copy_from_slice(&MAGIC);
        let numbers = [VERSION, ORDER, shape.front_bytes as u32, shape.slot_bytes as u32, num_slots as u32];
        for (bytes, number) in page[8..].chunks_exact_mut(4).zip(numbers) {
            bytes.copy_from_slice(&number.to_ne_bytes());
        }
        write_at(file, &page, 0)
    }

    fn map(path: PathBuf, file: File, shape: SlotShape, num_slots: usize) -> io::Result<Self> {
        let len = file_bytes(shape, num_slots);
        // SAFETY: the directory is locked, so that only this process writes the file; slots are read while they are pinned,
        // and a pinned slot is not written before its deadline, after which checksums tell. A file that is cut short from
        // outside raises SIGBUS, which `fault` turns into zeros.
        let map = unsafe { MmapOptions::new().len(len).map(&file)? };
        let guarded = Guarded::new(&map);
        if guarded.is_none() {
            return Err(io::Error::other("too many segments are mapped"));
        }
        Ok(Self { path, file, guarded, map, shape, num_slots })
    }

    /// Opens a file that is there.
    ///
    /// # Errors
    /// What is wrong with it, in words for the log.
    pub fn open(path: &Path) -> Result<Arc<Self>, String> {
        let fail = |error: io::Error| error.to_string();
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(fail)?;
        let len = file.metadata().map_err(fail)?.len();
        let mut page = [0; 28];
        read_at(&file, &mut page, 0).map_err(|_| format!("is no segment: it has {len} bytes"))?;
        if page[..8] != MAGIC {
            return Err("is no segment: it starts otherwise".into());
        }
        let number = |at: usize| u32::from_ne_bytes([page[at], page[at + 1], page[at + 2], page[at + 3]]);
        if number(12) != ORDER {
            return Err("was written on a machine of another byte order".into());
        }
        if number(8) != VERSION {
            return Err(format!("has version {}, this release reads {VERSION}", number(8)));
        }
        let shape = SlotShape { front_bytes: number(16) as usize, slot_bytes: number(20) as usize };
        let num_slots = number(24) as usize;
        let is_sane = (1..=MAX_SLOTS).contains(&num_slots)
            && (64..=PAGE).contains(&shape.front_bytes)
            && shape.front_bytes.is_multiple_of(64)
            && shape.slot_bytes.is_multiple_of(64)
            && shape.slot_bytes >= shape.front_bytes;
        if !is_sane {
            return Err(format!("says that it has {num_slots} slots of {} bytes, which cannot be", shape.slot_bytes));
        }
        let wanted = file_bytes(shape, num_slots) as u64;
        if len != wanted {
            return Err(format!("has {len} bytes and should have {wanted}"));
        }
        Self::map(path.to_owned(), file, shape, num_slots).map(Arc::new).map_err(fail)
    }

    /// Sizes of its slots.
    pub fn shape(&self) -> SlotShape {
        self.shape
    }

    /// How many it has.
    pub fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Bytes of the file.
    pub fn num_bytes(&self) -> u64 {
        file_bytes(self.shape, self.num_slots) as u64
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a read has failed.
    pub fn is_lost(&self) -> bool {
        self.guarded.as_ref().is_some_and(Guarded::is_lost)
    }

    /// Every slot with a whole header, from the front alone.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn recover(&self) -> io::Result<Vec<Found>> {
        let mut fronts = vec![0; self.shape.front_bytes * self.num_slots];
        read_at(&self.file, &mut fronts, PAGE as u64)?;
        let found = fronts.chunks_exact(self.shape.front_bytes).enumerate().filter_map(|(index, front)| {
            let (header, len) = FrameHeader::parse(front).ok()?;
            let fits = len + header.payload_len <= self.shape.slot_bytes && len + STAMP <= front.len();
            let stamp = front.get(len..len + STAMP)?.try_into().map(u64::from_le_bytes).ok()?;
            fits.then_some(Found { index, header, stamp })
        });
        Ok(found.collect())
    }

    fn front(&self, index: usize) -> u64 {
        (PAGE + index * self.shape.front_bytes) as u64
    }

    fn slot(&self, index: usize) -> usize {
        slots_start(self.shape, self.num_slots) + index * self.shape.slot_bytes
    }

    /// Fills a slot.
    ///
    /// # Errors
    /// When the disk refuses; the slot is then empty.
    pub fn write(&self, index: usize, frame: &KvFrame, stamp: u64) -> io::Result<()> {
        let header = frame.header.encode();
        self.clear(index)?;
        let slot = self.slot(index) as u64;
        write_at(&self.file, &header, slot)?;
        write_at(&self.file, &frame.payload, slot + header.len() as u64)?;
        write_at(&self.file, &[&header[..], &stamp.to_le_bytes()].concat(), self.front(index))
    }

    /// Makes a slot empty.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn clear(&self, index: usize) -> io::Result<()> {
        write_at(&self.file, &[0; 4], self.front(index))
    }

    /// Tells the system that a slot will be read at once.
    pub fn will_read(&self, index: usize) {
        #[cfg(unix)]
        {
            // Advice: where it is not taken, the read is slower.
            drop(self.map.advise_range(
                memmap2::Advice::WillNeed,
                self.slot(index) / PAGE * PAGE,
                self.shape.slot_bytes,
            ));
        }
        #[cfg(not(unix))]
        let _ = index;
    }

    /// A slot's bytes, in memory: in the map, faulted in, where a fault can be caught. Called on reader threads.
    ///
    /// # Errors
    /// When the file cannot be read.
    #[cfg(unix)]
    pub fn read(&self, index: usize) -> io::Result<Cow<'_, [u8]>> {
        let slot = self.bytes(index);
        let touched = slot.iter().step_by(PAGE).fold(0u8, |sum, byte| sum ^ byte);
        std::hint::black_box(touched);
        Ok(Cow::Borrowed(slot))
    }

    /// A slot's bytes, in memory: copied by a call, which returns an error where the map would raise an exception.
    ///
    /// # Errors
    /// When the file cannot be read.
    #[cfg(not(unix))]
    pub fn read(&self, index: usize) -> io::Result<Cow<'_, [u8]>> {
        Ok(Cow::Owned(self.copy(index, 0, self.shape.slot_bytes)?.to_vec()))
    }

    /// The bytes of a frame in the map.
    pub fn bytes(&self, index: usize) -> &[u8] {
        &self.map[self.slot(index)..][..self.shape.slot_bytes]
    }

    /// A frame copied out by a call: what a system without the signal reads by, and `verify`.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn copy(&self, index: usize, offset: usize, len: usize) -> io::Result<Bytes> {
        let mut bytes = vec![0; len];
        read_at(&self.file, &mut bytes, (self.slot(index) + offset) as u64)?;
        Ok(Bytes::from(bytes))
    }

    /// Writes what the system still holds to the medium.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        (bytes, offset) = (&bytes[written..], offset + written as u64);
    }
    Ok(())
}

#[cfg(windows)]
fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let read = std::os::windows::fs::FileExt::seek_read(file, bytes, offset)?;
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (bytes, offset) = (&mut bytes[read..], offset + read as u64);
    }
    Ok(())
}
