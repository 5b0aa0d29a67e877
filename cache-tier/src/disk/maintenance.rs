//! What an operator asks for: reading every block, and giving back the room of segments that are nearly empty.
//!
//! Called by `pagoda cache verify` and `compact`, on a directory or through a running service.

use std::sync::Arc;

use protocol::kv_frame::{FrameError, FrameHeader};
use protocol::{KvFrame, PutOutcome};
use serde::{Deserialize, Serialize};

use super::segment::Segment;
use super::slots::{Claim, ShortKey};
use super::{Inner, PIN_SECONDS, writer};
use crate::policy::ADMITTED;

/// What reading every block found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// Segments read.
    pub segments: usize,
    /// Blocks that are whole.
    pub whole: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Blocks that are not, and are dropped.
    pub damaged: u64,
    /// Each of those: file, slot and reason, up to a hundred.
    pub problems: Vec<String>,
}

/// What compaction gave back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compacted {
    /// Blocks moved.
    pub moved: u64,
    /// Files deleted.
    pub deleted: usize,
    /// Their bytes.
    pub freed_bytes: u64,
}

/// Problems that are told one by one.
const MAX_PROBLEMS: usize = 100;

fn segments(inner: &Inner) -> Vec<(usize, Arc<Segment>, usize, usize)> {
    let slots = inner.slots();
    slots.segments().map(|(number, segment, live, all)| (number, Arc::clone(segment), live, all)).collect()
}

/// Reads a slot by calls, so that a file that fails is an error.
fn read_slot(segment: &Segment, index: usize, front: &FrameHeader) -> Result<KvFrame, String> {
    let slot = segment.copy(index, 0, front.frame_len().min(segment.shape().slot_bytes)).map_err(|e| e.to_string())?;
    let (header, len) = FrameHeader::parse(&slot).map_err(|error| error.to_string())?;
    if header != *front {
        return Err(FrameError::Foreign("header at the front").to_string());
    }
    if !header.identity.is_consistent() {
        return Err("its name is not that of its parent and tokens".into());
    }
    let frame = KvFrame { header, payload: slot.slice(len..) };
    frame.check().map_err(|error| error.to_string())?;
    Ok(frame)
}

pub(super) fn verify(inner: &Inner) -> Verified {
    let mut report = Verified::default();
    for (number, segment, ..) in segments(inner) {
        report.segments += 1;
        let found = match segment.recover() {
            Ok(found) => found,
            Err(error) => {
                report.problems.push(format!("{}: {error}", segment.path().display()));
                inner.lose(number, &segment);
                continue;
            }
        };
        for slot in found {
            let key = ShortKey::of(&slot.header.identity.key);
            // Pinned, a slot is not written; one that is no longer there was, since its front was read.
            let pinned = inner.slots().pin(key, inner.now() + PIN_SECONDS);
            let Some((pin, _)) = pinned else { continue };
            if (pin.slot.segment(), pin.slot.index()) != (number, slot.index) {
                inner.slots().unpin(pin);
                continue;
            }
            match read_slot(&segment, slot.index, &slot.header) {
                Ok(frame) => {
                    report.whole += 1;
                    report.bytes += frame.encoded_len() as u64;
                }
                Err(reason) => {
                    report.damaged += 1;
                    if report.problems.len() < MAX_PROBLEMS {
                        report.problems.push(format!("{} slot {}: {reason}", segment.path().display(), slot.index));
                    }
                    inner.drop_damaged(pin, &segment);
                }
            }
            inner.slots().unpin(pin);
        }
    }
    report
}

pub(super) fn compact(inner: &Inner) -> Compacted {
    let mut done = Compacted::default();
    loop {
        let mut all = segments(inner);
        all.sort_by_key(|(_, _, live, _)| *live);
        let free_elsewhere = |number: usize, segment: &Segment| -> usize {
            let same = all.iter().filter(|(n, other, ..)| *n != number && other.shape() == segment.shape());
            same.map(|(_, _, live, slots)| slots - live).sum()
        };
        let emptiest = all.iter().find(|(n, segment, live, slots)| {
            let is_sparse = *live == 0 || (live * 2 < *slots && free_elsewhere(*n, segment) >= *live);
            is_sparse && !inner.slots().is_held(*n, inner.now())
        });
        let Some((number, segment, ..)) = emptiest else { return done };
        let Ok(found) = segment.recover() else { return done };
        if inner.slots().remove_segment(*number, |found| Arc::ptr_eq(found, segment)).is_none() {
            return done;
        }
        for slot in found {
            let Ok(frame) = read_slot(segment, slot.index, &slot.header) else { continue };
            if !move_to_free(inner, &frame, slot.stamp) {
                // The next start finds what is still here.
                inner.skip(segment.path().to_owned(), segment.num_bytes());
                return done;
            }
            done.moved += 1;
        }
        writer::delete(inner, segment);
        done.deleted += 1;
        done.freed_bytes += segment.num_bytes();
    }
}

/// Puts a block into another segment.
fn move_to_free(inner: &Inner, frame: &KvFrame, stamp: u64) -> bool {
    let mut slots = inner.slots();
    let class = slots.class(super::segment::shape_of(&frame.header));
    let key = ShortKey::of(&frame.header.identity.key);
    let Claim::Slot { slot, .. } = slots.claim(class, key, ADMITTED, false, inner.now()) else { return false };
    drop(slots);
    writer::fill(inner, slot, frame, stamp) == PutOutcome::Stored
}
