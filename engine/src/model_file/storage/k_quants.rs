//! Rows of the types whose blocks hold 256 values: eight groups of 32 with their own scales (Q4_K, Q5_K), or sixteen of 16
//! (Q6_K). Called by [`super::dequantize_row`] and by the device's repacking. Layouts are GGML's.

use half::f16;

/// Values of a block.
pub const SUPER_LEN: usize = 256;
/// Bytes of a Q4_K block: d, dmin, twelve bytes of six-bit scales and minima, 128 of codes.
pub const Q4_K_BYTES: usize = 144;
/// Bytes of a Q5_K block: as Q4_K, with 32 bytes of fifth bits before the codes.
pub const Q5_K_BYTES: usize = 176;
/// Bytes of a Q6_K block: 128 of low bits, 64 of high bits, sixteen signed scales, d.
pub const Q6_K_BYTES: usize = 210;

/// d and dmin of a Q4_K or Q5_K block.
#[inline(always)]
pub fn group_units(block: &[u8]) -> [f16; 2] {
    [0, 2].map(|at| f16::from_le_bytes([block[at], block[at + 1]]))
}

/// (scale, minimum) of each group of 32 of a Q4_K or Q5_K block, in units of d and dmin:
/// value = d · scale · code − dmin · minimum.
#[inline(always)]
pub fn group_scales(block: &[u8]) -> [[u8; 2]; 8] {
    let packed = &block[4..16];
    std::array::from_fn(|group| {
        // The first four are six bits each; the others' upper two bits lie above those.
        if group < 4 {
            [packed[group] & 63, packed[group + 4] & 63]
        } else {
            let low = packed[group + 4];
            [(low & 15) | (packed[group - 4] >> 6) << 4, (low >> 4) | (packed[group] >> 6) << 4]
        }
    })
}

/// d of a Q6_K block.
#[inline(always)]
pub fn sixteen_unit(block: &[u8; Q6_K_BYTES]) -> f16 {
    f16::from_le_bytes([block[208], block[209]])
}

/// The scale of each group of 16 of a Q6_K block, in units of d: value = d · scale · (code − 32).
#[inline(always)]
pub fn sixteen_scales(block: &[u8; Q6_K_BYTES]) -> [i8; 16] {
    std::array::from_fn(|group| block[192 + group] as i8)
}

/// The codes of a Q4_K block, 0 to 15.
#[inline(always)]
pub fn q4_k_codes(block: &[u8; Q4_K_BYTES]) -> [u8; SUPER_LEN] {
    let mut codes = [0; SUPER_LEN];
    for (bytes, codes) in block[16..].as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<64>().0) {
        for i in 0..32 {
            codes[i] = bytes[i] & 15;
            codes[i + 32] = bytes[i] >> 4;
        }
    }
    codes
}

/// The codes of a Q5_K block, 0 to 31.
#[inline(always)]
pub fn q5_k_codes(block: &[u8; Q5_K_BYTES]) -> [u8; SUPER_LEN] {
    let (high, low) = block[16..].split_at(32);
    let mut codes = [0; SUPER_LEN];
    for (pair, (bytes, codes)) in low.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<64>().0).enumerate() {
        for i in 0..32 {
            codes[i] = (bytes[i] & 15) | ((high[i] >> (2 * pair)) & 1) << 4;
            codes[i + 32] = (bytes[i] >> 4) | ((high[i] >> (2 * pair + 1)) & 1) << 4;
        }
    }
    codes
}

/// The codes of a Q6_K block, 0 to 63.
#[inline(always)]
pub fn q6_k_codes(block: &[u8; Q6_K_BYTES]) -> [u8; SUPER_LEN] {
    let mut codes = [0; SUPER_LEN];
    for (part, codes) in codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let (low, high) = (&block[64 * part..][..64], &block[128 + 32 * part..][..32]);
        for i in 0..32 {
            codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
            codes[i + 32] = (low[i + 32] & 15) | ((high[i] >> 2) & 3) << 4;
            codes[i + 64] = (low[i] >> 4) | ((high[i] >> 4) & 3) << 4;
            codes[i + 96] = (low[i + 32] >> 4) | (high[i] >> 6) << 4;
        }
    }
    codes
}

/// Unpacks a row of Q4_K.
#[inline(always)]
pub(super) fn dequantize_q4_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<Q4_K_BYTES>().0.iter().zip(out.as_chunks_mut::<SUPER_LEN>().0) {
        scaled(&q4_k_codes(block), block, out);
    }
}

/// Unpacks a row of Q5_K.
#[inline(always)]
pub(super) fn dequantize_q5_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<Q5_K_BYTES>().0.iter().zip(out.as_chunks_mut::<SUPER_LEN>().0) {
        scaled(&q5_k_codes(block), block, out);
    }
}

/// Unpacks a row of Q6_K.
#[inline(always)]
pub(super) fn dequantize_q6_k(bytes: &[u8], out: &mut [f32]) {
    for (block, out) in bytes.as_chunks::<Q6_K_BYTES>().0.iter().zip(out.as_chunks_mut::<SUPER_LEN>().0) {
        let (codes, scales, d) = (q6_k_codes(block), sixteen_scales(block), sixteen_unit(block).to_f32());
        let groups = codes.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0);
        for ((codes, out), scale) in groups.zip(scales) {
            let scale = d * f32::from(scale);
            for i in 0..16 {
                out[i] = (f32::from(codes[i]) - 32.0) * scale;
            }
        }
    }
}

#[inline(always)]
fn scaled(codes: &[u8; SUPER_LEN], block: &[u8], out: &mut [f32; SUPER_LEN]) {
    let [d, least] = group_units(block).map(f16::to_f32);
    let groups = codes.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<32>().0);
    for ((codes, out), [scale, minimum]) in groups.zip(group_scales(block)) {
        super::blocks::affine(codes, d * f32::from(scale), -(least * f32::from(minimum)), out);
    }
}
