//! A GGUF file of any bytes: refused with a reason, or opened and read into what an engine starts from, without a crash.

use engine::chat_template::ChatTemplate;
use engine::model::ModelConfig;
use engine::model_file::ModelFile;
use engine::sampling_defaults::SamplingDefaults;
use engine::tokenizer::Tokenizer;

pub fn check(bytes: &[u8]) {
    let path = std::env::temp_dir().join(format!("pagoda-fuzz-{}.gguf", std::process::id()));
    std::fs::write(&path, bytes).unwrap();
    match ModelFile::open(&path) {
        Err(error) => assert!(error.to_string().contains("pagoda-fuzz"), "the file is named: {error}"),
        Ok(file) => {
            drop((ModelConfig::of(&file), SamplingDefaults::of(&file)));
            if let Ok(tokenizer) = Tokenizer::of(&file) {
                drop((tokenizer.encode("Hello world", true), ChatTemplate::of(&file, &tokenizer)));
            }
            for name in file.tensor_names() {
                // As the loader asks, which knows the shape; a wrong one is an error.
                drop(file.tensor(name, 1, 32).map(|tensor| tensor.to_f32()));
            }
        }
    }
    std::fs::remove_file(&path).unwrap();
}
