//! A model directory as Hugging Face lays it out: `config.json`, safetensors (one or sharded), `tokenizer.json`,
//! `tokenizer_config.json` or `chat_template.jinja`, `generation_config.json`.
//!
//! Called by [`super::ModelFile::open`]; says everything in GGUF's terms, so that nothing behind it knows the difference.

mod config;
mod names;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value as Json;

use super::{Metadata, ModelFile, ModelFileError, Origin, RawTensor, StorageType, Value, map_file};

/// JSON files beside the weights are smaller than this; tokenisers of 262,144 tokens have some 33 MB.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Opens a directory.
///
/// # Errors
/// When a file that it must have is missing or cannot be read, or the model is of a kind that is not supported.
pub(super) fn open(directory: &Path) -> Result<ModelFile, ModelFileError> {
    let config = require_json(&directory.join("config.json"))?;
    let mut metadata = Metadata::default();
    let malformed = |file: &str, reason: String| ModelFileError::Malformed { path: directory.join(file), reason };
    let architecture = config::translate(&config, &mut metadata).map_err(|reason| malformed("config.json", reason))?;
    read_tokens(directory, &config, &mut metadata)?;
    let tokenizer = directory.join("tokenizer.json");
    let json = read(&tokenizer)?.ok_or_else(|| missing(&tokenizer))?;
    let tied = config.get("tie_word_embeddings").and_then(Json::as_bool).unwrap_or(false);
    let (mut maps, mut tensors) = (Vec::new(), BTreeMap::new());
    let files = weight_files(directory)?;
    for path in &files {
        let map = map_file(path)?;
        let bad = |reason: String| ModelFileError::Malformed { path: path.clone(), reason };
        for (name, mut raw) in parse(&map).map_err(bad)? {
            raw.map = maps.len();
            let known = match names::in_gguf(&name, architecture) {
                names::Name::Known(known) => known,
                names::Name::Computed => continue,
                names::Name::Unknown => name.clone(),
            };
            if tied && known == "output.weight" {
                continue;
            }
            if tensors.insert(known, raw).is_some() {
                return Err(bad(format!("tensor `{name}` is in an earlier file too")));
            }
        }
        maps.push(map);
    }
    Ok(ModelFile {
        path: directory.to_owned(),
        maps,
        files,
        metadata,
        tensors,
        origin: Origin::HuggingFace(json.into()),
    })
}

fn missing(path: &Path) -> ModelFileError {
    let reason = std::io::Error::new(std::io::ErrorKind::NotFound, "a model directory must have it");
    ModelFileError::Open { path: path.to_owned(), reason }
}

/// A file's bytes; `None` where there is none.
fn read(path: &Path) -> Result<Option<Vec<u8>>, ModelFileError> {
    let fail = |reason| ModelFileError::Open { path: path.to_owned(), reason };
    let len = match path.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(fail(error)),
        Ok(metadata) => metadata.len(),
    };
    if len > MAX_JSON_BYTES {
        let reason = format!("has {len} bytes: at most {MAX_JSON_BYTES} are read");
        return Err(ModelFileError::Malformed { path: path.to_owned(), reason });
    }
    std::fs::read(path).map(Some).map_err(fail)
}

fn json(path: &Path) -> Result<Option<Json>, ModelFileError> {
    let Some(bytes) = read(path)? else { return Ok(None) };
    let malformed = |error: serde_json::Error| ModelFileError::Malformed {
        path: path.to_owned(),
        reason: format!("is no JSON: {error}"),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(malformed)
}

fn require_json(path: &Path) -> Result<Json, ModelFileError> {
    json(path)?.ok_or_else(|| missing(path))
}

/// The files of weights: those that the index names, else `model.safetensors`, else all there are.
fn weight_files(directory: &Path) -> Result<Vec<PathBuf>, ModelFileError> {
    let index = directory.join("model.safetensors.index.json");
    if let Some(json) = json(&index)? {
        let malformed = |reason: String| ModelFileError::Malformed { path: index.clone(), reason };
        let map = json.get("weight_map").and_then(Json::as_object);
        let map = map.ok_or_else(|| malformed("has no `weight_map`".into()))?;
        let names: BTreeSet<&str> = map.values().filter_map(Json::as_str).collect();
        // A name is a file of this directory, and not a path to another.
        if let Some(name) = names.iter().find(|name| Path::new(name).file_name().is_none_or(|file| file != **name)) {
            return Err(malformed(format!("names `{name}`, which is no file's name")));
        }
        return Ok(names.into_iter().map(|name| directory.join(name)).collect());
    }
    let single = directory.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let fail = |reason| ModelFileError::Open { path: directory.to_owned(), reason };
    let mut found = Vec::new();
    for entry in directory.read_dir().map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            found.push(path);
        }
    }
    found.sort_unstable();
    if found.is_empty() { Err(missing(&single)) } else { Ok(found) }
}

/// The tensors of one safetensors file's bytes.
pub(super) fn parse(bytes: &[u8]) -> Result<Vec<(String, RawTensor)>, String> {
    let (header_len, header) =
        SafeTensors::read_metadata(bytes).map_err(|error| format!("safetensors header: {error}"))?;
    // A length of eight bytes, the header, the data.
    let data_start = header_len as u64 + 8;
    let mut tensors = Vec::new();
    for (name, info) in header.tensors() {
        let type_id = match info.dtype {
            Dtype::F32 => StorageType::F32.id(),
            Dtype::F16 => StorageType::F16.id(),
            Dtype::BF16 => StorageType::BF16.id(),
            other => return Err(format!("tensor `{name}` has type {other:?}; supported are F32, F16 and BF16")),
        };
        let offset = data_start.checked_add(info.data_offsets.0 as u64);
        let offset = offset.ok_or_else(|| format!("tensor `{name}` has offset {}", info.data_offsets.0))?;
        // Fastest-varying first.
        let mut dims: Vec<u64> = info.shape.iter().rev().map(|&dim| dim as u64).collect();
        while dims.len() > 1 && dims.last() == Some(&1) {
            dims.pop();
        }
        tensors.push((name, RawTensor { dims, type_id, map: 0, offset }));
    }
    Ok(tensors)
}

/// Chat template, how tokens are chosen, and those that begin and end a text, by name or number.
fn read_tokens(directory: &Path, config: &Json, metadata: &mut Metadata) -> Result<(), ModelFileError> {
    let settings = json(&directory.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
    let generation = json(&directory.join("generation_config.json"))?.unwrap_or(Json::Null);
    let template = match read(&directory.join("chat_template.jinja"))? {
        Some(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
        None => default_template(&settings["chat_template"]),
    };
    if let Some(template) = template {
        metadata.set("tokenizer.chat_template", Value::String(template));
    }
    // A token is its text, or an object that holds it.
    let text = |token: &Json| token.as_str().or(token["content"].as_str()).map(str::to_owned);
    for (name, key) in [("bos_token", "tokenizer.bos_token"), ("eos_token", "tokenizer.eos_token")] {
        if let Some(text) = text(&settings[name]) {
            metadata.set(key, Value::String(text));
        }
    }
    for (name, key) in [
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ] {
        let value = match &generation[name] {
            Json::Null => continue,
            Json::Number(number) => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            // Said to be no number when it is asked for.
            other => Value::String(other.to_string()),
        };
        metadata.set(&format!("general.sampling.{key}"), value);
    }
    // One number, or several.
    let listed = [&generation["eos_token_id"], &config["eos_token_id"]].into_iter().flat_map(|ids| match ids {
        Json::Array(ids) => ids.clone(),
        id => vec![id.clone()],
    });
    let ids: Vec<i64> = listed.filter_map(|id| id.as_i64()).collect();
    if !ids.is_empty() {
        metadata.set("tokenizer.eos_token_ids", Value::Array(super::Array::Integers(ids)));
    }
    Ok(())
}

/// A template, or the one named `default` of several.
fn default_template(template: &Json) -> Option<String> {
    let of = |named: &Json| named["template"].as_str().map(str::to_owned);
    template.as_str().map(str::to_owned).or_else(|| {
        let named = template.as_array()?;
        named.iter().find(|named| named["name"] == "default").or(named.first()).and_then(of)
    })
}
