//! Storage types of GGUF tensors and how one row of each is unpacked to f32.
//!
//! Called by the `cpu` ops for every row they dot (into a scratch of one row), by the `wgpu` upload and by tests. Block
//! layouts are GGML's: 32 values share an f16 scale, and an f16 minimum where the type has one; the K types group such
//! blocks (`k_quants`).

mod blocks;
pub mod k_quants;

use half::f16;
use half::slice::HalfFloatSliceExt;

pub use blocks::{five_bits, nibbles};
use k_quants::SUPER_LEN;

/// Values that share a scale in most quantised types, and the granularity of the device formats.
pub const BLOCK_LEN: usize = 32;

/// Values of the 4-bit table of IQ4_NL.
pub const IQ4_NL_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

macro_rules! storage_types {
    ($($(#[$doc:meta])* $name:ident $id:literal $block_len:expr, $block_bytes:expr;)*) => {
        /// How a tensor's values are stored.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(non_camel_case_types, reason = "GGML's names")]
        pub enum StorageType {
            $($(#[$doc])* $name,)*
        }

        impl StorageType {
            /// All supported types.
            pub const ALL: [Self; [$($id),*].len()] = [$(Self::$name),*];

            /// GGML's number of the type.
            pub fn id(self) -> u32 {
                match self { $(Self::$name => $id,)* }
            }

            /// GGML's name of the type.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// Values of a block, of which a quantised row is a whole number.
            pub fn block_len(self) -> usize {
                match self { $(Self::$name => $block_len,)* }
            }

            /// Bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self { $(Self::$name => $block_bytes,)* }
            }
        }
    };
}

storage_types! {
    /// 4 bytes a value.
    F32 0 1, 4;
    /// 2 bytes a value.
    F16 1 1, 2;
    /// 2 bytes a value: the upper half of an f32.
    BF16 30 1, 2;
    /// d · (code − 8): 18 bytes a block.
    Q4_0 2 BLOCK_LEN, 18;
    /// d · code + m: 20 bytes a block.
    Q4_1 3 BLOCK_LEN, 20;
    /// d · (code − 16), five bits: 22 bytes a block.
    Q5_0 6 BLOCK_LEN, 22;
    /// d · code + m, five bits: 24 bytes a block.
    Q5_1 7 BLOCK_LEN, 24;
    /// d · code, signed bytes: 34 bytes a block.
    Q8_0 8 BLOCK_LEN, 34;
    /// Four bits, with a scale and a minimum of six bits a group of 32.
    Q4_K 12 SUPER_LEN, k_quants::Q4_K_BYTES;
    /// Five bits, with a scale and a minimum of six bits a group of 32.
    Q5_K 13 SUPER_LEN, k_quants::Q5_K_BYTES;
    /// Six bits, with a scale of eight bits a group of 16.
    Q6_K 14 SUPER_LEN, k_quants::Q6_K_BYTES;
    /// d · a value of a table of sixteen: 18 bytes a block.
    IQ4_NL 20 BLOCK_LEN, 18;
}

impl StorageType {
    /// The type of a GGML type number, or that number's name.
    ///
    /// # Errors
    /// The name of a type that is not supported.
    pub fn from_id(id: u32) -> Result<Self, String> {
        Self::ALL.into_iter().find(|storage| storage.id() == id).ok_or_else(|| unsupported_name(id))
    }

    /// Bytes of a row of `columns` values; `None` where a quantised row is not a whole number of blocks.
    pub fn row_bytes(self, columns: usize) -> Option<usize> {
        let blocks = columns.is_multiple_of(self.block_len()).then(|| columns / self.block_len())?;
        blocks.checked_mul(self.block_bytes())
    }

    /// Where the f16 scales of a block lie in it.
    pub fn scale_offsets(self) -> &'static [usize] {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => &[],
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 | Self::IQ4_NL => &[0],
            Self::Q4_1 | Self::Q5_1 | Self::Q4_K | Self::Q5_K => &[0, 2],
            Self::Q6_K => &[208],
        }
    }

    /// Whether values are floating-point numbers as they are.
    pub fn is_float(self) -> bool {
        self.block_len() == 1
    }
}

fn unsupported_name(id: u32) -> String {
    let name = match id {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24..=27 => "an integer type",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
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
        StorageType::BF16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
            }
        }
        StorageType::Q4_0 => each_block::<18, 1, blocks::Q40>(bytes, out),
        StorageType::Q4_1 => each_block::<20, 2, blocks::Q41>(bytes, out),
        StorageType::Q5_0 => each_block::<22, 1, blocks::Q50>(bytes, out),
        StorageType::Q5_1 => each_block::<24, 2, blocks::Q51>(bytes, out),
        StorageType::Q8_0 => each_block::<34, 1, blocks::Q80>(bytes, out),
        StorageType::IQ4_NL => each_block::<18, 1, blocks::IQ4NL>(bytes, out),
        StorageType::Q4_K => k_quants::dequantize_q4_k(bytes, out),
        StorageType::Q5_K => k_quants::dequantize_q5_k(bytes, out),
        StorageType::Q6_K => k_quants::dequantize_q6_k(bytes, out),
    }
}

/// Blocks whose scales are converted together: the CPU has an instruction for eight, and asking for it costs more than
/// one conversion.
const SCALED_BLOCKS: usize = 32;

/// Unpacks blocks of `BYTES` bytes that begin with `SCALES` f16 numbers.
#[inline(always)]
fn each_block<const BYTES: usize, const SCALES: usize, B: blocks::Unpack<BYTES, SCALES>>(
    bytes: &[u8],
    out: &mut [f32],
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
            B::unpack(block, out, scales);
        }
    }
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
        assert_eq!(StorageType::Q4_K.row_bytes(576), None);
        assert_eq!(StorageType::from_id(12), Ok(StorageType::Q4_K));
        assert_eq!(StorageType::from_id(10), Err("Q2_K".into()));
    }
}
