//! Tiny random models as Hugging Face directories, from the golden file's configurations and seeds.

use super::gguf_writer::random;
use serde_json::{Value, json};
use std::path::Path;

/// A tensor of a golden model: name, shape, values.
pub struct TinyTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// The golden file's models.
pub fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/architectures.json")).unwrap()
}

/// The tensors of a golden model.
pub fn tensors(model: &Value) -> Vec<TinyTensor> {
    let tensor = |entry: &Value| {
        let shape: Vec<usize> = entry[1].as_array().unwrap().iter().map(|dim| dim.as_u64().unwrap() as usize).collect();
        let (gain, offset) = (entry[3].as_f64().unwrap() as f32, entry[4].as_f64().unwrap() as f32);
        let values = random(shape.iter().product(), entry[2].as_u64().unwrap());
        let values = values.into_iter().map(|value| offset + value * gain).collect();
        TinyTensor { name: entry[0].as_str().unwrap().to_owned(), shape, values }
    };
    model["tensors"].as_array().unwrap().iter().map(tensor).collect()
}

/// The bytes of a safetensors file; `dtype` is F32 or BF16.
pub fn safetensors(tensors: &[TinyTensor], dtype: &str) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for tensor in tensors {
        let start = data.len();
        for value in &tensor.values {
            match dtype {
                "BF16" => data.extend(half::bf16::from_f32(*value).to_le_bytes()),
                _ => data.extend(value.to_le_bytes()),
            }
        }
        let entry = json!({ "dtype": dtype, "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(tensor.name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

/// A byte-level tokeniser of 96 tokens: printable letters, the space, and an end.
pub fn tokenizer_json() -> Value {
    let letters = (0x21..=0x7eu8).map(|byte| (byte as char).to_string()).chain(["\u{120}".to_owned()]);
    let vocab: serde_json::Map<String, Value> = letters.zip(0..).map(|(letter, id)| (letter, json!(id))).collect();
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{ "id": 95, "content": "<eos>", "single_word": false, "lstrip": false, "rstrip": false,
                           "normalized": false, "special": true }],
        "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": [] },
    })
}

/// Writes a golden model as a directory, its weights in one file or two.
pub fn write(directory: &Path, model: &Value, dtype: &str, is_sharded: bool) {
    let file = |name: &str| directory.join(name);
    let json = |name: &str, value: &Value| std::fs::write(file(name), value.to_string()).unwrap();
    json("config.json", &model["config"]);
    json("tokenizer.json", &tokenizer_json());
    json(
        "tokenizer_config.json",
        &json!({ "eos_token": { "content": "<eos>" }, "chat_template": "{{ messages[0].content }}" }),
    );
    json("generation_config.json", &json!({ "eos_token_id": [95] }));
    let mut tensors = tensors(model);
    if !is_sharded {
        return std::fs::write(file("model.safetensors"), safetensors(&tensors, dtype)).unwrap();
    }
    let second = tensors.split_off(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    for (name, tensors) in
        [("model-00001-of-00002.safetensors", &tensors), ("model-00002-of-00002.safetensors", &second)]
    {
        std::fs::write(file(name), safetensors(tensors, dtype)).unwrap();
        map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), json!(name))));
    }
    json("model.safetensors.index.json", &json!({ "metadata": {}, "weight_map": map }));
}
