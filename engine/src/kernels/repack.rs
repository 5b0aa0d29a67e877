//! The kernels' storage formats, and how a file's blocks become theirs.
//!
//! Called by the upload of weights. A block holds 32 values of one row: codes in aligned words, and scale words beside them.
//!
//! | format | codes | scale words |
//! |---|---|---|
//! | `f32`, `f16`, `bf16` | the values | none |
//! | `q4` | 16 bytes: byte j has value j in its low half and value j + 16 in its high half | (d, m) as two f16 |
//! | `q5` | as `q4` | (d, m); the fifth bits: bit 8·b + k is value 4·k + b's |
//! | `q8` | 32 signed bytes | d as f16 |
//! | `q4k` | as `q4` | scale and minimum, a byte each |
//! | `q5k` | as `q4` | scale and minimum; the fifth bits |
//! | `q6k` | as `q4`, codes above 32 by their offset | signed scales of the two sixteens, a byte each; the upper two bits of each sixteen: bits 8·b + 2·k are value 4·k + b's |
//!
//! The K formats' scales are in units of (d, dmin), or d, as two f16 that eight blocks share. Everything is exact.

use half::f16;

use crate::model_file::{BLOCK_LEN, IQ4_NL_VALUES, StorageType, five_bits, k_quants, nibbles};

/// A storage format of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the table above")]
pub enum DeviceFormat {
    F32,
    F16,
    Bf16,
    Q4,
    Q5,
    Q8,
    Q4K,
    Q5K,
    Q6K,
}

impl DeviceFormat {
    /// The format that holds a storage type.
    pub fn of(storage: StorageType) -> Self {
        match storage {
            StorageType::F32 => Self::F32,
            StorageType::F16 => Self::F16,
            StorageType::BF16 => Self::Bf16,
            StorageType::Q4_0 | StorageType::Q4_1 => Self::Q4,
            StorageType::Q5_0 | StorageType::Q5_1 => Self::Q5,
            StorageType::Q4_K => Self::Q4K,
            StorageType::Q5_K => Self::Q5K,
            StorageType::Q6_K => Self::Q6K,
            StorageType::Q8_0 | StorageType::IQ4_NL => Self::Q8,
        }
    }

    /// The placeholder's value.
    pub fn word(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q4 => "q4",
            Self::Q5 => "q5",
            Self::Q8 => "q8",
            Self::Q4K => "q4k",
            Self::Q5K => "q5k",
            Self::Q6K => "q6k",
        }
    }

    /// Bytes of a block's codes.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 128,
            Self::F16 | Self::Bf16 => 64,
            Self::Q8 => 32,
            Self::Q4 | Self::Q5 | Self::Q4K | Self::Q5K | Self::Q6K => 16,
        }
    }

    /// Scale words of a block.
    pub fn scale_words(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 0,
            Self::Q4 | Self::Q8 | Self::Q4K => 1,
            Self::Q5 | Self::Q5K => 2,
            Self::Q6K => 3,
        }
    }

    /// Whether eight blocks share a word of units.
    pub fn has_units(self) -> bool {
        matches!(self, Self::Q4K | Self::Q5K | Self::Q6K)
    }

    /// Whether values are integer codes with scales.
    pub fn has_codes(self) -> bool {
        self.scale_words() > 0
    }
}

/// Blocks that share a word of units.
pub(super) const UNIT_BLOCKS: usize = 8;

/// Repacks one row: `store` gets each block of 32 with its number, its codes and its scale words, behind which the word of
/// units comes where the format has those.
pub(super) fn pack(storage: StorageType, row: &[u8], mut store: impl FnMut(usize, &[u8], &[u32])) {
    if storage.is_float() {
        let values = row.chunks_exact(BLOCK_LEN * storage.block_bytes());
        values.enumerate().for_each(|(index, values)| store(index, values, &[]));
        return;
    }
    let (bytes, per_block) = (storage.block_bytes(), storage.block_len() / BLOCK_LEN);
    for (index, block) in row.chunks_exact(bytes).enumerate() {
        pack_block(storage, block, |group, codes, words| store(index * per_block + group, codes, words));
    }
}

fn pack_block(storage: StorageType, block: &[u8], mut store: impl FnMut(usize, &[u8], &[u32])) {
    let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]);
    // A power of two only changes the exponent, so the product is exact in f16 (short of overflow, which stays infinite).
    let times = |d: f16, by: f32| f16::from_f32(d.to_f32() * by);
    match storage {
        StorageType::Q4_0 => store(0, &block[2..], &[pair(half(0), times(half(0), -8.0))]),
        StorageType::Q4_1 => store(0, &block[4..], &[pair(half(0), half(2))]),
        StorageType::Q5_0 | StorageType::Q5_1 => {
            let codes = five_bits(block.last_chunk().unwrap_or(&[0; 20]));
            let m = if storage == StorageType::Q5_0 { times(half(0), -16.0) } else { half(2) };
            store(0, &halves(&codes), &[pair(half(0), m), fifth_bits(&codes)]);
        }
        StorageType::Q8_0 => store(0, &block[2..], &[pair(half(0), f16::ZERO)]),
        StorageType::IQ4_NL => {
            let codes = nibbles(block.last_chunk().unwrap_or(&[0; 16]));
            let values = codes.map(|code| IQ4_NL_VALUES[usize::from(code)] as u8);
            store(0, &values, &[pair(half(0), f16::ZERO)]);
        }
        StorageType::Q4_K => {
            let codes = block.first_chunk().map_or([0; k_quants::SUPER_LEN], k_quants::q4_k_codes);
            for (group, (codes, scales)) in grouped(&codes, block) {
                store(group, &halves(codes), &[bytes(scales), units(block)]);
            }
        }
        StorageType::Q5_K => {
            let codes = block.first_chunk().map_or([0; k_quants::SUPER_LEN], k_quants::q5_k_codes);
            for (group, (codes, scales)) in grouped(&codes, block) {
                store(group, &halves(codes), &[bytes(scales), fifth_bits(codes), units(block)]);
            }
        }
        StorageType::Q6_K => {
            let Some(block) = block.first_chunk() else { return };
            let (codes, scales) = (k_quants::q6_k_codes(block), k_quants::sixteen_scales(block));
            let unit = pair(k_quants::sixteen_unit(block), f16::ZERO);
            let groups = codes.as_chunks::<BLOCK_LEN>().0.iter().zip(scales.as_chunks::<2>().0);
            for (group, (codes, scales)) in groups.enumerate() {
                let [low, high] = upper_pairs(codes);
                store(group, &halves(codes), &[bytes(scales.map(|scale| scale as u8)), low, high, unit]);
            }
        }
        StorageType::F32 | StorageType::F16 | StorageType::BF16 => {}
    }
}

fn pair(low: f16, high: f16) -> u32 {
    u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16
}

fn bytes([low, high]: [u8; 2]) -> u32 {
    u32::from(low) | u32::from(high) << 8
}

/// (d, −dmin).
fn units(block: &[u8]) -> u32 {
    let [d, least] = k_quants::group_units(block);
    pair(d, -least)
}

/// Each group of 32 with its number, and its scale and minimum.
fn grouped<'a>(
    codes: &'a [u8; k_quants::SUPER_LEN],
    block: &[u8],
) -> impl Iterator<Item = (usize, (&'a [u8; BLOCK_LEN], [u8; 2]))> {
    codes.as_chunks::<BLOCK_LEN>().0.iter().zip(k_quants::group_scales(block)).enumerate()
}

/// The lower four bits: value j in byte j's low half, value j + 16 in its high half.
fn halves(codes: &[u8; BLOCK_LEN]) -> [u8; 16] {
    std::array::from_fn(|j| (codes[j] & 15) | (codes[j + 16] & 15) << 4)
}

/// Bit 8·b + k is the fifth of value 4·k + b.
fn fifth_bits(codes: &[u8; BLOCK_LEN]) -> u32 {
    codes.iter().enumerate().fold(0, |bits, (i, code)| bits | u32::from(code >> 4 & 1) << (8 * (i % 4) + i / 4))
}

/// Of each sixteen: bits 8·b + 2·k are the upper two of value 4·k + b.
fn upper_pairs(codes: &[u8; BLOCK_LEN]) -> [u32; 2] {
    [&codes[..16], &codes[16..]].map(|codes| {
        let bits = codes.iter().enumerate();
        bits.fold(0, |bits, (i, code)| bits | u32::from(code >> 4 & 3) << (8 * (i % 4) + 2 * (i / 4)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_above_the_lower_four_lie_where_the_kernels_look() {
        let mut codes = [0u8; BLOCK_LEN];
        codes[0] = 16;
        codes[5] = 16 + 3;
        codes[31] = 31;
        // Values 0, 5 (k 1, b 1) and 31 (k 7, b 3).
        assert_eq!(fifth_bits(&codes), 1 | 1 << 9 | 1 << 31);
        codes[5] = 63;
        assert_eq!(upper_pairs(&codes), [1 | 3 << 10, 1 << 30]);
        assert_eq!(halves(&codes)[5], 15);
        assert_eq!(halves(&codes)[15], 15 << 4);
    }
}
