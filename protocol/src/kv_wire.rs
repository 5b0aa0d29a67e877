//! What `/kv/v1` carries: lists of keys, streams of frames, and the answers to them.
//!
//! Written and read by the cache tier's client and server. Bodies are `application/x-pagoda-kv`; answers without frames are
//! JSON. Invariant: a decoder holds at most one frame beyond what it handed out, and believes no length.

use bytes::buf::Limit;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

use crate::kv_frame::{FrameError, FrameHeader, KvFrame};
use std::sync::Arc;

use crate::{BlockHash, BlockKey, Buffers, ModelFingerprint, VersionError, WireVersion};

/// Content type of the bodies.
pub const CONTENT_TYPE: &str = "application/x-pagoda-kv";
/// What a connection is upgraded to, to ask for blocks: each request is the length of a list of keys, u32, and the list; its
/// answer a record for each key.
pub const STREAM_PROTOCOL: &str = "pagoda-kv";
/// Most keys of one request: a prompt of a million tokens.
pub const MAX_KEYS: usize = 65_536;
/// Bytes of the longest list of keys.
pub const MAX_KEYS_BYTES: usize = KEYS_HEADER + MAX_KEYS * 32;

const WIRE: WireVersion = WireVersion { version: 1, readable_by: 1 };
const KEYS_MAGIC: [u8; 4] = *b"PGKK";
const PUT_MAGIC: [u8; 4] = *b"PGKP";
/// Magic, version, readable_by, count, model.
const KEYS_HEADER: usize = 4 + 2 + 2 + 4 + 32;
/// Magic, version, readable_by, reason, 7 × 0.
const PUT_HEADER: usize = 16;
/// Status, 7 × 0; of a refusal status, 0, length u16, 4 × 0.
const RECORD_HEADER: usize = 8;
/// Longest words of a refusal.
const MAX_REFUSAL: usize = 1000;
/// Heads are read so far at once: a record and a header of a block of 16 tokens, and little of the payload.
const HEAD_READ: usize = 512;

/// Why a block is put down. It decides how much a tier does for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PutReason {
    /// The pool needed its place.
    Evict,
    /// It was used a second time.
    WriteThrough,
    /// The engine goes away.
    Drain,
    /// Its sequence lost its place, and will be back.
    Preempt,
    /// Another engine goes on with it.
    Handoff,
}

impl PutReason {
    /// All of them, by their number on the wire.
    pub const ALL: [Self; 5] = [Self::Evict, Self::WriteThrough, Self::Drain, Self::Preempt, Self::Handoff];

    /// As in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Evict => "evict",
            Self::WriteThrough => "write-through",
            Self::Drain => "drain",
            Self::Preempt => "preempt",
            Self::Handoff => "handoff",
        }
    }
}

/// What became of a put, the best last: a block that was offered to several places had the best of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PutOutcome {
    /// It is no block, or cannot be stored here.
    Refused,
    /// No room or no time now.
    Busy,
    /// It was seen for the first time, which is remembered.
    NotAdmitted,
    /// It was there.
    Present,
    /// It is there. In a place that outlives its process (a disk), it survives the end of that.
    Stored,
}

impl PutOutcome {
    /// As in metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Present => "present",
            Self::NotAdmitted => "not-admitted",
            Self::Busy => "busy",
            Self::Refused => "refused",
        }
    }
}

/// How far a list of keys is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    /// Leading keys that are held.
    pub num_blocks: usize,
    /// Whether the answer could be longer at another time.
    #[serde(default)]
    pub busy: bool,
}

/// The answer to a put, frame by frame.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutAnswer {
    /// In the order of the frames.
    pub outcomes: Vec<PutOutcome>,
}

/// The answer to a lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseAnswer {
    /// Keys that are held and will be for the time that was asked for.
    pub leased: usize,
}

/// A body that is not what it should be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// It starts with something else.
    #[error("this is no {0}")]
    NotA(&'static str),
    /// Of another release.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// More keys than are taken.
    #[error("{0} keys: at most {MAX_KEYS} are taken at once")]
    TooManyKeys(usize),
    /// Its length is not what it says.
    #[error("a body of {len} bytes should have {needed}")]
    Length {
        /// What there is.
        len: usize,
        /// What there should be.
        needed: usize,
    },
    /// A byte that says nothing.
    #[error("{what} {value} is unknown")]
    Unknown {
        /// Of what.
        what: &'static str,
        /// The byte.
        value: u8,
    },
    /// The other side does not answer what was asked.
    #[error("refused: {0}")]
    Refused(String),
    /// A frame in it is wrong.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

fn put_version(out: &mut BytesMut, magic: [u8; 4]) {
    out.put_slice(&magic);
    out.put_u16_le(WIRE.version as u16);
    out.put_u16_le(WIRE.readable_by as u16);
}

fn check_version(bytes: &[u8], magic: [u8; 4], what: &'static str) -> Result<(), WireError> {
    if bytes[..4] != magic {
        return Err(WireError::NotA(what));
    }
    let number = |at: usize| u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]));
    Ok(WireVersion { version: number(4), readable_by: number(6) }.check(what, WIRE.version)?)
}

/// The body that asks for these blocks of one model.
pub fn encode_keys(model: &ModelFingerprint, blocks: &[BlockHash]) -> Bytes {
    let mut out = BytesMut::with_capacity(KEYS_HEADER + blocks.len() * 32);
    put_version(&mut out, KEYS_MAGIC);
    out.put_u32_le(blocks.len() as u32);
    out.put_slice(model.as_bytes());
    blocks.iter().for_each(|block| out.put_slice(block.as_bytes()));
    out.freeze()
}

/// The keys that a body asks for.
///
/// # Errors
/// When it is no list of keys.
pub fn decode_keys(bytes: &[u8]) -> Result<Vec<BlockKey>, WireError> {
    let Some((header, hashes)) = bytes.split_at_checked(KEYS_HEADER) else {
        return Err(WireError::Length { len: bytes.len(), needed: KEYS_HEADER });
    };
    check_version(header, KEYS_MAGIC, "list of KV keys")?;
    let count = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
    if count > MAX_KEYS {
        return Err(WireError::TooManyKeys(count));
    }
    if hashes.len() != count * 32 {
        return Err(WireError::Length { len: bytes.len(), needed: KEYS_HEADER + count * 32 });
    }
    let mut model = [0; 32];
    model.copy_from_slice(&header[12..]);
    let model = ModelFingerprint::from_bytes(model);
    let key = |hash: &[u8]| {
        let mut block = [0; 32];
        block.copy_from_slice(hash);
        BlockKey { model, block: BlockHash::from_bytes(block) }
    };
    Ok(hashes.chunks_exact(32).map(key).collect())
}

/// What a put begins with; frames follow to the end of the body.
pub fn encode_put_header(reason: PutReason) -> Bytes {
    let mut out = BytesMut::with_capacity(PUT_HEADER);
    put_version(&mut out, PUT_MAGIC);
    let id = PutReason::ALL.iter().position(|&known| known == reason).unwrap_or(0);
    out.put_u8(id as u8);
    out.put_bytes(0, 7);
    out.freeze()
}

/// One key's answer to a get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup<T> {
    /// It is held.
    Hit(T),
    /// It is not.
    Miss,
    /// It may be: ask again, or do without.
    Busy,
}

impl<T> Lookup<T> {
    /// What was found.
    pub fn hit(self) -> Option<T> {
        match self {
            Self::Hit(value) => Some(value),
            Self::Miss | Self::Busy => None,
        }
    }
}

/// What goes before a frame, or in place of one, in the answer to a get.
pub fn encode_record<T>(lookup: &Lookup<T>) -> Bytes {
    const RECORDS: [[u8; RECORD_HEADER]; 3] = [[0; RECORD_HEADER], [1, 0, 0, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0, 0, 0]];
    let record = match lookup {
        Lookup::Hit(_) => &RECORDS[0],
        Lookup::Miss => &RECORDS[1],
        Lookup::Busy => &RECORDS[2],
    };
    Bytes::from_static(record)
}

/// What is sent in place of a first record: nothing is answered, and why.
pub fn encode_refusal(message: &str) -> Bytes {
    let end = message.floor_char_boundary(MAX_REFUSAL);
    let mut out = BytesMut::with_capacity(RECORD_HEADER + end);
    out.put_slice(&[3, 0]);
    out.put_u16_le(end as u16);
    out.put_bytes(0, 4);
    out.put_slice(&message.as_bytes()[..end]);
    out.freeze()
}

/// Takes a body apart as it arrives.
#[derive(Debug, Default)]
pub struct Decoder {
    /// What has arrived and is no part of the payload under way.
    bytes: BytesMut,
    in_record: bool,
    /// A frame whose payload is arriving: copied into a buffer of its own, since a slice of what the network reads into would
    /// keep all of that alive.
    frame: Option<(FrameHeader, Vec<u8>)>,
    buffers: Arc<Buffers>,
}

impl Decoder {
    /// A decoder whose payloads lie in these buffers.
    pub fn new(buffers: Arc<Buffers>) -> Self {
        Self { buffers, ..Self::default() }
    }

    /// Adds what arrived. Every whole frame must have been taken before.
    pub fn push(&mut self, mut chunk: &[u8]) {
        if let Some((header, payload)) = &mut self.frame {
            let missing = header.payload_len - payload.len();
            let (part, rest) = chunk.split_at(missing.min(chunk.len()));
            payload.extend_from_slice(part);
            chunk = rest;
        }
        self.bytes.extend_from_slice(chunk);
    }

    /// Where the next bytes belong, for a reader that can put them there: those of a payload into its buffer, at most to its
    /// end. In place of `push`, under the same condition.
    pub fn room(&mut self) -> Limit<&mut (dyn BufMut + Send)> {
        match &mut self.frame {
            Some((header, payload)) => {
                let missing = header.payload_len - payload.len();
                (payload as &mut (dyn BufMut + Send)).limit(missing)
            }
            None => {
                self.bytes.reserve(HEAD_READ);
                (&mut self.bytes as &mut (dyn BufMut + Send)).limit(HEAD_READ)
            }
        }
    }

    /// Whether nothing is left over.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty() && !self.in_record && self.frame.is_none()
    }

    /// The reason at the start of a put; `None` until it is there.
    ///
    /// # Errors
    /// When this is no put.
    pub fn put_header(&mut self) -> Result<Option<PutReason>, WireError> {
        if self.bytes.len() < PUT_HEADER {
            return Ok(None);
        }
        check_version(&self.bytes, PUT_MAGIC, "put of KV frames")?;
        let value = self.bytes[8];
        let reason = PutReason::ALL.get(usize::from(value)).copied();
        self.bytes.advance(PUT_HEADER);
        reason.map(Some).ok_or(WireError::Unknown { what: "the reason", value })
    }

    /// The next frame; `None` until it is whole.
    ///
    /// # Errors
    /// When what is there is no frame. Nothing after it can be read.
    pub fn frame(&mut self) -> Result<Option<KvFrame>, WireError> {
        if self.frame.is_none() && !self.begin_frame()? {
            return Ok(None);
        }
        let is_whole = |(header, payload): &mut (FrameHeader, Vec<u8>)| payload.len() == header.payload_len;
        let whole = self.frame.take_if(is_whole);
        Ok(whole.map(|(header, payload)| KvFrame { header, payload: self.buffers.freeze(payload) }))
    }

    /// Reads the next frame's header, and as much of its payload as is there; false until the header is whole.
    fn begin_frame(&mut self) -> Result<bool, WireError> {
        let (header, len) = match FrameHeader::parse(&self.bytes) {
            Ok(parsed) => parsed,
            Err(FrameError::Short { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        self.bytes.advance(len);
        let mut payload = self.buffers.take(header.payload_len);
        payload.extend_from_slice(&self.bytes.split_to(header.payload_len.min(self.bytes.len())));
        self.frame = Some((header, payload));
        Ok(true)
    }

    /// The words of a refusal; `None` until they are whole.
    fn refusal<T>(&self) -> Result<Option<T>, WireError> {
        let len = usize::from(u16::from_le_bytes([self.bytes[2], self.bytes[3]]));
        if len > MAX_REFUSAL {
            return Err(WireError::Length { len, needed: MAX_REFUSAL });
        }
        let words = self.bytes.get(RECORD_HEADER..RECORD_HEADER + len);
        words.map_or(Ok(None), |words| Err(WireError::Refused(String::from_utf8_lossy(words).into_owned())))
    }

    /// The next key's answer; `None` until it is whole.
    ///
    /// # Errors
    /// When what is there is none.
    pub fn record(&mut self) -> Result<Option<Lookup<KvFrame>>, WireError> {
        if !self.in_record {
            if self.bytes.len() < RECORD_HEADER {
                return Ok(None);
            }
            let value = self.bytes[0];
            if value == 3 {
                return self.refusal();
            }
            self.bytes.advance(RECORD_HEADER);
            match value {
                0 => self.in_record = true,
                1 => return Ok(Some(Lookup::Miss)),
                2 => return Ok(Some(Lookup::Busy)),
                _ => return Err(WireError::Unknown { what: "the status", value }),
            }
        }
        let frame = self.frame()?;
        self.in_record = frame.is_none();
        Ok(frame.map(Lookup::Hit))
    }
}

#[cfg(test)]
mod tests;
