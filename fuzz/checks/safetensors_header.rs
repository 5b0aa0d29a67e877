//! Weights of any bytes in a Hugging Face directory: refused with a reason, or opened and read, without a crash.

use engine::model::ModelConfig;
use engine::model_file::ModelFile;

const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 4, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": true
}"#;

pub fn check(bytes: &[u8]) {
    let directory = std::env::temp_dir().join(format!("pagoda-fuzz-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    std::fs::write(directory.join("config.json"), CONFIG).unwrap();
    std::fs::write(directory.join("tokenizer.json"), "{}").unwrap();
    std::fs::write(directory.join("model.safetensors"), bytes).unwrap();
    match ModelFile::open(&directory) {
        Err(error) => assert!(error.to_string().contains("pagoda-fuzz"), "the file is named: {error}"),
        Ok(file) => {
            drop(ModelConfig::of(&file));
            for name in file.tensor_names() {
                drop(file.tensor(name, 4, 32).map(|tensor| tensor.to_f32()));
            }
        }
    }
    std::fs::remove_dir_all(&directory).unwrap();
}
