//! Storage types of GGUF tensors and how one row of each is unpacked to f32.
//!
//! Called by the `cpu` ops for every row they dot (into a scratch of one row), by the `wgpu` upload and by tests. Block
//! layouts are GGML's: 32 values share an f16 scale, and an f16 minimum where the type has one.

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Values of one block of every quantised type, and the granularity of the device formats.
pub const BLOCK_LEN: usize = 32;

/// How a tensor's values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StorageType {
    /// 4 bytes a value.
    F32,
    /// 2 bytes a value.
    F16,
    /// d · (code − 8): 18 bytes a block.
    Q4_0,
    /// d · code + m: 20 bytes a block.
    Q4_1,
    /// d · code, signed bytes: 34 bytes a block.
    Q8_0,
}

impl StorageType {
    /// All supported types.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Q4_0, Self::Q4_1, Self::Q8_0];

    /// The type of a GGML type number, or that number's name.
    ///
    /// # Errors
    /// The name of a type that is not supported.
    pub fn from_id(id: u32) -> Result<Self, String> {
        Ok(match id {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            8 => Self::Q8_0,
            other => return Err(unsupported_name(other)),
        })
    }

    /// GGML's number of the type.
    pub fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
        }
    }

    /// GGML's name of the type.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q8_0 => "Q8_0",
        }
    }

    /// Bytes of [`BLOCK_LEN`] values.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 128,
            Self::F16 => 64,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q8_0 => 34,
        }
    }

    /// Bytes of a row of `columns` values; `None` where a quantised row is not a whole number of blocks.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        match self {
            Self::F32 => Some(columns * 4),
            Self::F16 => Some(columns * 2),
            _ => columns.is_multiple_of(BLOCK_LEN).then(|| columns / BLOCK_LEN * self.block_bytes()),
        }
    }
}

fn unsupported_name(id: u32) -> String {
    let name = match id {
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        12 => "Q4_K",
        13 => "Q5_K",
        14 => "Q6_K",
        15 => "Q8_K",
        20 => "IQ4_NL",
        30 => "BF16",
        _ => return format!("number {id}"),
    };
    name.to_owned()
}

/// Unpacks one row. `bytes` is the row as stored, `out` has its number of values.
#[inline(always)]
pub fn dequantize_row(storage: StorageType, bytes: &[u8], out: &mut [f32]) {
    match storage {
        StorageType::F32 => {
            for (out, value) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([value[0], value[1], value[2], value[3]]);
            }
        }
        StorageType::F16 => {
            let mut halves = [f16::ZERO; 64];
            for (out, bytes) in out.chunks_mut(halves.len()).zip(bytes.chunks(2 * halves.len())) {
                for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *half = f16::from_le_bytes(*bytes);
                }
                halves[..out.len()].convert_to_f32_slice(out);
            }
        }
        StorageType::Q4_0 => {
            each_block::<18, 1>(bytes, out, |block, out, [d]| {
                let codes = nibbles(block.last_chunk().unwrap_or(&[0; 16]));
                for i in 0..BLOCK_LEN {
                    out[i] = f32::from(codes[i]).mul_add(d, -8.0 * d);
                }
            });
        }
        StorageType::Q4_1 => {
            each_block::<20, 2>(bytes, out, |block, out, [d, m]| {
                let codes = nibbles(block.last_chunk().unwrap_or(&[0; 16]));
                for i in 0..BLOCK_LEN {
                    out[i] = f32::from(codes[i]).mul_add(d, m);
                }
            });
        }
        StorageType::Q8_0 => {
            each_block::<34, 1>(bytes, out, |block, out, [d]| {
                let codes: &[u8; BLOCK_LEN] = block.last_chunk().unwrap_or(&[0; BLOCK_LEN]);
                for i in 0..BLOCK_LEN {
                    out[i] = f32::from(codes[i] as i8) * d;
                }
            });
        }
    }
}

/// Blocks whose scales are converted together: the CPU has an instruction for eight, and asking for it costs more than
/// one conversion.
const SCALED_BLOCKS: usize = 32;

/// Unpacks blocks of `BYTES` bytes that begin with `SCALES` f16 numbers.
#[inline(always)]
fn each_block<const BYTES: usize, const SCALES: usize>(
    bytes: &[u8],
    out: &mut [f32],
    unpack: impl Fn(&[u8; BYTES], &mut [f32; BLOCK_LEN], [f32; SCALES]),
) {
    let blocks = bytes.as_chunks::<BYTES>().0.chunks(SCALED_BLOCKS);
    for (blocks, out) in blocks.zip(out.as_chunks_mut::<BLOCK_LEN>().0.chunks_mut(SCALED_BLOCKS)) {
        let mut halves = [[f16::ZERO; SCALES]; SCALED_BLOCKS];
        for (halves, block) in halves.iter_mut().zip(blocks) {
            *halves = std::array::from_fn(|index| f16::from_le_bytes([block[2 * index], block[2 * index + 1]]));
        }
        let mut scales = [[0.0f32; SCALES]; SCALED_BLOCKS];
        halves.as_flattened().convert_to_f32_slice(scales.as_flattened_mut());
        for ((block, out), scales) in blocks.iter().zip(out).zip(scales) {
            unpack(block, out, scales);
        }
    }
}

/// The codes of 16 bytes: byte j holds value j in its low half and value j + 16 in its high half.
#[inline(always)]
fn nibbles(packed: &[u8; 16]) -> [u8; BLOCK_LEN] {
    const LOW: u128 = u128::from_le_bytes([0x0f; 16]);
    let packed = u128::from_le_bytes(*packed);
    let mut codes = [0u8; BLOCK_LEN];
    codes[..16].copy_from_slice(&(packed & LOW).to_le_bytes());
    codes[16..].copy_from_slice(&((packed >> 4) & LOW).to_le_bytes());
    // Through memory: seeing where the codes come from, the compiler gathers lanes across blocks, at twice the cost.
    std::hint::black_box(codes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unpacked(storage: StorageType, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![0.0; BLOCK_LEN];
        dequantize_row(storage, bytes, &mut out);
        out
    }

    #[test]
    fn four_bit_blocks_unpack_low_half_first() {
        let mut block = f16::from_f32(0.5).to_le_bytes().to_vec();
        block.extend([0x1f; 16]);
        let out = unpacked(StorageType::Q4_0, &block);
        assert_eq!((out[0], out[15], out[16], out[31]), (3.5, 3.5, -3.5, -3.5));
        block.splice(2..2, f16::from_f32(-1.0).to_le_bytes());
        let out = unpacked(StorageType::Q4_1, &block);
        assert_eq!((out[0], out[16]), (6.5, -0.5));
    }

    #[test]
    fn eight_bit_blocks_are_signed() {
        let mut block = f16::from_f32(0.25).to_le_bytes().to_vec();
        block.extend((0..32).map(|i| (i - 16) as i8 as u8));
        let out = unpacked(StorageType::Q8_0, &block);
        assert_eq!((out[0], out[16], out[31]), (-4.0, 0.0, 3.75));
    }

    #[test]
    fn a_quantised_row_is_whole_blocks() {
        assert_eq!(StorageType::Q4_1.row_bytes(576), Some(360));
        assert_eq!(StorageType::Q4_1.row_bytes(40), None);
        assert_eq!(StorageType::from_id(12), Err("Q4_K".into()));
    }
}
