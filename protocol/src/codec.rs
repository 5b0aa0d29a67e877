//! How a KV payload is packed: losslessly, or not at all.
//!
//! Called when a frame leaves for a slow place and when an engine opens one. Keys and values look like noise to a match
//! finder (LZ4 leaves 1.004 of 41 blocks of SmolLM2, planes or not), but the upper bytes of f16 numbers cluster: the payload is split into a plane of
//! lower and one of upper bytes before Zstandard sees it.

use bytes::Bytes;

/// Zstandard's fastest level: the gain is in the entropy coder, which all levels share.
const LEVEL: i32 = 1;

/// A packing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codec {
    /// As it is.
    Raw,
    /// Byte planes through Zstandard.
    Zstd,
}

/// A payload that cannot be unpacked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// Of a later release.
    #[error("KV payloads of codec {0} are unknown to this release: upgrade it")]
    Unknown(u8),
    /// Damaged, or not as long as was said.
    #[error("a KV payload of {len} bytes does not unpack to {raw_len}: {reason}")]
    Damaged {
        /// Packed bytes.
        len: usize,
        /// What they should become.
        raw_len: usize,
        /// The library's words.
        reason: String,
    },
}

impl Codec {
    /// Its number in a frame.
    pub fn id(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Zstd => 1,
        }
    }

    /// The codec of a number.
    ///
    /// # Errors
    /// When there is none.
    pub fn from_id(id: u8) -> Result<Self, CodecError> {
        match id {
            0 => Ok(Self::Raw),
            1 => Ok(Self::Zstd),
            _ => Err(CodecError::Unknown(id)),
        }
    }

    /// The packed payload; `None` where it cannot be packed.
    pub fn pack(self, raw: &Bytes) -> Option<Bytes> {
        match self {
            Self::Raw => Some(raw.clone()),
            Self::Zstd => zstd::bulk::compress(&into_planes(raw), LEVEL).ok().map(Bytes::from),
        }
    }

    /// The payload of `raw_len` bytes, a number that the caller trusts: no more is allocated.
    ///
    /// # Errors
    /// When the packed bytes are damaged or of another length.
    pub fn unpack(self, packed: &Bytes, raw_len: usize) -> Result<Bytes, CodecError> {
        let damaged = |reason: String| CodecError::Damaged { len: packed.len(), raw_len, reason };
        let raw = match self {
            Self::Raw => packed.clone(),
            Self::Zstd => {
                let planes = zstd::bulk::decompress(packed, raw_len).map_err(|error| damaged(error.to_string()))?;
                from_planes(&planes)
            }
        };
        if raw.len() == raw_len { Ok(raw) } else { Err(damaged(format!("there are {}", raw.len()))) }
    }
}

/// All lower bytes, then all upper bytes, then an odd last byte.
fn into_planes(raw: &[u8]) -> Vec<u8> {
    let pairs = raw.chunks_exact(2);
    let rest = pairs.remainder();
    let lower = pairs.clone().map(|pair| pair[0]);
    lower.chain(pairs.map(|pair| pair[1])).chain(rest.iter().copied()).collect()
}

fn from_planes(planes: &[u8]) -> Bytes {
    let (lower, upper) = planes.split_at(planes.len() / 2);
    let mut raw: Vec<u8> = lower.iter().zip(upper).flat_map(|(&lower, &upper)| [lower, upper]).collect();
    raw.extend(&upper[lower.len()..]);
    Bytes::from(raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_is_lossless_and_clustered_values_get_smaller() {
        let values: Vec<u8> = (0..20_000u32)
            .flat_map(|i| [(i.wrapping_mul(2_654_435_761) >> 24) as u8, 0x3c + (i % 5) as u8])
            .chain([9])
            .collect();
        for len in [0, 1, 2, 3, values.len() - 1, values.len()] {
            let raw = Bytes::copy_from_slice(&values[..len]);
            let packed = Codec::Zstd.pack(&raw).unwrap();
            assert_eq!(Codec::Zstd.unpack(&packed, len).unwrap(), raw);
        }
        let raw = Bytes::from(values);
        let packed = Codec::Zstd.pack(&raw).unwrap();
        assert!(packed.len() < raw.len() * 7 / 10, "{} of {}", packed.len(), raw.len());
        let short = Codec::Zstd.unpack(&packed, raw.len() - 1);
        assert!(matches!(short, Err(CodecError::Damaged { .. })), "no more is allocated than was trusted");
        assert!(Codec::Zstd.unpack(&packed.slice(..packed.len() / 2), raw.len()).is_err());
        assert!(Codec::Zstd.unpack(&packed, raw.len() + 1).is_err() && Codec::from_id(2).is_err());
    }
}
