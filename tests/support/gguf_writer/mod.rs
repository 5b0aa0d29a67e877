//! Writes GGUF files: what the tests' own models are made with, and what the reader is tested against.

mod blocks;

use engine::model_file::{ModelFile, StorageType, Tensor};
use half::f16;
use std::path::Path;

/// A metadata value.
pub enum Meta {
    U32(u32),
    F32(f32),
    Bool(bool),
    Str(&'static str),
    Strings(Vec<String>),
    I32s(Vec<i32>),
}

/// A tensor's stored bytes.
pub struct Stored {
    pub name: String,
    /// Fastest-varying first.
    pub dims: Vec<u64>,
    pub type_id: u32,
    pub bytes: Vec<u8>,
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn meta(out: &mut Vec<u8>, value: &Meta) {
    let mut tagged = |id: u32, bytes: &[u8]| {
        out.extend(id.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Meta::U32(value) => tagged(4, &value.to_le_bytes()),
        Meta::F32(value) => tagged(6, &value.to_le_bytes()),
        Meta::Bool(value) => tagged(7, &[u8::from(*value)]),
        Meta::Str(text) => {
            tagged(8, &[]);
            string(out, text);
        }
        Meta::Strings(texts) => {
            tagged(9, &8u32.to_le_bytes());
            out.extend((texts.len() as u64).to_le_bytes());
            texts.iter().for_each(|text| string(out, text));
        }
        Meta::I32s(values) => {
            tagged(9, &5u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|value| out.extend(value.to_le_bytes()));
        }
    }
}

/// The bytes of a GGUF version 3 file.
pub fn gguf(metadata: &[(&str, Meta)], tensors: &[Stored]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        string(&mut out, key);
        meta(&mut out, value);
    }
    let mut offset = 0u64;
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        tensor.dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend(tensor.type_id.to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += tensor.bytes.len().next_multiple_of(32) as u64;
    }
    out.resize(out.len().next_multiple_of(32), 0);
    for tensor in tensors {
        out.extend(&tensor.bytes);
        out.resize(out.len().next_multiple_of(32), 0);
    }
    out
}

/// Stores values in a storage type: rounds to the nearest code of each block.
pub fn store(name: &str, storage: StorageType, rows: usize, columns: usize, values: &[f32]) -> Stored {
    let dims = if rows == 1 { vec![columns as u64] } else { vec![columns as u64, rows as u64] };
    let bytes = match storage {
        StorageType::F32 => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        StorageType::F16 => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        StorageType::BF16 => values.iter().flat_map(|value| half::bf16::from_f32(*value).to_le_bytes()).collect(),
        _ => values.chunks(storage.block_len()).flat_map(|block| blocks::store_block(storage, block)).collect(),
    };
    Stored { name: name.to_owned(), dims, type_id: storage.id(), bytes }
}

/// `len` values in −1..1.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    let mut state = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A random tensor through a real file and the real reader.
pub fn random_tensor(storage: StorageType, rows: usize, columns: usize, seed: u64) -> Tensor {
    let stored = store("t", storage, rows, columns, &random(rows * columns, seed));
    let file = tempfile::NamedTempFile::new().unwrap();
    write(file.path(), &gguf(&[], &[stored]));
    ModelFile::open(file.path()).unwrap().tensor("t", rows, columns).unwrap()
}

pub fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}
