//! A KV block outside a device's pool: the one form that it has in memory, in a file and on the wire.
//!
//! Made by the engine when a block leaves the pool, kept by every tier, checked by the engine that takes it up. A frame is
//! a header and a payload. The header holds the block's whole identity and ends with its own checksum, so that it can be
//! read alone; with the payload's checksum inside it, the two cannot be paired wrongly. Invariant: nothing in a frame is
//! believed before it was compared, and no length in it is followed before it was bounded.
//!
//! Layout, all numbers little-endian: `PGKV`, version u16, readable_by u16, header length u16, tokens u16, codec u8, 3 × 0,
//! numerics \[16\], model \[32\], block \[32\], parent \[32\], raw length u32, payload length u32, XXH3-64 of the payload u64, token
//! ids u32 each, what later versions add, XXH3-64 of all before u64; then the payload.

use bytes::{BufMut, Bytes, BytesMut};
use twox_hash::XxHash3_64;

use crate::codec::{Codec, CodecError};
use crate::{BlockHash, BlockKey, ModelFingerprint, VersionError, WireVersion};

const MAGIC: [u8; 4] = *b"PGKV";
/// Ours.
const WIRE: WireVersion = WireVersion { version: 1, readable_by: 1 };
/// Up to the token ids.
const FIXED: usize = 144;
/// The header's checksum.
const SUM: usize = 8;
/// Longest header that is read: block sizes up to 256 tokens, and what later versions add.
pub const MAX_HEADER: usize = 2048;
/// Most tokens a block.
pub const MAX_TOKENS: usize = 256;
/// Largest payload that is read: eight times the block of a 7B model without shared heads.
pub const MAX_PAYLOAD: usize = 64 << 20;

/// What made a block: blocks of one class hold the same bits for the same tokens. Up to 16 ASCII letters, as
/// `wgpu-int8-1f2e3d`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NumericsClass([u8; 16]);

impl NumericsClass {
    /// The class of this name.
    ///
    /// # Panics
    /// On a name of more than 16 bytes, which would be another's.
    pub fn new(name: &str) -> Self {
        let mut bytes = [0; 16];
        assert!(name.len() <= bytes.len(), "{name}: a class of numerics has up to 16 bytes");
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        Self(bytes)
    }
}

impl std::fmt::Display for NumericsClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = self.0.iter().position(|&byte| byte == 0).unwrap_or(16);
        self.0[..end].escape_ascii().fmt(f)
    }
}

impl std::fmt::Debug for NumericsClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NumericsClass({self})")
    }
}

/// Which block it is, in full: the name, and what it is the name of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockIdentity {
    /// Model and name.
    pub key: BlockKey,
    /// The name of the block before it, or its chain's root.
    pub parent: BlockHash,
    /// Its tokens.
    pub token_ids: Box<[u32]>,
}

impl BlockIdentity {
    /// Whether the name is that of parent and tokens.
    pub fn is_consistent(&self) -> bool {
        self.parent.child(&self.token_ids) == self.key.block
    }
}

/// Why bytes are not the block that was wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The first bytes are not a frame's.
    #[error("no KV frame: it starts with {0:02x?}")]
    NotAFrame([u8; 4]),
    /// Written by a release that this one cannot read.
    #[error(transparent)]
    Version(#[from] VersionError),
    /// Fewer bytes than a frame has.
    #[error("a KV frame of {needed} bytes is cut short after {len}")]
    Short {
        /// What there is.
        len: usize,
        /// What there should be.
        needed: usize,
    },
    /// A length is over its bound or contradicts another.
    #[error("a KV frame's {what} of {value} is out of bounds (up to {most})")]
    OutOfBounds {
        /// Which.
        what: &'static str,
        /// What it says.
        value: usize,
        /// Its bound.
        most: usize,
    },
    /// A checksum does not match.
    #[error("the {0} of a KV frame is damaged: its checksum differs")]
    Damaged(&'static str),
    /// It is another block.
    #[error("a KV frame's {0} is not the one that was asked for")]
    Foreign(&'static str),
    /// The payload cannot be decoded.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// Everything of a frame but its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Which block.
    pub identity: BlockIdentity,
    /// What made it.
    pub numerics: NumericsClass,
    /// How the payload is packed.
    pub codec: Codec,
    /// Bytes once unpacked.
    pub raw_len: usize,
    /// Bytes as they follow.
    pub payload_len: usize,
    /// XXH3-64 of them.
    pub payload_sum: u64,
}

impl FrameHeader {
    /// Bytes of this header.
    pub fn encoded_len(&self) -> usize {
        header_len(self.identity.token_ids.len())
    }

    /// Bytes of the whole frame.
    pub fn frame_len(&self) -> usize {
        self.encoded_len() + self.payload_len
    }

    /// Whether a payload is the one that the header is of.
    ///
    /// # Errors
    /// When its length or checksum differs from what the header says.
    pub fn check(&self, payload: &[u8]) -> Result<(), FrameError> {
        if payload.len() != self.payload_len {
            return Err(FrameError::Short { len: payload.len(), needed: self.payload_len });
        }
        if XxHash3_64::oneshot(payload) != self.payload_sum { Err(FrameError::Damaged("payload")) } else { Ok(()) }
    }

    /// The header's bytes.
    pub fn encode(&self) -> Bytes {
        let BlockIdentity { key, parent, token_ids } = &self.identity;
        let mut out = BytesMut::with_capacity(self.encoded_len());
        out.put_slice(&MAGIC);
        out.put_u16_le(WIRE.version as u16);
        out.put_u16_le(WIRE.readable_by as u16);
        out.put_u16_le(self.encoded_len() as u16);
        out.put_u16_le(token_ids.len() as u16);
        out.put_u8(self.codec.id());
        out.put_bytes(0, 3);
        out.put_slice(&self.numerics.0);
        for part in [key.model.as_bytes(), key.block.as_bytes(), parent.as_bytes()] {
            out.put_slice(part);
        }
        out.put_u32_le(self.raw_len as u32);
        out.put_u32_le(self.payload_len as u32);
        out.put_u64_le(self.payload_sum);
        token_ids.iter().for_each(|&id| out.put_u32_le(id));
        out.put_u64_le(XxHash3_64::oneshot(&out));
        out.freeze()
    }

    /// Reads the header at the start of `bytes`, and how long it is: longer than ours where a later version wrote it.
    ///
    /// # Errors
    /// When it is no header, cut short, of another version or damaged. [`FrameError::Short`] tells how many bytes are needed.
    pub fn parse(bytes: &[u8]) -> Result<(Self, usize), FrameError> {
        let len = Self::peek_len(bytes)?;
        let Some(bytes) = bytes.get(..len) else { return Err(FrameError::Short { len: bytes.len(), needed: len }) };
        let (covered, sum) = bytes.split_at(len - SUM);
        if u64::from_le_bytes(array(sum, 0)) != XxHash3_64::oneshot(covered) {
            return Err(FrameError::Damaged("header"));
        }
        let num_tokens = usize::from(u16::from_le_bytes(array(bytes, 10)));
        bounded("number of tokens", num_tokens, MAX_TOKENS.min((len - FIXED - SUM) / 4))?;
        let number = |at| u32::from_le_bytes(array(bytes, at)) as usize;
        let (raw_len, payload_len) = (number(128), number(132));
        bounded("unpacked length", raw_len, MAX_PAYLOAD)?;
        bounded("payload length", payload_len, MAX_PAYLOAD)?;
        let token_ids = bytes[FIXED..FIXED + 4 * num_tokens].chunks_exact(4).map(|id| u32::from_le_bytes(array(id, 0)));
        let key = BlockKey {
            model: ModelFingerprint::from_bytes(array(bytes, 32)),
            block: BlockHash::from_bytes(array(bytes, 64)),
        };
        let parent = BlockHash::from_bytes(array(bytes, 96));
        let header = Self {
            identity: BlockIdentity { key, parent, token_ids: token_ids.collect() },
            numerics: NumericsClass(array(bytes, 16)),
            codec: Codec::from_id(bytes[12])?,
            raw_len,
            payload_len,
            payload_sum: u64::from_le_bytes(array(bytes, 136)),
        };
        Ok((header, len))
    }

    /// The length of the header at the start of `bytes`, of which there are at least 12.
    ///
    /// # Errors
    /// When no header of ours starts there.
    pub fn peek_len(bytes: &[u8]) -> Result<usize, FrameError> {
        if bytes.len() < 12 {
            return Err(FrameError::Short { len: bytes.len(), needed: FIXED + SUM });
        }
        if bytes[..4] != MAGIC {
            return Err(FrameError::NotAFrame(array(bytes, 0)));
        }
        let number = |at| u16::from_le_bytes(array(bytes, at));
        let wire = WireVersion { version: u32::from(number(4)), readable_by: u32::from(number(6)) };
        wire.check("a KV frame", WIRE.version)?;
        let len = usize::from(number(8));
        if !(FIXED + SUM..=MAX_HEADER).contains(&len) {
            return Err(FrameError::OutOfBounds { what: "header length", value: len, most: MAX_HEADER });
        }
        Ok(len)
    }
}

/// Bytes of a header of ours.
pub const fn header_len(num_tokens: usize) -> usize {
    FIXED + 4 * num_tokens + SUM
}

fn bounded(what: &'static str, value: usize, most: usize) -> Result<(), FrameError> {
    if value <= most { Ok(()) } else { Err(FrameError::OutOfBounds { what, value, most }) }
}

/// `N` bytes from `at`, which the caller has bounded.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// A block as it travels. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvFrame {
    /// What it is.
    pub header: FrameHeader,
    /// Its bytes, packed.
    pub payload: Bytes,
}

impl KvFrame {
    /// A block with its canonical payload.
    pub fn new(identity: BlockIdentity, numerics: NumericsClass, raw: Bytes) -> Self {
        let (raw_len, payload_sum) = (raw.len(), XxHash3_64::oneshot(&raw));
        let header = FrameHeader { identity, numerics, codec: Codec::Raw, raw_len, payload_len: raw_len, payload_sum };
        Self { header, payload: raw }
    }

    /// The same block packed, where that makes it smaller.
    pub fn packed(&self, codec: Codec) -> Self {
        if self.header.codec != Codec::Raw {
            return self.clone();
        }
        match codec.pack(&self.payload) {
            Some(payload) if payload.len() < self.payload.len() => {
                let (payload_len, payload_sum) = (payload.len(), XxHash3_64::oneshot(&payload));
                let header = FrameHeader { codec, payload_len, payload_sum, ..self.header.clone() };
                Self { header, payload }
            }
            _ => self.clone(),
        }
    }

    /// Bytes of header and payload.
    pub fn encoded_len(&self) -> usize {
        self.header.encoded_len() + self.payload.len()
    }

    /// Whether the payload is whole.
    ///
    /// # Errors
    /// When its length or checksum differs from what the header says.
    pub fn check(&self) -> Result<(), FrameError> {
        self.header.check(&self.payload)
    }

    /// The payload, unpacked, after all was compared with what was wanted: what the engine that takes a block up calls.
    ///
    /// # Errors
    /// When it is another block or damaged.
    pub fn open(&self, wanted: &BlockIdentity, raw_len: usize) -> Result<Bytes, FrameError> {
        let found = &self.header.identity;
        let same = [
            ("model", found.key.model == wanted.key.model),
            ("name", found.key.block == wanted.key.block),
            ("parent", found.parent == wanted.parent),
            ("tokens", found.token_ids == wanted.token_ids),
            ("unpacked length", self.header.raw_len == raw_len),
        ];
        if let Some((what, _)) = same.iter().find(|(_, same)| !same) {
            return Err(FrameError::Foreign(what));
        }
        self.check()?;
        Ok(self.header.codec.unpack(&self.payload, raw_len)?)
    }
}

#[cfg(test)]
mod tests;
