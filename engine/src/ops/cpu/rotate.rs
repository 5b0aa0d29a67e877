//! The heads of a step's queries, keys and values: normalised, rotated, and the latter two put into the cache.
//!
//! Called by the `cpu` ops. Rows are independent, so what becomes of one does not depend on those beside it.

use rayon::prelude::*;

use super::cached_row;
use crate::kv::KvLayout;
use crate::model::PairOrder;

/// What is done to heads. Rows hold query heads, then key heads, then value heads.
pub(super) struct Heads<'a> {
    pub(super) layout: &'a KvLayout,
    /// (cos, sin) by row and pair; `None` rotates nothing.
    pub(super) rotations: Option<&'a [[f32; 2]]>,
    pub(super) num_pairs: usize,
    pub(super) pair_order: PairOrder,
    /// Weights of query heads, then of key heads, and ε.
    pub(super) norms: Option<(&'a [f32], f32)>,
}

impl Heads<'_> {
    fn row_width(&self) -> usize {
        (self.layout.num_heads + 2 * self.layout.num_kv_heads) * self.layout.head_dim
    }

    /// Copies the queries of all rows, normalised and rotated.
    pub(super) fn queries(&self, qkv: &[f32], query: &mut [f32]) {
        let (head_dim, width) = (self.layout.head_dim, self.layout.num_heads * self.layout.head_dim);
        let rows = query.par_chunks_exact_mut(width).zip(qkv.par_chunks_exact(self.row_width())).enumerate();
        let norm = self.norms.map(|(weights, eps)| (&weights[..head_dim], eps));
        rows.with_min_len((super::ALONE_VALUES / width).max(1)).for_each(|(row, (query, qkv))| {
            query.copy_from_slice(&qkv[..width]);
            query.chunks_exact_mut(head_dim).for_each(|head| self.turn(row, norm, head));
        });
    }

    /// Puts keys, normalised and rotated, and values of all rows into their slots.
    pub(super) fn keys_and_values(&self, qkv: &[f32], slots: &[u32], key_cache: &mut [u16], value_cache: &mut [u16]) {
        let KvLayout { num_heads, num_kv_heads, head_dim, .. } = *self.layout;
        let norm = self.norms.map(|(weights, eps)| (&weights[head_dim..], eps));
        let mut turned = vec![0.0f32; head_dim];
        for (row, (qkv, &slot)) in qkv.chunks_exact(self.row_width()).zip(slots).enumerate() {
            let (keys, values) = qkv[num_heads * head_dim..].split_at(num_kv_heads * head_dim);
            let heads = keys.chunks_exact(head_dim).zip(values.chunks_exact(head_dim)).enumerate();
            for (head, (key, value)) in heads {
                turned.copy_from_slice(key);
                self.turn(row, norm, &mut turned);
                cached_row::store(self.layout, key_cache, slot as usize, head, &turned);
                cached_row::store(self.layout, value_cache, slot as usize, head, value);
            }
        }
    }

    fn turn(&self, row: usize, norm: Option<(&[f32], f32)>, head: &mut [f32]) {
        if let Some((weights, eps)) = norm {
            let squares = head.iter().fold(0.0f32, |sum, x| x.mul_add(*x, sum));
            let scale = 1.0 / (squares / head.len() as f32 + eps).sqrt();
            head.iter_mut().zip(weights).for_each(|(x, weight)| *x = *x * scale * weight);
        }
        let Some(rotations) = self.rotations else { return };
        let num_pairs = self.num_pairs;
        let pairs = &rotations[row * num_pairs..][..num_pairs];
        let stride = if self.pair_order == PairOrder::Neighbours { 1 } else { num_pairs };
        for (pair, &[cos, sin]) in pairs.iter().enumerate() {
            let first = if stride == 1 { 2 * pair } else { pair };
            let (a, b) = (head[first], head[first + stride]);
            head[first] = a.mul_add(cos, -(b * sin));
            head[first + stride] = a.mul_add(sin, b * cos);
        }
    }
}
