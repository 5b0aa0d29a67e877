//! Dot products in one fixed order, alone and as tiles of rows × tokens.
//!
//! Called by the matrix product, the norm and attention. Running sum `lane` takes the products at `lane` mod 32 in order,
//! then a tree adds the 32 sums up. A tile keeps that order for each of its elements and only shares loads between them,
//! so an element's bits do not depend on what is computed beside it. Fused multiply-adds make the result the same on any
//! vector width.

use pulp::Simd;

/// Running sums, whatever the width of a vector register: 2 of AVX-512, 4 of AVX2, 8 of NEON.
const LANES: usize = 32;

/// Σ a·b.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let registers = LANES / S::F32_LANES;
    let mut vectors = [simd.splat_f32s(0.0); LANES];
    let ((a_chunks, a_rest), (b_chunks, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        let (a, b) = (S::as_simd_f32s(a).0, S::as_simd_f32s(b).0);
        for i in 0..registers {
            vectors[i] = simd.mul_add_f32s(a[i], b[i], vectors[i]);
        }
    }
    let mut sums = [0.0f32; LANES];
    S::as_mut_simd_f32s(&mut sums).0.copy_from_slice(&vectors[..registers]);
    finish(simd, sums, a_rest, b_rest)
}

/// [`dot`] of each of `R` rows with each of `T` tokens, all of one length.
#[inline(always)]
pub(super) fn dot_tile<S: Simd, const R: usize, const T: usize>(
    simd: S,
    rows: [&[f32]; R],
    tokens: [&[f32]; T],
) -> [[f32; T]; R] {
    let registers = LANES / S::F32_LANES;
    let len = rows[0].len();
    let num_vectors = len / LANES * registers;
    let row_vectors = rows.map(|row| &S::as_simd_f32s(&row[..len]).0[..num_vectors]);
    let token_vectors = tokens.map(|token| &S::as_simd_f32s(&token[..len]).0[..num_vectors]);
    let mut sums = [[[0.0f32; LANES]; T]; R];
    // A register's lanes at a time: R · T accumulators and R row vectors stay in registers.
    for register in 0..registers {
        let mut accumulators = [[simd.splat_f32s(0.0); T]; R];
        let mut index = register;
        while index < num_vectors {
            let weights = row_vectors.map(|row| row[index]);
            for t in 0..T {
                let x = token_vectors[t][index];
                for r in 0..R {
                    accumulators[r][t] = simd.mul_add_f32s(weights[r], x, accumulators[r][t]);
                }
            }
            index += registers;
        }
        for r in 0..R {
            for t in 0..T {
                S::as_mut_simd_f32s(&mut sums[r][t]).0[register] = accumulators[r][t];
            }
        }
    }
    let rest = len / LANES * LANES;
    let mut products = [[0.0; T]; R];
    for r in 0..R {
        for t in 0..T {
            products[r][t] = finish(simd, sums[r][t], &rows[r][rest..len], &tokens[t][rest..len]);
        }
    }
    products
}

/// Adds the products past the last whole chunk, then the tree: lane i takes lane i + width, for width 16, 8, 4, 2, 1.
#[inline(always)]
fn finish<S: Simd>(simd: S, mut sums: [f32; LANES], a_rest: &[f32], b_rest: &[f32]) -> f32 {
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum = a.mul_add(*b, *sum);
    }
    // While a level's lanes are whole registers, it is one vector addition each.
    let vectors = S::as_mut_simd_f32s(&mut sums).0;
    let mut registers = LANES / S::F32_LANES;
    while registers > 1 {
        registers /= 2;
        for i in 0..registers {
            vectors[i] = simd.add_f32s(vectors[i], vectors[i + registers]);
        }
    }
    let mut width = S::F32_LANES / 2;
    while width > 0 {
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
        width /= 2;
    }
    sums[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::{Arch, Scalar, WithSimd};

    struct Tile<'a>(&'a [f32], &'a [f32], usize);

    impl WithSimd for Tile<'_> {
        type Output = [[f32; 2]; 2];

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> Self::Output {
            let Self(a, b, len) = self;
            dot_tile(simd, [&a[..len], &a[len..2 * len]], [&b[..len], &b[len..2 * len]])
        }
    }

    struct Alone<'a>(&'a [f32], &'a [f32]);

    impl WithSimd for Alone<'_> {
        type Output = f32;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            dot(simd, self.0, self.1)
        }
    }

    #[test]
    fn bits_are_the_same_alone_in_a_tile_and_without_vectors() {
        for len in [1, 31, 32, 33, 96, 576, 1000] {
            let a: Vec<f32> = (0..2 * len).map(|i| (i as f32 * 0.37).sin()).collect();
            let b: Vec<f32> = (0..2 * len).map(|i| (i as f32 * 0.73).cos()).collect();
            let tile = Arch::new().dispatch(Tile(&a, &b, len));
            assert_eq!(
                tile.map(|row| row.map(f32::to_bits)),
                Tile(&a, &b, len).with_simd(Scalar::new()).map(|row| row.map(f32::to_bits))
            );
            for r in 0..2 {
                for t in 0..2 {
                    let alone = Arch::new().dispatch(Alone(&a[r * len..][..len], &b[t * len..][..len]));
                    assert_eq!(alone.to_bits(), tile[r][t].to_bits(), "length {len}");
                }
            }
        }
    }

    #[test]
    fn a_dot_product_is_by_hand() {
        assert_eq!(Arch::new().dispatch(Alone(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0])), 32.0);
    }
}
