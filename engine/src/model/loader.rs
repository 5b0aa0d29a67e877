//! Brings a file's tensors to the device, and knows afterwards which it has not read.
//!
//! Used by the decoder when it is loaded. Invariant: no tensor of a file is left out silently.

use std::collections::BTreeSet;

use super::{ROPE_FACTORS, ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT};
use crate::error::LoadError;
use crate::model_file::{ModelFile, Quantize, Tensor};
use crate::ops::{DeviceError, Ops};

/// A part of a matrix that is stacked from several tensors: name and rows.
pub(super) type Part<'a> = (&'a str, usize);

/// Loads tensors and counts them.
pub(super) struct Loader<'a, O: Ops> {
    pub(super) ops: &'a mut O,
    pub(super) file: &'a ModelFile,
    /// Added to the weights of norms.
    norm_offset: f32,
    /// What floating-point matrices are rounded to.
    quantize: Option<Quantize>,
    loaded: BTreeSet<String>,
    total: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

impl<'a, O: Ops> Loader<'a, O> {
    /// A loader that has loaded nothing; `progress` hears (tensors loaded, tensors in all).
    pub(super) fn new(
        ops: &'a mut O,
        file: &'a ModelFile,
        norm_offset: f32,
        quantize: Option<Quantize>,
        progress: &'a mut dyn FnMut(usize, usize),
    ) -> Self {
        let total = file.tensor_names().count();
        Self { ops, file, norm_offset, quantize, loaded: BTreeSet::new(), total, progress }
    }

    /// A matrix of one tensor, or of several one below the other.
    pub(super) fn matrix(&mut self, parts: &[Part<'_>], columns: usize) -> Result<O::Matrix, LoadError> {
        let mut tensors: Vec<Tensor> = Vec::with_capacity(parts.len());
        for &(name, rows) in parts {
            let tensor = self.file.tensor(name, rows, columns)?;
            self.refuse_broken(&tensor)?;
            tensors.push(match self.quantize {
                None => tensor,
                Some(quantize) => {
                    let rounded = quantize.apply(tensor);
                    self.refuse_broken(&rounded)?;
                    rounded
                }
            });
        }
        let names = parts.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        let matrix = self.ops.matrix(&tensors).map_err(|source| LoadError::Tensor { name: names, source })?;
        parts.iter().for_each(|(name, _)| self.count(name));
        Ok(matrix)
    }

    fn refuse_broken(&self, tensor: &Tensor) -> Result<(), LoadError> {
        let Some(row) = tensor.first_broken_row() else { return Ok(()) };
        let reason = format!("has a scale in row {row} that is no finite number, or too large for one");
        Err(self.file.tensor_error(&tensor.name, reason).into())
    }

    /// The weights of a norm.
    pub(super) fn norm(&mut self, name: &str, columns: usize) -> Result<O::Vector, LoadError> {
        let offset = self.norm_offset;
        let values: Vec<f32> = self.values(name, columns)?.into_iter().map(|value| value + offset).collect();
        self.upload(name, &values)
    }

    /// Biases one behind the other, where the file has them; those that it lacks of several are zero.
    pub(super) fn biases(&mut self, parts: &[Part<'_>]) -> Result<Option<O::Vector>, LoadError> {
        if !parts.iter().any(|(name, _)| self.file.has_tensor(name)) {
            return Ok(None);
        }
        let mut values = Vec::new();
        for &(name, rows) in parts {
            match self.file.has_tensor(name) {
                true => values.extend(self.values(name, rows)?),
                false => values.resize(values.len() + rows, 0.0),
            }
        }
        self.upload(parts[0].0, &values).map(Some)
    }

    /// The norms of query and key heads, one behind the other.
    pub(super) fn head_norms(&mut self, query: &str, key: &str, head_dim: usize) -> Result<O::Vector, LoadError> {
        let offset = self.norm_offset;
        let values = [self.values(query, head_dim)?, self.values(key, head_dim)?].concat();
        let values: Vec<f32> = values.into_iter().map(|value| value + offset).collect();
        self.upload(query, &values)
    }

    fn values(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let values = self.file.tensor(name, 1, len)?.to_f32();
        self.count(name);
        Ok(values)
    }

    fn upload(&mut self, name: &str, values: &[f32]) -> Result<O::Vector, LoadError> {
        let fail = |source: DeviceError| LoadError::Tensor { name: name.to_owned(), source };
        self.ops.vector(name, values).map_err(fail)
    }

    fn count(&mut self, name: &str) {
        self.loaded.insert(name.to_owned());
        (self.progress)(self.loaded.len().min(self.total), self.total);
    }

    /// A tensor that nothing reads would be left out of the model silently.
    pub(super) fn refuse_unknown_tensors(&self, architecture: &str) -> Result<(), LoadError> {
        let known = |name: &str| {
            self.loaded.contains(name) || [ROPE_FACTORS, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG].contains(&name)
        };
        match self.file.tensor_names().find(|name| !known(name)) {
            Some(name) => {
                let reason = format!("is no part of the {architecture} architecture as we know it");
                Err(self.file.tensor_error(name, reason).into())
            }
            None => Ok(()),
        }
    }
}
