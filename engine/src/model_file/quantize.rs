//! Rounding floating-point weights when a model is loaded (`--quantize`).
//!
//! Called by the loader. Block layouts and roundings are GGML's own, so a model is what its file of that type would be.

use half::f16;
use rayon::prelude::*;

use super::{BLOCK_LEN, StorageType, Tensor, dequantize_row};

/// What weights can be rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantize {
    /// A byte a value.
    Q8_0,
    /// Four bits a value.
    Q4_0,
}

impl Quantize {
    /// The storage type that comes out.
    pub fn storage(self) -> StorageType {
        match self {
            Self::Q8_0 => StorageType::Q8_0,
            Self::Q4_0 => StorageType::Q4_0,
        }
    }

    /// A matrix rounded; as it is where it is rounded already, or its rows are no whole blocks.
    pub fn apply(self, tensor: Tensor) -> Tensor {
        let storage = self.storage();
        let Some(row_bytes) = storage.row_bytes(tensor.columns).filter(|_| tensor.storage.is_float()) else {
            return tensor;
        };
        let mut bytes = vec![0u8; row_bytes * tensor.rows];
        bytes.par_chunks_exact_mut(row_bytes).enumerate().for_each_init(
            || vec![0.0f32; tensor.columns],
            |values, (row, bytes)| {
                dequantize_row(tensor.storage, tensor.row(row), values);
                let blocks =
                    values.as_chunks::<BLOCK_LEN>().0.iter().zip(bytes.chunks_exact_mut(storage.block_bytes()));
                blocks.for_each(|(values, block)| self.round(values, block));
            },
        );
        Tensor::owned(&tensor.name, storage, tensor.rows, tensor.columns, bytes)
    }

    fn round(self, values: &[f32; BLOCK_LEN], block: &mut [u8]) {
        // The value that lies farthest from zero, with its sign.
        let mut farthest = values.iter().fold(0.0f32, |far, &x| if x.abs() > far.abs() { x } else { far });
        // What is no number must not become one: its block's scale says so.
        if values.iter().any(|x| !x.is_finite()) {
            farthest = f32::NAN;
        }
        let (scale, codes) = block.split_at_mut(2);
        match self {
            Self::Q8_0 => {
                let d = farthest.abs() / 127.0;
                let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
                scale.copy_from_slice(&f16::from_f32(d).to_le_bytes());
                codes.iter_mut().zip(values).for_each(|(code, x)| *code = (x * inverse).round() as i8 as u8);
            }
            Self::Q4_0 => {
                // Its code is 0, so that the range's longer side is that of its sign.
                let d = farthest / -8.0;
                let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
                scale.copy_from_slice(&f16::from_f32(d).to_le_bytes());
                let code = |x: f32| (x * inverse + 8.5).clamp(0.0, 15.0) as u8;
                for (i, byte) in codes.iter_mut().enumerate() {
                    *byte = code(values[i]) | code(values[i + BLOCK_LEN / 2]) << 4;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Tensor::owned("t", StorageType::F32, 2, values.len() / 2, bytes)
    }

    #[test]
    fn rounded_values_are_within_half_a_code() {
        let values: Vec<f32> = (0..128).map(|i| (i as f32 * 0.7).sin() * 3.0).collect();
        for (quantize, step) in [(Quantize::Q8_0, 3.0 / 127.0), (Quantize::Q4_0, 3.0 / 8.0)] {
            let rounded = quantize.apply(tensor(&values));
            assert_eq!((rounded.storage, rounded.rows, rounded.columns), (quantize.storage(), 2, 64));
            for (got, expected) in rounded.to_f32().iter().zip(&values) {
                // The end that has no code of its own is a whole step away, and scales are f16.
                let bound = if quantize == Quantize::Q4_0 { step * 1.01 } else { step * 0.51 };
                assert!((got - expected).abs() <= bound, "{quantize:?}: {got} for {expected}");
            }
        }
    }

    #[test]
    fn what_is_no_number_stays_broken() {
        for broken in [f32::NAN, f32::INFINITY, 1e30] {
            let mut values = [1.0f32; 128];
            values[100] = broken;
            for quantize in [Quantize::Q8_0, Quantize::Q4_0] {
                assert_eq!(quantize.apply(tensor(&values)).first_broken_row(), Some(1), "{broken} {quantize:?}");
            }
        }
    }

    #[test]
    fn rows_that_are_no_whole_blocks_stay_as_they_are() {
        let values = [1.0f32; 80];
        assert_eq!(Quantize::Q8_0.apply(tensor(&values)).storage, StorageType::F32);
        assert_eq!(Quantize::Q4_0.apply(tensor(&[0.0; 64])).to_f32(), [0.0; 64]);
    }
}
