//! What a worker tells a router as it happens: `GET /internal/v1/events`, length-prefixed binary records.
//!
//! Written by the engine's server, read by the router. A stream begins with a hello, then a snapshot of the chunks that are
//! held, then changes. Each change has the next number; after a gap, or under another epoch, what was known is void and the
//! reader connects again. Invariant: a reader believes no length, and passes over kinds that it does not know.
//!
//! A record: length u32 of what follows, kind u8, body. All numbers are little-endian.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use crate::report::{ReportError, WorkerReport};
use crate::{VersionError, WireVersion};

/// Content type of the stream.
pub const CONTENT_TYPE: &str = "application/x-pagoda-events";
/// Chunks of one record at most.
pub const MAX_CHUNKS: usize = 32_768;

const WIRE: WireVersion = WireVersion { version: 1, readable_by: 1 };
const MAX_RECORD: usize = 1 << 20;
const HELD: usize = 13;

/// A chunk of a prompt chain whose tokens a worker holds, with all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldChunk {
    /// Of the chain.
    pub hash: u64,
    /// Tokens of the prompt up to its end.
    pub num_tokens: u32,
    /// Where: 0 the device, 1 host memory, 2 disk, 3 a shared tier.
    pub tier: u8,
}

/// One record.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerEvent {
    /// The first: who it is, and the number of the last change that the snapshot holds.
    Hello {
        /// Another at each start of the worker.
        epoch: u64,
        /// Changes so far.
        sequence: u64,
        /// The worker.
        report: Box<WorkerReport>,
    },
    /// A part of what is held.
    Snapshot(Vec<HeldChunk>),
    /// All that is held has been told.
    SnapshotEnd,
    /// What is held no longer, then what is now.
    Change {
        /// Its number.
        sequence: u64,
        /// By hash.
        removed: Vec<u64>,
        /// Anew, or elsewhere.
        stored: Vec<HeldChunk>,
    },
    /// How the worker is, when that has changed and once a second.
    Report(Box<WorkerReport>),
}

/// A record that cannot be read. Nothing after it can be.
#[derive(Debug, thiserror::Error)]
pub enum EventError {
    /// Longer than any.
    #[error("an event of {len} bytes: at most {MAX_RECORD} are read")]
    TooLong {
        /// What it says.
        len: usize,
    },
    /// Its body is not what its kind has.
    #[error("an event of kind {kind} has a body of {len} bytes, which is not whole")]
    Torn {
        /// Its kind.
        kind: u8,
        /// Its length.
        len: usize,
    },
    /// Of a release that is too new.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// The report in it is none.
    #[error(transparent)]
    Report(#[from] ReportError),
}

impl WorkerEvent {
    /// Appends the record.
    pub fn encode(&self, out: &mut BytesMut) {
        let start = out.len();
        out.put_u32_le(0);
        match self {
            Self::Hello { epoch, sequence, report } => {
                out.put_u8(0);
                out.put_u16_le(WIRE.version as u16);
                out.put_u16_le(WIRE.readable_by as u16);
                out.put_u64_le(*epoch);
                out.put_u64_le(*sequence);
                put_report(out, report);
            }
            Self::Snapshot(chunks) => {
                out.put_u8(1);
                chunks.iter().for_each(|chunk| put_held(out, chunk));
            }
            Self::SnapshotEnd => out.put_u8(2),
            Self::Change { sequence, removed, stored } => {
                out.put_u8(3);
                out.put_u64_le(*sequence);
                out.put_u32_le(removed.len() as u32);
                removed.iter().for_each(|&hash| out.put_u64_le(hash));
                stored.iter().for_each(|chunk| put_held(out, chunk));
            }
            Self::Report(report) => {
                out.put_u8(4);
                put_report(out, report);
            }
        }
        let len = (out.len() - start - 4) as u32;
        out[start..start + 4].copy_from_slice(&len.to_le_bytes());
    }

    fn decode(kind: u8, mut body: Bytes) -> Result<Option<Self>, EventError> {
        let torn = EventError::Torn { kind, len: body.len() };
        Ok(Some(match kind {
            0 => {
                if body.len() < 20 {
                    return Err(torn);
                }
                let (version, readable_by) = (body.get_u16_le().into(), body.get_u16_le().into());
                WireVersion { version, readable_by }.check("the worker's event stream", WIRE.version)?;
                let (epoch, sequence) = (body.get_u64_le(), body.get_u64_le());
                Self::Hello { epoch, sequence, report: Box::new(WorkerReport::parse(&body)?) }
            }
            1 => Self::Snapshot(held(body).ok_or(torn)?),
            2 => Self::SnapshotEnd,
            3 => {
                if body.len() < 12 {
                    return Err(torn);
                }
                let (sequence, num_removed) = (body.get_u64_le(), body.get_u32_le() as usize);
                if body.len() / 8 < num_removed {
                    return Err(torn);
                }
                let removed = (0..num_removed).map(|_| body.get_u64_le()).collect();
                Self::Change { sequence, removed, stored: held(body).ok_or(torn)? }
            }
            4 => Self::Report(Box::new(WorkerReport::parse(&body)?)),
            _ => return Ok(None),
        }))
    }
}

fn put_report(out: &mut BytesMut, report: &WorkerReport) {
    // A report is numbers and texts: it always has a JSON.
    out.put_slice(&serde_json::to_vec(report).unwrap_or_default());
}

fn put_held(out: &mut BytesMut, chunk: &HeldChunk) {
    out.put_u64_le(chunk.hash);
    out.put_u32_le(chunk.num_tokens);
    out.put_u8(chunk.tier);
}

fn held(mut body: Bytes) -> Option<Vec<HeldChunk>> {
    let count = body.len() / HELD;
    let whole = count * HELD == body.len();
    let mut one = || HeldChunk { hash: body.get_u64_le(), num_tokens: body.get_u32_le(), tier: body.get_u8() };
    whole.then(|| (0..count).map(|_| one()).collect())
}

/// Takes a stream apart as it arrives.
#[derive(Debug, Default)]
pub struct EventDecoder(BytesMut);

impl EventDecoder {
    /// Adds what arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The next record of a known kind; `None` until it is whole.
    ///
    /// # Errors
    /// When what is there is none.
    pub fn next_event(&mut self) -> Result<Option<WorkerEvent>, EventError> {
        loop {
            let Some(prefix) = self.0.first_chunk::<4>() else { return Ok(None) };
            let len = u32::from_le_bytes(*prefix) as usize;
            if len > MAX_RECORD {
                return Err(EventError::TooLong { len });
            }
            if self.0.len() < 4 + len {
                return Ok(None);
            }
            self.0.advance(4);
            let mut record = self.0.split_to(len).freeze();
            if record.is_empty() {
                continue;
            }
            let kind = record.get_u8();
            if let Some(event) = WorkerEvent::decode(kind, record)? {
                return Ok(Some(event));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> Vec<WorkerEvent> {
        let report = Box::new(
            WorkerReport::parse(br#"{"version":1,"readable_by":1,"models":["m"],"epoch":7,"ready":true}"#).unwrap(),
        );
        let held = |hash: u64| HeldChunk { hash, num_tokens: hash as u32 * 16, tier: 1 };
        vec![
            WorkerEvent::Hello { epoch: 7, sequence: 41, report: report.clone() },
            WorkerEvent::Snapshot((0..1000).map(held).collect()),
            WorkerEvent::SnapshotEnd,
            WorkerEvent::Change { sequence: 42, removed: vec![1, 2], stored: vec![held(9)] },
            WorkerEvent::Report(report),
        ]
    }

    #[test]
    fn what_is_written_is_read_in_pieces_of_any_size() {
        let mut bytes = BytesMut::new();
        events().iter().for_each(|event| event.encode(&mut bytes));
        for piece in [1, 7, 1000, bytes.len()] {
            let (mut decoder, mut read) = (EventDecoder::default(), Vec::new());
            for part in bytes.chunks(piece) {
                decoder.push(part);
                while let Some(event) = decoder.next_event().unwrap() {
                    read.push(event);
                }
            }
            assert_eq!(read, events(), "{piece}");
        }
    }

    #[test]
    fn golden_bytes() {
        let mut bytes = BytesMut::new();
        let stored = vec![HeldChunk { hash: 0x0102_0304_0506_0708, num_tokens: 48, tier: 2 }];
        WorkerEvent::Change { sequence: 5, removed: vec![9], stored }.encode(&mut bytes);
        let expected = "22000000\
            03\
            0500000000000000\
            01000000\
            0900000000000000\
            08070605040302013000000002";
        assert_eq!(bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>(), expected);
    }

    #[test]
    fn unknown_kinds_are_passed_over_and_garbage_is_an_error() {
        let mut decoder = EventDecoder::default();
        decoder.push(&[3, 0, 0, 0, 99, 1, 2, 0, 0, 0, 0, 1, 0, 0, 0, 2]);
        assert_eq!(decoder.next_event().unwrap(), Some(WorkerEvent::SnapshotEnd));
        for garbage in [&b"HTTP/1.1"[..], &[2, 0, 0, 0, 1, 7], &[13, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0]] {
            let mut decoder = EventDecoder::default();
            decoder.push(garbage);
            assert!(decoder.next_event().is_err(), "{garbage:?}");
        }
        let mut newer = BytesMut::new();
        events()[0].encode(&mut newer);
        newer[7..9].copy_from_slice(&9u16.to_le_bytes());
        let mut decoder = EventDecoder::default();
        decoder.push(&newer);
        let error = decoder.next_event().unwrap_err().to_string();
        assert!(error.contains("version 1") && error.contains("from version 9"), "{error}");
    }
}
