//! One tensor of a model file: its shape and its bytes, still in the memory map.
//!
//! The `cpu` ops read rows from it in place; the `wgpu` ops repack it for upload.

use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

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
    map: Arc<Mmap>,
    range: Range<usize>,
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
        Self { name: name.to_owned(), storage, rows, columns, map, range }
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map[self.range.clone()]
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.range.len() / self.rows
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
}
