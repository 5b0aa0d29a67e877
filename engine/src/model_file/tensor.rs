//! One tensor of a model: its shape and its bytes, still in the memory map, or rounded when it was loaded.
//!
//! The `cpu` ops read rows from it in place; the `wgpu` ops repack it for upload.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use memmap2::Mmap;
use rayon::prelude::*;

use super::{StorageType, dequantize_row};

/// A matrix of `rows` rows (a vector has one) as stored in the file.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Name in the file.
    pub name: String,
    /// How values are stored.
    pub storage: StorageType,
    /// Rows.
    pub rows: usize,
    /// Values a row.
    pub columns: usize,
    bytes: Bytes,
}

#[derive(Clone, Debug)]
enum Bytes {
    Mapped(Arc<Mmap>, Range<usize>),
    Owned(Arc<[u8]>),
}

impl Tensor {
    pub(super) fn mapped(
        name: &str,
        storage: StorageType,
        rows: usize,
        columns: usize,
        map: Arc<Mmap>,
        range: Range<usize>,
    ) -> Self {
        Self { name: name.to_owned(), storage, rows, columns, bytes: Bytes::Mapped(map, range) }
    }

    pub(crate) fn owned(name: &str, storage: StorageType, rows: usize, columns: usize, bytes: Vec<u8>) -> Self {
        Self { name: name.to_owned(), storage, rows, columns, bytes: Bytes::Owned(bytes.into()) }
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(map, range) => &map[range.clone()],
            Bytes::Owned(bytes) => bytes,
        }
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.bytes().len() / self.rows
    }

    /// The stored bytes of row `index`.
    pub fn row(&self, index: usize) -> &[u8] {
        &self.bytes()[index * self.row_bytes()..][..self.row_bytes()]
    }

    /// All values as f32: for vectors and tests, never for a weight matrix of the hot path.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.columns];
        for (index, row) in out.chunks_exact_mut(self.columns).enumerate() {
            dequantize_row(self.storage, self.row(index), row);
        }
        out
    }

    /// The first row with a scale that is no finite number, or whose offset on a GPU would be none: all of its block is broken.
    pub fn first_broken_row(&self) -> Option<usize> {
        let scales = self.storage.scale_offsets();
        if scales.is_empty() {
            return None;
        }
        // Codes are stored from zero on: the least value is the scale times this.
        let offset = match self.storage {
            StorageType::Q4_0 => 8.0,
            StorageType::Q5_0 => 16.0,
            _ => 1.0,
        };
        let is_broken = |block: &[u8]| {
            let scale = |&at: &usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
            scales.iter().map(scale).any(|scale| !f16::from_f32(scale * offset).is_finite())
        };
        let rows = self.bytes().par_chunks_exact(self.row_bytes());
        rows.position_first(|row| row.chunks_exact(self.storage.block_bytes()).any(is_broken))
    }
}
