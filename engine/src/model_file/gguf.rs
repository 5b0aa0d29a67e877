//! GGUF files: header, metadata and the list of tensors; one file, or the parts of a split one.
//!
//! Called by [`super::ModelFile::open`]. Invariant: no number of a file is trusted. Every count, length and offset is checked
//! against the file's size before it is used, so a forged file is an error, not an allocation. Versions 2 and 3, little-endian.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use super::cursor::Cursor;
use super::{Metadata, ModelFile, ModelFileError, Origin, RawTensor, map_file};

/// Opens a file, and the other parts where it is the first of several (`NAME-00001-of-00003.gguf`).
///
/// # Errors
/// When a file cannot be mapped, its header is malformed, or a part is missing or another's.
pub(super) fn open(path: &Path) -> Result<ModelFile, ModelFileError> {
    let (map, metadata, mut tensors) = open_part(path, 0)?;
    let (mut maps, mut files) = (vec![map], vec![path.to_owned()]);
    let num_parts = number(&metadata, "split.count").unwrap_or(1);
    if num_parts > 1 {
        let malformed = |reason: String| ModelFileError::Malformed { path: path.to_owned(), reason };
        let number_of = number(&metadata, "split.no").unwrap_or(0);
        if number_of != 0 {
            return Err(malformed(format!("is part {} of {num_parts}: give the first part", number_of + 1)));
        }
        for index in 1..num_parts {
            let part = part_path(path, index, num_parts).map_err(malformed)?;
            let (map, metadata, more) = open_part(&part, maps.len())?;
            let found = (number(&metadata, "split.no"), number(&metadata, "split.count"));
            if found != (Some(index), Some(num_parts)) {
                let reason = format!("says it is part {:?} of {:?}, not {index} of {num_parts}", found.0, found.1);
                return Err(ModelFileError::Malformed { path: part, reason });
            }
            maps.push(map);
            files.push(part.clone());
            for (name, raw) in more {
                if tensors.contains_key(&name) {
                    let reason = format!("tensor `{name}` is in an earlier part too");
                    return Err(ModelFileError::Malformed { path: part, reason });
                }
                tensors.insert(name, raw);
            }
        }
    }
    Ok(ModelFile { path: path.to_owned(), maps, files, metadata, tensors, origin: Origin::Gguf })
}

/// More parts than any model has.
const MAX_PARTS: u64 = 4096;

fn number(metadata: &Metadata, key: &str) -> Option<u64> {
    metadata.get(key)?.as_u64()
}

/// The file of part `index` (from 0), named beside the first.
fn part_path(first: &Path, index: u64, num_parts: u64) -> Result<PathBuf, String> {
    let name = first.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let ending = format!("-00001-of-{num_parts:05}.gguf");
    match name.strip_suffix(&ending) {
        Some(stem) if num_parts <= MAX_PARTS => {
            Ok(first.with_file_name(format!("{stem}-{:05}-of-{num_parts:05}.gguf", index + 1)))
        }
        _ => Err(format!("is the first of {num_parts} parts, so its name should end with `{ending}`")),
    }
}

type Part = (Arc<Mmap>, Metadata, BTreeMap<String, RawTensor>);

fn open_part(path: &Path, map_index: usize) -> Result<Part, ModelFileError> {
    let map = map_file(path)?;
    let malformed = |reason| ModelFileError::Malformed { path: path.to_owned(), reason };
    let (metadata, mut tensors) = parse(&map).map_err(malformed)?;
    tensors.values_mut().for_each(|raw| raw.map = map_index);
    Ok((map, metadata, tensors))
}

const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
/// Smallest entry that a header can hold: used to refuse forged counts.
const MIN_ENTRY_BYTES: u64 = 12;

/// Header, metadata and tensors of one file's bytes.
pub(super) fn parse(bytes: &[u8]) -> Result<(Metadata, BTreeMap<String, RawTensor>), String> {
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
    Ok((name, RawTensor { dims, type_id, map: 0, offset }))
}
