//! Rows of the KV cache: written from f32, and a block's rows read back as f32.
//!
//! Called by the `cpu` ops' rotation and attention; the bytes are those of `cached_row.wgsl`.

use half::f16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

use crate::kv::{KvCacheDtype, KvLayout, SCALED_VALUES};

/// Stores a row of one head in its slot.
pub(super) fn store(layout: &KvLayout, cache: &mut [u16], slot: usize, kv_head: usize, values: &[f32]) {
    let (base, row) = layout.head_of(slot, kv_head);
    let head = &mut cache[base / 2..][..layout.head_bytes() / 2];
    match layout.dtype {
        KvCacheDtype::F16 => {
            let target: &mut [f16] = head[row * values.len()..][..values.len()].reinterpret_cast_mut();
            target.convert_from_f32_slice(values);
        }
        KvCacheDtype::Q8_0 => {
            let (codes, scales) = head.split_at_mut(layout.block_size * values.len() / 2);
            let codes: &mut [i8] = bytemuck::cast_slice_mut(&mut codes[row * values.len() / 2..][..values.len() / 2]);
            let scales = &mut scales[row * scales_a_row(values.len())..];
            let blocks = codes.as_chunks_mut::<SCALED_VALUES>().0.iter_mut().zip(values.as_chunks().0);
            blocks.zip(scales).for_each(|((codes, values), scale)| *scale = round(values, codes).to_bits());
        }
    }
}

/// A scale of more is too near to what f16 holds; `rotate_and_cache.wgsl` has it too.
const LARGEST_PEAK: f32 = 8.0e6;

/// Halves that a row's scales take: whole words.
fn scales_a_row(head_dim: usize) -> usize {
    2 * head_dim.div_ceil(2 * SCALED_VALUES)
}

/// Rounds values to codes of the scale that is returned. One that is not finite makes the scale NaN, so that it shows.
fn round(values: &[f32; SCALED_VALUES], codes: &mut [i8; SCALED_VALUES]) -> f16 {
    let peak = values.iter().fold(0.0f32, |peak, value| peak.max(value.abs()));
    let scale = f16::from_f32(peak / 127.0);
    if !values.iter().all(|value| value.is_finite()) || peak > LARGEST_PEAK {
        return f16::NAN;
    }
    let inverse = if scale > f16::ZERO { 1.0 / scale.to_f32() } else { 0.0 };
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (value * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
    scale
}

/// Reads the first rows of one head of a block, as many as `rows` holds. Slots past the context hold what the block's last
/// user left.
#[inline(always)]
pub(super) fn load(layout: &KvLayout, cache: &[u16], block_id: u32, kv_head: usize, rows: &mut [f32]) {
    let (base, _) = layout.head_of(block_id as usize * layout.block_size, kv_head);
    let head = &cache[base / 2..][..layout.head_bytes() / 2];
    match layout.dtype {
        KvCacheDtype::F16 => {
            for (value, bits) in rows.iter_mut().zip(head) {
                *value = widened(*bits);
            }
        }
        KvCacheDtype::Q8_0 => {
            let head_dim = layout.head_dim;
            let (codes, scales) = head.split_at(layout.block_size * head_dim / 2);
            let codes = bytemuck::cast_slice::<u16, i8>(codes).chunks_exact(head_dim);
            let rows = rows.chunks_exact_mut(head_dim).zip(codes).zip(scales.chunks_exact(scales_a_row(head_dim)));
            for ((row, codes), scales) in rows {
                let blocks =
                    row.as_chunks_mut::<SCALED_VALUES>().0.iter_mut().zip(codes.as_chunks::<SCALED_VALUES>().0);
                for ((values, codes), scale) in blocks.zip(scales) {
                    let scale = widened(*scale);
                    for i in 0..SCALED_VALUES {
                        values[i] = f32::from(codes[i]) * scale;
                    }
                }
            }
        }
    }
}

/// f16 to f32 without a branch, so that the loop above becomes vector instructions: the bits moved into place and scaled
/// by 2¹¹² to the right exponent, which is exact for subnormals too; infinities and NaN get their exponent by hand.
#[inline(always)]
fn widened(bits: u16) -> f32 {
    let bits = u32::from(bits);
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let is_finite = bits & 0x7c00 != 0x7c00;
    let special = if is_finite { 0 } else { 0x7f80_0000 };
    f32::from_bits(magnitude.to_bits() | special | (bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_widens_to_itself() {
        for bits in 0..=u16::MAX {
            let (got, expected) = (widened(bits), f16::from_bits(bits).to_f32());
            assert!(got.to_bits() == expected.to_bits() || (got.is_nan() && expected.is_nan()), "{bits:#06x}: {got}");
        }
    }

    #[test]
    fn rows_come_back_within_half_a_code_and_a_nan_shows() {
        for head_dim in [32, 64, 96] {
            let dtype = KvCacheDtype::Q8_0;
            let layout = KvLayout {
                num_layers: 1,
                num_blocks: 3,
                num_heads: 2,
                num_kv_heads: 2,
                head_dim,
                block_size: 16,
                dtype,
            };
            let mut cache = vec![0u16; layout.layer_bytes() as usize / 2];
            let values: Vec<f32> = (0..head_dim).map(|i| (i as f32 - 20.0) * if i < 32 { 0.5 } else { -3.0 }).collect();
            store(&layout, &mut cache, 16 + 5, 1, &values);
            let mut rows = vec![0.0; 6 * head_dim];
            load(&layout, &cache, 1, 1, &mut rows);
            let (before, row) = rows.split_at(5 * head_dim);
            assert!(before.iter().all(|value| *value == 0.0), "{head_dim}: another row was touched");
            for (block, (got, wanted)) in row.chunks(32).zip(values.chunks(32)).enumerate() {
                let peak = wanted.iter().fold(0.0f32, |peak, value| peak.max(value.abs()));
                for (got, wanted) in got.iter().zip(wanted) {
                    // Half a code, and f16's rounding of the scale.
                    assert!(
                        (got - wanted).abs() <= peak / 127.0 * 0.57,
                        "{head_dim} {block}: {got}, should be {wanted}"
                    );
                }
            }
            for broken in [f32::NAN, f32::INFINITY, 1e38] {
                store(&layout, &mut cache, 16, 0, &vec![broken; head_dim]);
                load(&layout, &cache, 1, 0, &mut rows[..head_dim]);
                assert!(rows[..head_dim].iter().all(|value| value.is_nan()), "{broken}");
            }
        }
    }
}
