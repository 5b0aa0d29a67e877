//! A weight matrix on the CPU: tensors one below the other, each as it is stored in its file's memory map.
//!
//! Made at load, read by the matrix product and the embedding.

use crate::model_file::{StorageType, Tensor};
use crate::ops::DeviceError;

/// Rows of one or more tensors of equal columns.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Rows of all parts.
    pub rows: usize,
    /// Columns.
    pub columns: usize,
    /// Each with its first row.
    parts: Vec<(usize, Tensor)>,
}

impl Matrix {
    /// Stacks tensors.
    ///
    /// # Errors
    /// When there are none, or their columns differ.
    pub fn of(tensors: &[Tensor]) -> Result<Self, DeviceError> {
        let refused = |reason: String| DeviceError::Refused { what: "a matrix".into(), reason };
        let first = tensors.first().ok_or_else(|| refused("of no tensors".into()))?;
        let (columns, mut rows, mut parts) = (first.columns, 0, Vec::with_capacity(tensors.len()));
        for tensor in tensors {
            if tensor.columns != columns {
                let reason =
                    format!("`{}` has {} columns, `{}` has {columns}", tensor.name, tensor.columns, first.name);
                return Err(refused(reason));
            }
            parts.push((rows, tensor.clone()));
            rows += tensor.rows;
        }
        Ok(Self { rows, columns, parts })
    }

    /// How a row is stored, and its bytes.
    #[inline]
    pub fn row(&self, index: usize) -> (StorageType, &[u8]) {
        let part = self.parts.partition_point(|(first, _)| *first <= index) - 1;
        let (first, tensor) = &self.parts[part];
        (tensor.storage, tensor.row(index - first))
    }
}
