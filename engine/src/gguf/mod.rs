//! GGUF model files: header, metadata and tensors, read through one memory map.
//!
//! Called by the loader, the tokeniser and `pagoda pull`'s check. Invariant: no number of the file is trusted. Every
//! count, length and offset is checked against the file's size before it is used, so a forged file is an error, not an
//! allocation. Format: GGUF version 2 and 3, little-endian.

mod cursor;
mod metadata;
mod storage;
mod tensor;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use cursor::Cursor;
pub use metadata::{Array, Metadata, Value};
pub use storage::{BLOCK_LEN, StorageType, dequantize_row};
pub use tensor::Tensor;

/// What is wrong with a model file, with the file, the place and the numbers.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be opened or mapped.
    #[error("{path}: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The bytes are not a GGUF file that we read.
    #[error("{path}: not a readable GGUF file: {reason}")]
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

/// An opened file. Cheap to clone; tensors keep the map alive.
#[derive(Clone, Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Arc<Mmap>,
    metadata: Metadata,
    tensors: BTreeMap<String, RawTensor>,
}

/// A tensor's entry as the header states it, checked against the file's size when it is asked for.
#[derive(Clone, Debug)]
struct RawTensor {
    /// Fastest-varying dimension first, as in the file.
    dims: Vec<u64>,
    type_id: u32,
    /// From the start of the file.
    offset: u64,
}

impl GgufFile {
    /// Opens and parses the header of `path`.
    ///
    /// # Errors
    /// When the file cannot be mapped or its header is malformed.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let opened = || -> std::io::Result<Mmap> {
            let file = std::fs::File::open(path)?;
            // SAFETY: the map is read-only and private to this process. A file that another process shortens while it is
            // mapped raises SIGBUS; model files are replaced by rename, never written in place.
            unsafe { Mmap::map(&file) }
        };
        let map = opened().map_err(|source| GgufError::Open { path: path.to_owned(), source })?;
        let (metadata, tensors) =
            parse(&map).map_err(|reason| GgufError::Malformed { path: path.to_owned(), reason })?;
        Ok(Self { path: path.to_owned(), map: Arc::new(map), metadata, tensors })
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file.
    pub fn size_bytes(&self) -> u64 {
        self.map.len() as u64
    }

    /// Bytes of all tensors with what lies between them.
    pub fn tensor_bytes(&self) -> u64 {
        let start = self.tensors.values().map(|raw| raw.offset).min().unwrap_or(self.size_bytes());
        self.size_bytes().saturating_sub(start)
    }

    /// BLAKE3 of the tensors: names, types, shapes and bytes, but not of the metadata. Reads the whole file.
    pub fn hash_tensors(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        let start = self.size_bytes() - self.tensor_bytes();
        for (name, raw) in &self.tensors {
            hasher.update(&(name.len() as u64).to_le_bytes());
            hasher.update(name.as_bytes());
            let numbers = [u64::from(raw.type_id), raw.offset - start, raw.dims.len() as u64];
            numbers.iter().chain(&raw.dims).for_each(|number| {
                hasher.update(&number.to_le_bytes());
            });
        }
        hasher.update_rayon(&self.map[start as usize..]);
        *hasher.finalize().as_bytes()
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
    ) -> Result<T, GgufError> {
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
    ) -> Result<Option<T>, GgufError> {
        if self.get(key).is_none() {
            return Ok(None);
        }
        self.require(key, what, as_type).map(Some)
    }

    /// The error of a metadata key.
    pub fn key_error(&self, key: &str, reason: String) -> GgufError {
        GgufError::Key { path: self.path.clone(), key: key.to_owned(), reason }
    }

    /// The error of a tensor.
    pub fn tensor_error(&self, tensor: &str, reason: String) -> GgufError {
        GgufError::Tensor { path: self.path.clone(), tensor: tensor.to_owned(), reason }
    }

    /// The tensor `name` with `rows` rows of `columns` values (a vector has one row).
    ///
    /// # Errors
    /// When it is missing, of another shape or of a type that is not supported, or reaches past the end of the file.
    pub fn tensor(&self, name: &str, rows: usize, columns: usize) -> Result<Tensor, GgufError> {
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
            self.tensor_error(name, format!("has rows of {columns} values, not a multiple of {BLOCK_LEN}"))
        })?;
        let bytes = row_bytes as u64 * rows as u64;
        let end = raw.offset.checked_add(bytes).filter(|&end| end <= self.size_bytes()).ok_or_else(|| {
            let size = self.size_bytes();
            self.tensor_error(
                name,
                format!("ends past the file: {bytes} bytes at offset {}, file has {size}", raw.offset),
            )
        })?;
        Ok(Tensor::mapped(name, storage, rows, columns, Arc::clone(&self.map), raw.offset as usize..end as usize))
    }
}

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Smallest entry that a header can hold: used to refuse forged counts.
const MIN_ENTRY_BYTES: u64 = 12;

fn parse(bytes: &[u8]) -> Result<(Metadata, BTreeMap<String, RawTensor>), String> {
    let mut cursor = Cursor::new(bytes);
    let magic = cursor.take(4, "magic")?;
    if magic != MAGIC {
        return Err(format!("starts with {magic:02x?}, not with \"GGUF\""));
    }
    let version = cursor.u32("version")?;
    if !(2..=3).contains(&version) {
        return Err(format!("GGUF version {version}, supported are 2 and 3"));
    }
    let num_tensors = cursor.count("tensor count", MIN_ENTRY_BYTES)?;
    let num_keys = cursor.count("metadata count", MIN_ENTRY_BYTES)?;
    let metadata = Metadata::parse(&mut cursor, num_keys)?;
    let alignment = match metadata.get("general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some(value) => value
            .as_u64()
            .filter(|alignment| alignment.is_power_of_two() && *alignment <= 1 << 20)
            .ok_or_else(|| format!("general.alignment is {value:?}, not a power of two"))?,
    };
    let mut tensors = BTreeMap::new();
    for index in 0..num_tensors {
        let (name, raw) =
            parse_tensor(&mut cursor).map_err(|reason| format!("tensor {index} of {num_tensors}: {reason}"))?;
        if tensors.insert(name.clone(), raw).is_some() {
            return Err(format!("tensor `{name}` is listed twice"));
        }
    }
    let data_start = cursor.position().next_multiple_of(alignment);
    for (name, raw) in &mut tensors {
        raw.offset =
            raw.offset.checked_add(data_start).ok_or_else(|| format!("tensor `{name}` has offset {}", raw.offset))?;
    }
    Ok((metadata, tensors))
}

fn parse_tensor(cursor: &mut Cursor<'_>) -> Result<(String, RawTensor), String> {
    let name = cursor.string("name")?.to_owned();
    let num_dims = cursor.u32("number of dimensions")?;
    if num_dims == 0 || num_dims > 4 {
        return Err(format!("`{name}` has {num_dims} dimensions"));
    }
    let mut dims = Vec::new();
    for _ in 0..num_dims {
        dims.push(cursor.u64("dimension")?);
    }
    // Trailing dimensions of one say nothing: a vector may be written as [n, 1].
    while dims.len() > 1 && dims.last() == Some(&1) {
        dims.pop();
    }
    let type_id = cursor.u32("type")?;
    let offset = cursor.u64("offset")?;
    Ok((name, RawTensor { dims, type_id, offset }))
}
