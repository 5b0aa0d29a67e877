//! The threads that touch mapped bytes: pin a slot, fault it in, and hand out a copy or a pinned slice.
//!
//! Fed by `DiskStore::read` through bounded queues. A slot whose header is not the block that was asked for, or whose copy is
//! damaged, is freed: the answer is a miss.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use protocol::kv_frame::{FrameError, FrameHeader};
use protocol::{BlockKey, KvFrame, Lookup};
use tokio::sync::{mpsc, oneshot};

use super::segment::Segment;
use super::slots::{self, ShortKey};
use super::{Inner, PIN_SECONDS};

/// Keys to read together.
#[derive(Debug)]
pub(super) struct ReadJob {
    pub(super) keys: Vec<BlockKey>,
    /// A checked copy, or a slice of the map.
    pub(super) copy: bool,
    pub(super) reply: oneshot::Sender<Vec<Lookup<KvFrame>>>,
}

pub(super) fn run(inner: &Arc<Inner>, mut jobs: mpsc::Receiver<ReadJob>) {
    while let Some(ReadJob { keys, copy, reply }) = jobs.blocking_recv() {
        if !reply.is_closed() {
            // Who asked may be gone meanwhile: the pins end with the answer.
            drop(reply.send(read(inner, &keys, copy)));
        }
    }
}

fn read(inner: &Arc<Inner>, keys: &[BlockKey], copy: bool) -> Vec<Lookup<KvFrame>> {
    let pins: Vec<Option<Pin>> = keys.iter().map(|key| Pin::of(inner, key)).collect();
    pins.iter().flatten().for_each(|pin| pin.segment.will_read(pin.pin.slot.index()));
    let read_one = |(key, pin): (&BlockKey, Option<Pin>)| match pin {
        None => Lookup::Miss,
        Some(pin) => {
            let (slot, segment) = (pin.pin.slot, Arc::clone(&pin.segment));
            let frame = frame(&pin, key, copy);
            if segment.is_lost() {
                inner.lose(slot.segment(), &segment);
                inner.stats().damaged += 1;
                return Lookup::Miss;
            }
            match frame {
                Ok((header, Some(payload))) => Lookup::Hit(KvFrame { header, payload }),
                Ok((header, None)) => {
                    Lookup::Hit(KvFrame { payload: Bytes::from_owner(Pinned::of(pin, &header)), header })
                }
                Err(error) => {
                    tracing::warn!(path = %segment.path().display(), slot = slot.index(), %error, "a KV block is dropped");
                    inner.drop_damaged(pin.pin, &segment);
                    Lookup::Miss
                }
            }
        }
    };
    keys.iter().zip(pins).map(read_one).collect()
}

/// The header of a pinned slot, and a checked copy of its payload where one is wanted.
fn frame(pin: &Pin, key: &BlockKey, copy: bool) -> Result<(FrameHeader, Option<Bytes>), FrameError> {
    let slot = pin.segment.read(pin.pin.slot.index()).map_err(|_| FrameError::Damaged("slot"))?;
    let (header, len) = FrameHeader::parse(&slot)?;
    if header.identity.key != *key {
        return Err(FrameError::Foreign("name"));
    }
    let Some(payload) = slot.get(len..len + header.payload_len) else {
        return Err(FrameError::Short { len: slot.len(), needed: len + header.payload_len });
    };
    if !copy && cfg!(unix) && len == header.encoded_len() {
        pin.inner.slots().doubt(pin.pin);
        return Ok((header, None));
    }
    let mut copied = pin.inner.buffers.take(payload.len());
    copied.extend_from_slice(payload);
    let frame = KvFrame { payload: pin.inner.buffers.freeze(copied), header };
    frame.check()?;
    Ok((frame.header, Some(frame.payload)))
}

/// A slot that is not overwritten while this exists, up to the pin's deadline.
#[derive(Debug)]
struct Pin {
    inner: Arc<Inner>,
    segment: Arc<Segment>,
    pin: slots::Pin,
}

impl Pin {
    fn of(inner: &Arc<Inner>, key: &BlockKey) -> Option<Self> {
        let key = ShortKey::of(key);
        let until = inner.now() + PIN_SECONDS;
        let (pin, segment) = inner.slots().pin(key, until)?;
        Some(Self { inner: Arc::clone(inner), segment, pin })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.inner.slots().unpin(self.pin);
    }
}

/// A payload in the map.
#[derive(Debug)]
struct Pinned {
    pin: Pin,
    range: Range<usize>,
}

impl Pinned {
    /// Of a slot with a header of this release: one of a later release is copied out.
    fn of(pin: Pin, header: &FrameHeader) -> Self {
        Self { pin, range: header.encoded_len()..header.frame_len() }
    }
}

impl AsRef<[u8]> for Pinned {
    fn as_ref(&self) -> &[u8] {
        &self.pin.segment.bytes(self.pin.pin.slot.index())[self.range.clone()]
    }
}
