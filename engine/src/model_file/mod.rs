//! Model files: metadata and tensors in GGUF's terms, read through memory maps, whether they come from GGUF files or from a
//! directory as Hugging Face lays it out.
//!
//! Called by the loader, the tokeniser and the chat template. Invariant: no number of a file is trusted. Every count, length
//! and offset is checked against the file's size before it is used, so a forged file is an error, not an allocation.

mod cursor;
mod gguf;
mod huggingface;
mod metadata;
mod quantize;
mod storage;
mod tensor;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

pub use metadata::{Array, Metadata, Value};
pub use quantize::Quantize;
pub use storage::{BLOCK_LEN, IQ4_NL_VALUES, StorageType, dequantize_row, five_bits, k_quants, nibbles};
pub use tensor::Tensor;

/// What is wrong with a model file, with the file, the place and the numbers.
#[derive(Debug, thiserror::Error)]
pub enum ModelFileError {
    /// The file cannot be opened or mapped.
    #[error("{path}: {reason}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason; no source, which would be told twice.
        reason: std::io::Error,
    },
    /// The bytes are not a model file that we read.
    #[error("{path}: not a readable model file: {reason}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        reason: String,
    },
    /// A metadata key is missing or has another type.
    #[error("{path}: metadata key `{key}` {reason}")]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor is missing, misshapen or of an unsupported type.
    #[error("{path}: tensor `{tensor}` {reason}")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Its name.
        tensor: String,
        /// What is wrong.
        reason: String,
    },
}

/// An opened model. Cheap to clone; tensors keep their maps alive.
#[derive(Clone, Debug)]
pub struct ModelFile {
    path: PathBuf,
    maps: Vec<Arc<Mmap>>,
    /// The files of the maps.
    files: Vec<PathBuf>,
    metadata: Metadata,
    tensors: BTreeMap<String, RawTensor>,
    origin: Origin,
}

/// A tensor's entry as the header states it, checked against the file's size when it is asked for.
#[derive(Clone, Debug)]
struct RawTensor {
    /// Fastest-varying dimension first, as in the file.
    dims: Vec<u64>,
    type_id: u32,
    /// Which of the files.
    map: usize,
    /// From the start of that file.
    offset: u64,
}

/// Where a model's terms come from.
#[derive(Clone, Debug)]
pub(crate) enum Origin {
    /// A GGUF file, which has them all.
    Gguf,
    /// A directory as Hugging Face lays it out: its `tokenizer.json`.
    HuggingFace(Arc<[u8]>),
}

/// Maps a file for reading.
fn map_file(path: &Path) -> Result<Arc<Mmap>, ModelFileError> {
    let opened = || -> std::io::Result<Mmap> {
        let file = std::fs::File::open(path)?;
        // SAFETY: the map is read-only and private to this process. A file that another process shortens while it is
        // mapped raises SIGBUS; model files are replaced by rename, never written in place.
        unsafe { Mmap::map(&file) }
    };
    let map = opened().map_err(|reason| ModelFileError::Open { path: path.to_owned(), reason })?;
    Ok(Arc::new(map))
}

impl ModelFile {
    /// Opens a GGUF file (with its other parts, where it is the first of several) or a Hugging Face directory.
    ///
    /// # Errors
    /// When it cannot be read as either; the error names the file, the place and the numbers.
    pub fn open(path: &Path) -> Result<Self, ModelFileError> {
        if path.is_dir() { huggingface::open(path) } else { gguf::open(path) }
    }

    /// The file's or directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that hold the weights.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// Bytes of all tensors with what lies between them.
    pub fn tensor_bytes(&self) -> u64 {
        (0..self.maps.len()).map(|index| self.maps[index].len() as u64 - self.tensors_start(index)).sum()
    }

    /// Where the first tensor of a map begins; its end where it has none.
    fn tensors_start(&self, map: usize) -> u64 {
        let end = self.maps[map].len() as u64;
        self.tensors.values().filter(|raw| raw.map == map).map(|raw| raw.offset.min(end)).min().unwrap_or(end)
    }

    /// BLAKE3 of the tensors: names, types, shapes and bytes, but not of the metadata. Reads all files.
    pub fn hash_tensors(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        let starts: Vec<u64> = (0..self.maps.len()).map(|index| self.tensors_start(index)).collect();
        for (name, raw) in &self.tensors {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            let offset = raw.offset.saturating_sub(starts[raw.map]);
            let numbers = [u64::from(raw.type_id), raw.map as u64, offset, raw.dims.len() as u64];
            numbers.iter().chain(&raw.dims).for_each(|number| {
                hasher.update(&number.to_le_bytes());
            });
        }
        for (map, start) in self.maps.iter().zip(starts) {
            hasher.update_rayon(&map[start as usize..]);
        }
        *hasher.finalize().as_bytes()
    }

    /// `tokenizer.json`, of a Hugging Face directory.
    pub fn tokenizer_json(&self) -> Option<&[u8]> {
        match &self.origin {
            Origin::HuggingFace(json) => Some(json),
            Origin::Gguf => None,
        }
    }

    /// Whether a tensor of this name is listed.
    pub fn has_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Names of all tensors.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The metadata value of `key`, if present.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// A required metadata value, converted by `as_type`; `what` names the expected type in the error.
    ///
    /// # Errors
    /// When the key is missing or of another type.
    pub fn require<'a, T>(
        &'a self,
        key: &str,
        what: &str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<T, ModelFileError> {
        let value = self.get(key).ok_or_else(|| self.key_error(key, "is missing".into()))?;
        as_type(value).ok_or_else(|| self.key_error(key, format!("should be {what}, is {}", value.type_name())))
    }

    /// An optional metadata value; a value of another type is still an error.
    ///
    /// # Errors
    /// When the key is present with another type.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        what: &str,
        as_type: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ModelFileError> {
        if self.get(key).is_none() {
            return Ok(None);
        }
        self.require(key, what, as_type).map(Some)
    }

    /// The error of a metadata key.
    pub fn key_error(&self, key: &str, reason: String) -> ModelFileError {
        ModelFileError::Key { path: self.path.clone(), key: key.to_owned(), reason }
    }

    /// The error of a tensor.
    pub fn tensor_error(&self, tensor: &str, reason: String) -> ModelFileError {
        ModelFileError::Tensor { path: self.path.clone(), tensor: tensor.to_owned(), reason }
    }

    /// The tensor `name` with `rows` rows of `columns` values (a vector has one row).
    ///
    /// # Errors
    /// When it is missing, of another shape or of a type that is not supported, or reaches past the end of the file.
    pub fn tensor(&self, name: &str, rows: usize, columns: usize) -> Result<Tensor, ModelFileError> {
        let raw = self.tensors.get(name).ok_or_else(|| self.tensor_error(name, "is missing".into()))?;
        let expected: &[u64] = if rows == 1 { &[columns as u64] } else { &[columns as u64, rows as u64] };
        if raw.dims != expected {
            return Err(
                self.tensor_error(name, format!("has shape {:?}, the metadata asks for {expected:?}", raw.dims))
            );
        }
        let storage = StorageType::from_id(raw.type_id).map_err(|type_name| {
            let supported = StorageType::ALL.map(StorageType::name).join(", ");
            self.tensor_error(name, format!("has type {type_name}, which is not supported (supported: {supported})"))
        })?;
        let row_bytes = storage.row_bytes(columns).ok_or_else(|| {
            let len = storage.block_len();
            self.tensor_error(name, format!("has rows of {columns} values, not a multiple of {len}"))
        })?;
        let map = &self.maps[raw.map];
        let bytes = (row_bytes as u64).saturating_mul(rows as u64);
        let end = raw.offset.checked_add(bytes).filter(|&end| end <= map.len() as u64).ok_or_else(|| {
            let (size, offset) = (map.len(), raw.offset);
            self.tensor_error(name, format!("ends past the file: {bytes} bytes at offset {offset}, file has {size}"))
        })?;
        Ok(Tensor::mapped(name, storage, rows, columns, Arc::clone(map), raw.offset as usize..end as usize))
    }
}
