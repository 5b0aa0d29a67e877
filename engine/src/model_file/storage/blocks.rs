//! Blocks of 32 values: their codes, and the values that those are with the block's scales.
//!
//! Called by [`super::dequantize_row`] and by the device's repacking. A trait's methods and not closures: those would not be
//! inlined into what `pulp` compiles for the vector unit.

use super::{BLOCK_LEN, IQ4_NL_VALUES};

/// Values of a block.
pub(super) type Out = [f32; BLOCK_LEN];

/// A type whose blocks have `BYTES` bytes, of which `SCALES` f16 numbers come first.
pub(super) trait Unpack<const BYTES: usize, const SCALES: usize> {
    /// The block's values.
    fn unpack(block: &[u8; BYTES], out: &mut Out, scales: [f32; SCALES]);
}

/// Q4_0
pub(super) struct Q40;

impl Unpack<18, 1> for Q40 {
    #[inline(always)]
    fn unpack(block: &[u8; 18], out: &mut Out, [d]: [f32; 1]) {
        affine(&nibbles(block.last_chunk().unwrap_or(&[0; 16])), d, -8.0 * d, out);
    }
}

/// Q4_1
pub(super) struct Q41;

impl Unpack<20, 2> for Q41 {
    #[inline(always)]
    fn unpack(block: &[u8; 20], out: &mut Out, [d, m]: [f32; 2]) {
        affine(&nibbles(block.last_chunk().unwrap_or(&[0; 16])), d, m, out);
    }
}

/// Q5_0
pub(super) struct Q50;

impl Unpack<22, 1> for Q50 {
    #[inline(always)]
    fn unpack(block: &[u8; 22], out: &mut Out, [d]: [f32; 1]) {
        affine(&five_bits(block.last_chunk().unwrap_or(&[0; 20])), d, -16.0 * d, out);
    }
}

/// Q5_1
pub(super) struct Q51;

impl Unpack<24, 2> for Q51 {
    #[inline(always)]
    fn unpack(block: &[u8; 24], out: &mut Out, [d, m]: [f32; 2]) {
        affine(&five_bits(block.last_chunk().unwrap_or(&[0; 20])), d, m, out);
    }
}

/// Q8_0
pub(super) struct Q80;

impl Unpack<34, 1> for Q80 {
    #[inline(always)]
    fn unpack(block: &[u8; 34], out: &mut Out, [d]: [f32; 1]) {
        let codes: &[u8; BLOCK_LEN] = block.last_chunk().unwrap_or(&[0; BLOCK_LEN]);
        for i in 0..BLOCK_LEN {
            out[i] = f32::from(codes[i] as i8) * d;
        }
    }
}

/// IQ4_NL
pub(super) struct IQ4NL;

impl Unpack<18, 1> for IQ4NL {
    #[inline(always)]
    fn unpack(block: &[u8; 18], out: &mut Out, [d]: [f32; 1]) {
        let codes = nibbles(block.last_chunk().unwrap_or(&[0; 16]));
        for i in 0..BLOCK_LEN {
            out[i] = f32::from(IQ4_NL_VALUES[usize::from(codes[i])]) * d;
        }
    }
}

/// scale · code + minimum.
#[inline(always)]
pub(super) fn affine(codes: &[u8; BLOCK_LEN], scale: f32, minimum: f32, out: &mut Out) {
    for i in 0..BLOCK_LEN {
        out[i] = f32::from(codes[i]).mul_add(scale, minimum);
    }
}

/// The codes of 20 bytes: four of fifth bits, value by value, then 16 of the lower four.
#[inline(always)]
pub fn five_bits(packed: &[u8; 20]) -> [u8; BLOCK_LEN] {
    let mut codes = nibbles(packed.last_chunk().unwrap_or(&[0; 16]));
    for (byte, codes) in packed.iter().zip(codes.as_chunks_mut::<8>().0) {
        for (bit, code) in codes.iter_mut().enumerate() {
            *code |= u8::from(byte & (1 << bit) != 0) << 4;
        }
    }
    std::hint::black_box(codes)
}

/// The codes of 16 bytes: byte j holds value j in its low half and value j + 16 in its high half.
#[inline(always)]
pub fn nibbles(packed: &[u8; 16]) -> [u8; BLOCK_LEN] {
    const LOW: u128 = u128::from_le_bytes([0x0f; 16]);
    let packed = u128::from_le_bytes(*packed);
    let mut codes = [0u8; BLOCK_LEN];
    codes[..16].copy_from_slice(&(packed & LOW).to_le_bytes());
    codes[16..].copy_from_slice(&((packed >> 4) & LOW).to_le_bytes());
    // Through memory: seeing where the codes come from, the compiler gathers lanes across blocks, at twice the cost.
    std::hint::black_box(codes)
}
